"""From a config to what the loop needs: target, draft head, samples. Every data-dependent check is made
here.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from eagle_train.config import TrainConfig
from eagle_train.data.collator import BucketingCollator
from eagle_train.data.loading import DataReport, load_samples
from eagle_train.data.samples import Sample, truncate
from eagle_train.errors import InputError
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.target import (
    FrozenTarget,
    check_rope,
    draft_config,
    load_target,
    probe_target,
    read_target_config,
    resolve_aux_layer_ids,
)
from eagle_train.model.vocab import choose_draft_vocabulary
from eagle_train.objective.losses import DEFAULT_CHUNK_ROWS

DEMO = Path(__file__).parents[1] / "demo"  # the bundled target and its conversations
DEMO_NAME = "demo"  # --target under which they go
OWN_TOKEN_ROWS = 4096  # tokens on which the share of the target's own ones is taken at start


@dataclass(frozen=True, slots=True)
class LengthReport:
    """What fitting samples into the length limit did: counts of samples and tokens."""

    limit: int
    truncated_samples: int
    truncated_tokens: int
    dropped_samples: int
    dropped_tokens: int
    unsupervised_samples: int


@dataclass(frozen=True, slots=True)
class SplitReport:
    """How a data split came about."""

    data: DataReport
    length: LengthReport


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that a run trains and validates with."""

    target: FrozenTarget
    target_name: str
    head: Eagle3DraftHead
    train_samples: list[Sample]
    heldout_samples: list[Sample]
    train_report: SplitReport
    heldout_report: SplitReport | None  # None: split off the training data
    draft_vocab_coverage: float
    own_token_share: float


def prepare(config: TrainConfig) -> Prepared:
    """Load and check everything; the order puts cheap checks first."""
    if config.target is None:
        raise InputError(
            "--target is not named; name a model and --data, or run without a --config for the demo"
        )
    is_demo = config.target == DEMO_NAME
    target_name = str(DEMO / "target") if is_demo else config.target
    train_paths = [Path(path) for path in config.data] or [DEMO / "train.jsonl"]
    eval_paths = [Path(path) for path in config.eval_data] or (
        [] if config.data else [DEMO / "heldout.jsonl"]
    )
    for path in [*train_paths, *eval_paths]:
        if not path.is_file():
            found = "is not a file" if path.exists() else "does not exist"
            raise InputError(f"{path} {found}; --data and --eval_data name JSONL files")
    target_config = read_target_config(target_name, config.trust_remote_code)
    aux_layer_ids = resolve_aux_layer_ids(target_config.num_hidden_layers, config.aux_layer_ids)
    check_rope(target_config, config.training_seq_len)
    device = choose_device(config.device)
    tokenizer = load_tokenizer(target_name, config)
    train_samples, train_report = _load_split(
        train_paths, tokenizer, target_config, config, config.max_samples
    )
    heldout_report = None
    if eval_paths:
        heldout_samples, heldout_report = _load_split(
            eval_paths, tokenizer, target_config, config, config.max_eval_samples
        )
    else:
        train_samples, heldout_samples = split_off(
            train_samples, config.eval_fraction, config.seed, config.max_eval_samples
        )
    target = load_target(
        target_name,
        dtype=choose_dtype(config.dtype, device),
        device=device,
        aux_layer_ids=aux_layer_ids,
        trust_remote_code=config.trust_remote_code,
    )
    probe_target(target)
    head, coverage = make_draft_head(target, tokenizer, train_samples, config)
    return Prepared(
        target=target,
        target_name="the bundled demo target" if is_demo else config.target,
        head=head,
        train_samples=train_samples,
        heldout_samples=heldout_samples,
        train_report=train_report,
        heldout_report=heldout_report,
        draft_vocab_coverage=coverage,
        own_token_share=own_token_share(target, train_samples),
    )


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
            raise InputError(f"--chat_template {path} does not exist")
        try:
            tokenizer.chat_template = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"--chat_template {path} is not UTF-8 text; save it as such") from error
    return tokenizer


