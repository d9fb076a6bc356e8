"""From a config to what the loop needs: target, draft head, samples."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from eagle_train.bundled import DEMO_NAME, target_path
from eagle_train.config import TrainConfig
from eagle_train.config_checks import ISOLATED
from eagle_train.data.collator import BucketingCollator
from eagle_train.data.samples import Sample
from eagle_train.errors import InputError
from eagle_train.export.record import RunRecord
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.mock_target import MockTarget, mock_config, parse_mock_target
from eagle_train.model.target import Target, load_target, probe_target
from eagle_train.model.target_config import (
    check_rope,
    draft_config,
    read_target_config,
    resolve_aux_layer_ids,
)
from eagle_train.model.vocab import choose_draft_vocabulary, vocabulary_coverage
from eagle_train.objective.losses import DEFAULT_CHUNK_ROWS
from eagle_train.train.option_notes import option_notes, own_token_notes
from eagle_train.train.splits import PreparedData, prepare_data
from eagle_train.train.warm_start import StartHead, WarmStart, describe_start, read_start_head, warm_head

MOCK_TARGET_NAME = "random features"
RENAMED_SHARE = 0.01  # of a vocabulary; fine-tuned targets give reserved tokens names
OWN_TOKEN_ROWS = 4096  # tokens on which the share of the target's own ones is taken at start


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that a run trains and validates with. warm_start: None for a fresh head; notes: what is
    worth knowing about data and options.
    """

    target: Target
    target_name: str
    head: Eagle3DraftHead
    data: PreparedData
    draft_vocab_coverage: float
    own_token_share: float
    warm_start: WarmStart | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TargetSource:
    """What the options name as target, before any weight is read. is_demo: the bundled one; config: its text
    config; max_positions: the longest document that it can position, where it says so.
    """

    name: str
    is_demo: bool
    config: Any
    max_positions: int | None

    @property
    def vocab_size(self) -> int:
        size: int = self.config.vocab_size
        return size


def find_target(config: TrainConfig) -> TargetSource:
    """The target of --target or --mock_target, else the bundled one."""
    if config.mock_target:
        sizes = parse_mock_target(config.mock_target)
        return TargetSource(MOCK_TARGET_NAME, False, mock_config(*sizes), None)
    named = config.target or DEMO_NAME
    name = target_path(named)
    target_config = read_target_config(name, config.trust_remote_code)
    check_rope(target_config, config.training_seq_len)
    return TargetSource(
        name,
        named == DEMO_NAME,
        target_config,
        getattr(target_config, "max_position_embeddings", None),
    )


