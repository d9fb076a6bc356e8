"""--init_from: a training that starts from a trained draft head. Rows of its output head belong to tokens, so
another draft vocabulary moves them by token.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_train.bundled import DEMO_NAME
from eagle_train.config import TrainConfig
from eagle_train.decode.check import is_embedding_of
from eagle_train.errors import InputError
from eagle_train.export.check_target import target_findings
from eagle_train.export.record import START_DIGEST, RunRecord, read_run_record
from eagle_train.model.checkpoint import draft_head_of
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.layouts import StoredHead, aux_layer_ids, read_stored_head, rope_of, weight_files
from eagle_train.model.target import Target
from eagle_train.model.target_config import draft_config, resolve_aux_layer_ids

MOST_NAMED = 5  # tokens that a note names
DIGEST_DIGITS = 12
HASHED_BYTES = 2**20  # read at a time


@dataclass(frozen=True, slots=True)
class StartHead:
    """A head as it was stored: float32, on the CPU. embedding_VH: its own table, where it brings one; record:
    of the run beside it; digest: of the weights of --init_from, as they were when the run began.
    """

    directory: Path
    layout: str
    head: Eagle3DraftHead
    aux_layer_ids: tuple[int, int, int]
    embedding_VH: Tensor | None
    record: RunRecord
    digest: str | None


@dataclass(frozen=True, slots=True)
class WarmStart:
    """What a run took over, as told. text: one line; values: the same for metrics.jsonl; notes: what the user
    should know about it.
    """

    text: str
    values: dict[str, str | int]
    notes: tuple[str, ...]


def read_start_head(config: TrainConfig, target_name: str, target_config: Any) -> StartHead | None:
    """The head that training starts from, checked against the target's config alone; None: a fresh one.

    Under --resume it is the run's saved state (in runs of earlier versions its kept head, of the same sizes),
    so that --init_from may be gone by then. Raises InputError where it does not fit target or options.
    """
    if config.init_from is None:
        return None
    directory = Path(config.output_dir if config.resume else config.init_from)
    has_state = config.resume and (directory / "state" / "config.json").is_file()
    flag = "--resume" if config.resume else "--init_from"
    if not (config.resume or directory.is_dir()):
        remedy = "name its directory" if directory.is_file() else "a published head is downloaded first"
        raise InputError(
            f"--init_from {directory} is no directory here; it must be a local directory that holds a "
            f"trained draft head (config.json and .safetensors files); {remedy}"
        )
    try:
        stored = read_stored_head(directory / "state" if has_state else directory)
        head = draft_head_of(stored)
        record = read_run_record(directory)
    except InputError as error:
        raise InputError(f"{flag}: {error}") from error
    if faults := _mismatches(stored, target_config, record):
        raise InputError(
            f"{flag} {directory} does not fit the target {target_name}: {'; '.join(faults)}. Name the target "
            "that the head was trained for, or another head"
        )
    layers = resolve_aux_layer_ids(target_config.num_hidden_layers, head.config.aux_layer_ids)
    for option, named, own in (
        ("aux_layer_ids", config.aux_layer_ids, layers),
        ("draft_intermediate_size", config.draft_intermediate_size, head.config.intermediate_size),
    ):
        if named is not None and named != own:
            raise InputError(
                f"--{option} is {_words(named)}, but the head in {flag} {directory} has {_words(own)}; drop "
                f"--{option} (--{option} none, where a config file names it), or start without --init_from"
            )
    embedding_VH = stored.tensors.get("embed_tokens.weight")
    digest = record.start_digest if config.resume else weights_digest(directory)
    return StartHead(directory, stored.layout, head, layers, embedding_VH, record, digest)


def weights_digest(directory: Path) -> str:
    """First hex digits of the SHA-256 over a head's safetensors files, in the order of their names."""
    digest = hashlib.sha256()
    for path in weight_files(directory):
        with path.open("rb") as file:
            while block := file.read(HASHED_BYTES):
                digest.update(block)
    return digest.hexdigest()[:DIGEST_DIGITS]


def _mismatches(stored: StoredHead, target_config: Any, record: RunRecord) -> list[str]:
    """Faults beside the target, without the position limit, because the head gets the target's."""
    limit = getattr(target_config, "max_position_embeddings", None)
    flat = stored.flat | {"max_position_embeddings": limit}
    findings = target_findings(replace(stored, flat=flat), target_config, None, record)
    faults = [finding.text for finding in findings if finding.is_fault]
    layers = aux_layer_ids(stored.flat)
    if layers and sorted(set(layers)) != layers:
        faults.append(f"aux layers {layers} do not rise, as training reads them")
    return faults