def _load_split(
    paths: list[Path],
    tokenizer: PreTrainedTokenizerBase,
    target_config: Any,
    config: TrainConfig,
    max_rows: int | None,
) -> tuple[list[Sample], SplitReport]:
    samples, data_report = load_samples(
        paths,
        tokenizer,
        vocab_size=target_config.vocab_size,
        train_on="last" if config.train_on == "last" else "all",
        template_options=config.parsed_template_options(),
        role_map=config.parsed_role_map(),
        on_bad_row="skip" if config.on_bad_row == "skip" else "error",
        max_rows=max_rows,
    )
    limit = min(
        config.training_seq_len, getattr(target_config, "max_position_embeddings", config.training_seq_len)
    )
    kept, length_report = fit_length(samples, limit, config.overlong)
    if not kept:
        raise InputError(
            f"{', '.join(map(str, paths))}: none of {len(samples)} samples has a supervised row "
            f"within {limit} tokens (the shortest has {min(map(len, samples))}); raise "
            "--training_seq_len, or check the data"
        )
    return kept, SplitReport(data_report, length_report)


def fit_length(samples: list[Sample], limit: int, overlong: str) -> tuple[list[Sample], LengthReport]:
    """Apply --overlong, then leave out samples in which no row is supervised; everything is counted.

    Raises InputError for an over-long sample under "error".
    """
    kept, truncated, dropped = [], [], []
    unsupervised = 0
    for sample in samples:
        if len(sample) > limit:
            if overlong == "error":
                raise InputError(
                    f"{sample.source} has {len(sample)} tokens, the limit is {limit}; raise "
                    "--training_seq_len or use --overlong truncate or drop"
                )
            if overlong == "drop":
                dropped.append(len(sample))
                continue
            truncated.append(len(sample) - limit)
        fitted = truncate(sample, limit)
        if fitted.num_supervised_rows:
            kept.append(fitted)
        else:
            unsupervised += 1
    return kept, LengthReport(limit, len(truncated), sum(truncated), len(dropped), sum(dropped), unsupervised)


def split_off(
    samples: list[Sample], fraction: float, seed: int, most: int | None = None
) -> tuple[list[Sample], list[Sample]]:
    """Hold out about `fraction` of the conversations (at least one where there are two, at most `most`).

    Returns (train, held-out).

    Samples of one conversation stay together, so none is trained on and validated with.
    """
    sources = list(dict.fromkeys(sample.source for sample in samples))
    num_heldout = min(max(round(fraction * len(sources)), int(fraction > 0)), len(sources) - 1)
    num_heldout = num_heldout if most is None else min(num_heldout, most)
    order = np.random.default_rng([seed, 1]).permutation(len(sources))
    heldout = {sources[index] for index in order[:num_heldout]}
    return (
        [sample for sample in samples if sample.source not in heldout],
        [sample for sample in samples if sample.source in heldout],
    )


def make_draft_head(
    target: FrozenTarget, tokenizer: PreTrainedTokenizerBase, samples: list[Sample], config: TrainConfig
) -> tuple[Eagle3DraftHead, float]:
    """A fresh head on the target's device, and the share of supervised tokens that its vocabulary covers."""
    counts, closing_tokens = answer_token_counts(samples, target.vocab_size)
    always = {*tokenizer.all_special_ids, *closing_tokens}
    ids, coverage = choose_draft_vocabulary(counts, config.draft_vocab_size, always)
    torch.manual_seed(config.seed)
    head = Eagle3DraftHead(draft_config(target, len(ids), config.draft_intermediate_size)).to(target.device)
    head.set_vocabulary(ids)
    example = target.features(BucketingCollator(1)(samples[:1]).to(target.device))
    head.start_from_target(target.lm_head.weight, target.final_norm_weight(), example.aux_hidden_states)
    return head, coverage


def own_token_share(target: FrozenTarget, samples: list[Sample]) -> float:
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


def answer_token_counts(samples: list[Sample], vocab_size: int) -> tuple[np.ndarray, list[int]]:
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
