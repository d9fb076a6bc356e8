"""Checks of a training run's options that need no data; each names the value, the limit and the remedy."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_train.errors import InputError

if TYPE_CHECKING:
    from eagle_train.config import TrainConfig

ISOLATED = "isolated"  # --attn_implementation that keeps the documents of a row apart
MOCK_OPTIONS = ("mock_num_samples", "mock_len", "mock_loss_share", "mock_target")
# Options that count something: each is at least 1 where it is set.
COUNTS = (
    "training_seq_len",
    "bucket_granularity",
    "batch_size",
    "accumulation_steps",
    "tokens_per_row",
    "tokens_per_step",
    "effective_batch_size",
    "mock_num_samples",
    "ttt_steps",
    "num_epochs",
    "max_steps",
    "max_samples",
    "max_eval_samples",
    "draft_vocab_size",
    "draft_intermediate_size",
    "eval_every",
    "save_every",
    "log_every",
    "num_threads",
    "rank_timeout",
    "measure_every",
    "measure_max_prompts",
    "measure_max_new_tokens",
    "patience",
)


def check_training(config: "TrainConfig") -> None:
    """All checks that need nothing but the options. Raises InputError."""
    check_counts(config, COUNTS)
    for name in ("warmup_ratio", "min_lr_ratio", "eval_fraction"):
        if not 0 <= getattr(config, name) <= 1:
            raise InputError(f"--{name} is {getattr(config, name)}; it must lie between 0 and 1")
    for name in ("adam_beta1", "adam_beta2", "ema_alpha"):
        if not 0 <= getattr(config, name) < 1:
            raise InputError(f"--{name} is {getattr(config, name)}; it must be at least 0 and below 1")
    for name in ("learning_rate", "max_grad_norm", "step_decay"):
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"--{name} is {value}; it must be a finite number above 0")
    if not 0 <= config.weight_decay < math.inf:
        raise InputError(f"--weight_decay is {config.weight_decay}; it must be a finite number from 0 up")
    if not 0 <= config.seed < 2**63:
        raise InputError(f"--seed is {config.seed}; it must lie between 0 and 2^63 - 1")
    if config.training_seq_len % config.granularity:
        below = config.training_seq_len // config.granularity * config.granularity
        nearest = f"{below} or {below + config.granularity}" if below else str(config.granularity)
        raise InputError(
            f"--training_seq_len {config.training_seq_len} is not a multiple of --bucket_granularity "
            f"{config.granularity}; use {nearest}, or a granularity that divides it"
        )
    _check_batches(config)
    _check_mock(config)
    if config.num_workers is not None and config.num_workers < 0:
        raise InputError(f"--num_workers is {config.num_workers}; it must be 0 (none) or more")
    _check_selection(config)
    if config.compile_target and config.torch_compile is False:
        raise InputError("--compile_target does nothing with --torch_compile false; drop one")
    if config.resume and config.overwrite:
        raise InputError("--resume and --overwrite exclude each other; drop one")
    is_same = config.init_from and Path(config.init_from).resolve() == Path(config.output_dir).resolve()
    if is_same and not config.resume:
        raise InputError(
            f"--init_from {config.init_from} is --output_dir itself; use --resume to go on with that run, "
            "or name another --output_dir"
        )
    if config.eval_data and not config.data:
        raise InputError("--eval_data is named without --data; name the files to train on as well")


def _check_batches(config: "TrainConfig") -> None:
    if config.packing != "none" and not config.padding_free:
        raise InputError(
            f"--packing {config.packing} lays documents end to end, --padding_free false does not; drop "
            "--padding_free, or use --packing none"
        )
    if config.padding_free and config.attn_implementation != ISOLATED:
        raise InputError(
            f"--attn_implementation {config.attn_implementation} cannot keep the documents of a row apart; "
            "drop it, or use --packing none --padding_free false"
        )
    if config.packing == "none" and config.tokens_per_row:
        raise InputError(
            f"--tokens_per_row is {config.tokens_per_row}, but --packing none fills no rows; drop one"
        )
    named = [
        f"--{name}"
        for name in ("accumulation_steps", "tokens_per_step", "effective_batch_size")
        if getattr(config, name) is not None
    ]
    if len(named) > 1:
        raise InputError(f"{' and '.join(named)} all say how large the global batch is; keep one")


def _check_mock(config: "TrainConfig") -> None:
    named = [f"--{name}" for name in MOCK_OPTIONS if getattr(config, name) is not None]
    if named and not config.mock_data:
        raise InputError(f"{named[0]} is named without --mock_data; add it, or drop {named[0]}")
    if config.mock_data and config.data:
        raise InputError("--mock_data and --data exclude each other; drop one")
    if config.mock_target and config.target:
        raise InputError("--mock_target and --target exclude each other; drop one")
    if config.mock_target and config.attn_implementation != ISOLATED:
        raise InputError(
            f"--attn_implementation {config.attn_implementation} has no target to act on with "
            "--mock_target; drop one"
        )
    if config.mock_loss_share is not None and not 0 < config.mock_loss_share <= 1:
        raise InputError(
            f"--mock_loss_share is {config.mock_loss_share}; it must lie above 0 and be at most 1"
        )


def _check_selection(config: "TrainConfig") -> None:
    if config.measure_prompts and (config.mock_data or config.mock_target):
        raise InputError("--measure_prompts needs a real target, which --mock_data has not; drop one")
    if not config.measure_prompts:
        if config.measure_every is not None:
            raise InputError("--measure_every does nothing without --measure_prompts; name a file of prompts")
        if config.select_by == "measured":
            raise InputError(
                "--select_by measured needs prompts to decode; name a file with --measure_prompts"
            )
    if config.select_by == "measured" and config.measure_max_new_tokens < 2:
        raise InputError(
            f"--measure_max_new_tokens is {config.measure_max_new_tokens}; with --select_by measured it "
            "must be at least 2, because an answer's first token comes without a verify step"
        )
    has_own_data = config.data or config.mock_data  # the demo brings held-out data
    nothing_held_out = has_own_data and not config.eval_data and config.eval_fraction == 0
    if config.patience is not None and config.select_by == "expected" and nothing_held_out:
        raise InputError(
            "--patience does nothing where nothing is held out (--eval_fraction 0 without --eval_data); "
            "name --eval_data or a share, or drop --patience"
        )


def check_counts(options: object, names: Sequence[str]) -> None:
    """Raise InputError for an option that counts something and is set below 1."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"--{name} is {value}; it must be at least 1")