def _words(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


@torch.no_grad()
def warm_head(start: StartHead, target: Target, draft_token_ids: Tensor) -> Eagle3DraftHead:
    """The stored head, bit for bit, under the sorted target ids `[V_d]`, on the target's device.

    A token that the head knows keeps its row. A new one starts as the target's row, as in a fresh head: the
    trained rows of our heads started there too. For a demo head of 1,200 tokens that gets 848 more, scaling
    such rows to the trained rows' norm changed nothing, and zeros were a little worse.
    """
    own = start.head
    from_target = draft_config(target, len(draft_token_ids))
    head = Eagle3DraftHead(
        replace(
            own.config,
            draft_vocab_size=len(draft_token_ids),
            max_position_embeddings=from_target.max_position_embeddings,
            aux_layer_ids=from_target.aux_layer_ids,
        )
    )
    head.set_vocabulary(draft_token_ids)
    own_row_V = torch.full((own.config.vocab_size,), -1)
    own_row_V[own.draft_token_ids] = torch.arange(own.config.draft_vocab_size)
    own_row_Vd = own_row_V[draft_token_ids]
    is_new_Vd = own_row_Vd < 0
    rows_VdH = own.lm_head.weight[own_row_Vd.clamp(min=0)]
    rows_VdH[is_new_Vd] = target.lm_head.weight[draft_token_ids[is_new_Vd].to(target.device)].float().cpu()
    maps = {"d2t": head.d2t, "t2d": head.t2d}
    head.load_state_dict(own.state_dict() | maps | {"lm_head.weight": rows_VdH})
    return head.to(target.device)


def describe_start(
    start: StartHead, config: TrainConfig, target: Target, draft_token_ids: Tensor, absent: Sequence[str]
) -> WarmStart:
    """What is taken over. absent: supervised special and closing tokens that the vocabulary lacks."""
    assert config.init_from is not None
    digest = {START_DIGEST: start.digest} if start.digest else {}
    notes = _pair_notes(start, config, target)
    if absent:
        more = f" and {len(absent) - MOST_NAMED} more" if len(absent) > MOST_NAMED else ""
        notes.append(
            f"the draft vocabulary of {config.init_from} lacks {len(absent)} special or closing tokens of "
            f"these answers ({', '.join(absent[:MOST_NAMED])}{more}), which the head can never propose; "
            "--draft_vocab_size N chooses a vocabulary from these data"
        )
    if config.resume:
        text = f"{config.init_from}; the run goes on from its saved state"
        return WarmStart(text, {"init_from": config.init_from, **digest}, tuple(notes))
    kept = int(torch.isin(draft_token_ids, start.head.draft_token_ids).sum())
    new, dropped = len(draft_token_ids) - kept, start.head.config.draft_vocab_size - kept
    rows = f"{kept:,} rows of the draft vocabulary kept, {new:,} new"
    rows += " (they start as the target's)" if new else ""
    rows += f", {dropped:,} dropped" if dropped else ""
    if new or dropped:
        notes.append(
            f"--draft_vocab_size {config.draft_vocab_size} chose a vocabulary from these data, with {new:,} "
            f"tokens that {config.init_from} lacks and without {dropped:,} of its own; --draft_vocab_size "
            "none keeps the head's own vocabulary"
        )
    return WarmStart(
        f"{config.init_from} ({start.layout} layout); {rows}",
        {
            "init_from": config.init_from,
            **digest,
            "rows_kept": kept,
            "rows_new": new,
            "rows_dropped": dropped,
        },
        tuple(notes),
    )


def _pair_notes(start: StartHead, config: TrainConfig, target: Target) -> list[str]:
    """What head and target do not share, and may legitimately not."""
    notes = []
    named = config.target or DEMO_NAME
    if not config.mock_data and (other := start.record.other_target(named)):
        notes.append(
            f"{config.init_from} was trained for {other}, not for {named}: right if the one is fine-tuned "
            "from the other; the validation at step 0 tells how well it drafts"
        )
    own_base, base = start.head.config.rope_theta, rope_of(target.config.to_dict())[0]
    if own_base != base:
        notes.append(
            f"{config.init_from} rotates by a base of {own_base:,.0f}, the target by {base:,.0f}: it is "
            "kept, which is right if the head was trained so"
        )
    if start.embedding_VH is not None and not is_embedding_of(target, start.embedding_VH):
        notes.append(
            f"{config.init_from} has an embed_tokens.weight of its own that is not the target's; training "
            "goes on with the target's, so the head may first draft worse than with its own"
        )
    return notes