def prepare(
    config: TrainConfig, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> Prepared:
    """Load and check everything; the order puts cheap checks first. device, dtype: what --device and --dtype
    name, where they are not given.
    """
    device = device or choose_device(config.device)
    dtype = dtype or choose_dtype(config.dtype, device)
    if config.target is None and not config.mock_data:
        raise InputError(
            "--target is not named; name a model and --data, or run without a --config for the demo"
        )
    source = find_target(config)
    start = read_start_head(config, source.name, source.config)
    named_layers = start.aux_layer_ids if start else config.aux_layer_ids
    aux_layer_ids = resolve_aux_layer_ids(source.config.num_hidden_layers, named_layers)
    tokenizer = None if config.mock_data else load_tokenizer(source.name, config)
    if start and tokenizer:
        named = config.target or DEMO_NAME
        check_tokenizer(f"--init_from {config.init_from}", start.record, named, tokenizer)
    data = prepare_data(config, tokenizer, source.vocab_size, source.max_positions)
    target = open_target(source.name, config, device, dtype, aux_layer_ids)
    head, coverage, warm_start = make_draft_head(target, tokenizer, data.train_samples, config, start)
    own_share = own_token_share(target, data.train_samples)
    # Random tokens are nobody's own.
    about_answers = [] if config.mock_data else own_token_notes(own_share)
    return Prepared(
        target=target,
        target_name="the bundled demo target" if source.is_demo else source.name,
        head=head,
        data=data,
        draft_vocab_coverage=coverage,
        own_token_share=own_share,
        warm_start=warm_start,
        notes=(*data.notes, *option_notes(config, data), *about_answers),
    )


def open_target(
    name: str,
    config: TrainConfig,
    device: torch.device,
    dtype: torch.dtype,
    aux_layer_ids: tuple[int, int, int],
) -> Target:
    """The target that the options name, checked by a probe, or random features in its place."""
    if config.mock_target:
        hidden_size, num_layers, vocab_size = parse_mock_target(config.mock_target)
        return MockTarget(
            hidden_size, num_layers, vocab_size, dtype=dtype, device=device, aux_layer_ids=aux_layer_ids
        )
    own = config.attn_implementation == ISOLATED
    target = load_target(
        name,
        dtype=dtype,
        device=device,
        aux_layer_ids=aux_layer_ids,
        trust_remote_code=config.trust_remote_code,
        attn_implementation=None if own else config.attn_implementation,
    )
    probe_target(target)
    return target


def choose_device(name: str) -> torch.device:
    """--device as a torch device. Raises InputError for one that this machine lacks."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        # "meta" holds no values, some others cannot even be imported; sums are kept in float64
        torch.zeros(1, device=device, dtype=torch.float64).item()
    except (RuntimeError, AssertionError, ImportError, TypeError) as error:
        reason = str(error).splitlines()[0][:120]
        raise InputError(f"--device {name} cannot be used here ({reason}); use auto, cpu or cuda") from error
    return device


def choose_rank_device(name: str, given: torch.device | None) -> torch.device:
    """--device of one rank. given: what its launcher gives it; None: it is a process alone.

    Raises InputError where --device names another one, because each rank has a device of its own.
    """
    if given is None:
        return choose_device(name)
    if name != "auto" and torch.device(name) != torch.device(given.type):
        raise InputError(
            f"--device {name} cannot be had with several ranks, which choose their own devices (here "
            f"{given.type}); use --device {given.type}, or auto"
        )
    return given


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """--dtype; auto times a product, because bf16 is 4x faster on one CPU and slower on another."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    if device.type != "cpu":
        return torch.bfloat16
    seconds = {dtype: _matmul_seconds(dtype) for dtype in (torch.float32, torch.bfloat16)}
    # float32 is more exact, so bf16 must win clearly.
    return torch.bfloat16 if seconds[torch.bfloat16] < 0.7 * seconds[torch.float32] else torch.float32


def _matmul_seconds(dtype: torch.dtype) -> float:
    left, right = torch.ones(512, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    best = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - start)
    return best


def load_tokenizer(target_name: str, config: TrainConfig) -> PreTrainedTokenizerBase:
    """The target's tokenizer, with --chat_template in place of its own where named."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(target_name, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"--target {target_name}: its tokenizer could not be loaded ({reason}); put the tokenizer files "
            "that belong to the model beside it"
        ) from error
    if config.chat_template is not None:
        path = Path(config.chat_template)
        if not path.is_file():
            found = "is not a file" if path.exists() else "does not exist"
            raise InputError(f"--chat_template {path} {found}; name a file that holds a Jinja template")
        try:
            tokenizer.chat_template = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"--chat_template {path} is not UTF-8 text; save it as such") from error
    return tokenizer


def check_tokenizer(
    head: str, record: RunRecord, target_name: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Refuse, with InputError, a target that writes text in other tokens than the one that the run beside a
    head names. Not checked where no run says, or where that target is not at hand. head: as the error names
    it.
    """
    trained_for = record.other_target(target_name)
    if trained_for is None:
        return
    try:
        own = load_tokenizer(trained_for, TrainConfig())
    except InputError:
        return
    vocabulary, own_vocabulary = tokenizer.get_vocab(), own.get_vocab()
    different = [token for token, index in own_vocabulary.items() if vocabulary.get(token) != index]
    if len(different) > RENAMED_SHARE * len(own_vocabulary):
        raise InputError(
            f"{head} was trained with the tokenizer of {trained_for}, and {target_name} has "
            f"{len(different):,} of its {len(own_vocabulary):,} tokens not or under another id, such as "
            f"{different[0]!r}; use the target that the draft was trained for"
        )


def make_draft_head(
    target: Target,
    tokenizer: PreTrainedTokenizerBase | None,
    samples: Sequence[Sample],
    config: TrainConfig,
    start: StartHead | None,
) -> tuple[Eagle3DraftHead, float, WarmStart | None]:
    """The head on the target's device, fresh or from --init_from, the share of supervised tokens that its
    vocabulary covers, and what was taken over.
    """
    if tokenizer is None:  # mock data, where one token is as good as another
        counts, always = np.zeros(target.vocab_size, dtype=np.int64), set[int]()
    else:
        counts, closing_tokens = answer_token_counts(samples, target.vocab_size)
        always = {*tokenizer.all_special_ids, *closing_tokens}
    if start and (config.draft_vocab_size is None or config.resume):
        ids = start.head.draft_token_ids.sort().values
        coverage = vocabulary_coverage(counts, ids.numpy())
    else:
        ids, coverage = choose_draft_vocabulary(counts, config.draft_vocab_size, always)
    if tokenizer is None:
        coverage = len(ids) / target.vocab_size
    if start:
        head = warm_head(start, target, ids)
        absent = sorted(token for token in always - set(ids.tolist()) if counts[token])
        names = tokenizer.convert_ids_to_tokens(absent) if tokenizer and absent else []
        warm_start = describe_start(start, config, target, ids, names)
    else:
        head, warm_start = fresh_head(target, ids, samples, config), None
    head.gradient_checkpointing = config.gradient_checkpointing
    return head, coverage, warm_start


def fresh_head(
    target: Target, draft_token_ids: torch.Tensor, samples: Sequence[Sample], config: TrainConfig
) -> Eagle3DraftHead:
    """A head of the target's sizes and scale, the same on every rank."""
    torch.manual_seed(config.seed)
    sizes = draft_config(target, len(draft_token_ids), config.draft_intermediate_size)
    head = Eagle3DraftHead(sizes).to(target.device)
    head.set_vocabulary(draft_token_ids)
    example = target.features(BucketingCollator(1)(samples[:1]).to(target.device))
    head.start_from_target(target.lm_head.weight, target.final_norm_weight(), example.aux_hidden_states)
    return head


def own_token_share(target: Target, samples: Sequence[Sample]) -> float:
    """Share of the first samples' supervised tokens that are the target's arg-max: how far the data is its
    own.
    """
    own, total = 0, 0
    for sample in samples:
        batch = BucketingCollator(1)([sample]).to(target.device)
        final_hidden = target.features(batch).final_hidden
        for rows in torch.nonzero(batch.answer_remaining >= 2).squeeze(1).split(DEFAULT_CHUNK_ROWS):
            argmax = target.logits(final_hidden[rows + 1]).argmax(-1)
            own += int((argmax == batch.input_ids[rows + 2]).sum())
            total += len(rows)
        if total >= OWN_TOKEN_ROWS:
            break
    return own / total


def answer_token_counts(samples: Sequence[Sample], vocab_size: int) -> tuple[np.ndarray, list[int]]:
    """How often each id is an answer token `[V]`, and the ids that close at least one answer in ten.

    Closing tokens are found in the data, because a template may end turns with something else than eos.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    closing = np.zeros(vocab_size, dtype=np.int64)
    for sample in samples:
        following = sample.input_ids[1:]
        remaining = sample.answer_remaining[:-1]
        counts += np.bincount(following[remaining >= 1], minlength=vocab_size)
        if sample.num_cut_tokens:  # what lies at the cut closes nothing
            following, remaining = following[:-1], remaining[:-1]
        closing += np.bincount(following[remaining == 1], minlength=vocab_size)
    return counts, np.flatnonzero(closing * 10 >= max(closing.sum(), 1)).tolist()
