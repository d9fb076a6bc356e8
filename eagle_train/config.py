"""Every option of a training run: one frozen dataclass that is the command line, the YAML file and the saved
record.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from eagle_train.config_checks import ISOLATED, check_training
from eagle_train.errors import InputError
from eagle_train.files import write_atomically

PACKINGS = ("multipack", "multipack_v1", "multipack_v2", "next_fit", "none")
MOST_RANKS = 100_000  # that a plan is made for


def option(
    default: Any, group: str, text: str, choices: tuple[str, ...] | None = None, *, positional: bool = False
) -> Any:
    """A dataclass field that is also a flag, or without its name on the command line if `positional`; `text`
    ends with the unit where there is one.
    """
    metadata = {"group": group, "help": text, "choices": choices, "positional": positional}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Options of `python -m eagle_train train`. None means "derived", and the help text says from what."""

    target: str | None = option(None, "target", "Hugging Face id or directory of the frozen target, or demo")
    dtype: str = option(
        "auto",
        "target",
        "compute dtype; auto: bf16 on CUDA, the faster by a short timing on a CPU",
        ("auto", "float32", "bfloat16"),
    )
    device: str = option("auto", "target", "torch device; auto: cuda if present, else cpu")
    attn_implementation: str = option(
        ISOLATED,
        "target",
        "the target's attention; isolated: our own, which keeps the documents of a row apart; others are "
        "transformers' (eager, sdpa, flash_attention_2), for --packing none --padding_free false",
    )
    trust_remote_code: bool = option(False, "target", "run model code that the target's repository ships")
    chat_template: str | None = option(None, "target", "file with a chat template; none: the tokenizer's own")
    template_options: tuple[str, ...] = option(
        (), "target", "name=value pairs that the chat template reads, such as enable_thinking=false"
    )  # fmt: skip

    data: tuple[str, ...] = option(
        (), "data", "JSONL files with messages, conversations, or input_ids + loss_mask"
    )
    eval_data: tuple[str, ...] = option((), "data", "held-out JSONL files; none: --eval_fraction of --data")
    eval_fraction: float = option(
        0.05,
        "data",
        "share of the samples held out of --data where no --eval_data is named, 0..1; copies of a "
        "conversation stay together, and one is always trained on",
    )
    max_samples: int | None = option(None, "data", "read only the first N training conversations; none: all")
    max_eval_samples: int | None = option(
        None, "data", "read only the first N held-out conversations; none: all"
    )
    train_on: str = option("all", "data", "which assistant turns are supervised", ("all", "last"))
    role_map: tuple[str, ...] = option((), "data", "name=role pairs for unknown role names in the data")
    on_bad_row: str = option(
        "error", "data", "a faulty row stops the run, or is counted and left out", ("error", "skip")
    )
    overlong: str = option(
        "truncate",
        "data",
        "samples above --training_seq_len: cut, left out, or refused; always counted",
        ("truncate", "drop", "error"),
    )

    mock_data: bool = option(False, "mock data", "train on random tokens, to measure speed without data")
    mock_num_samples: int | None = option(
        None, "mock data", "samples; none: 1,000, or as many as the file of --mock_len has"
    )
    mock_len: str | None = option(
        None,
        "mock data",
        "N, uniform:a:b, lognormal:mean:max or a file of lengths; none: lognormal:1000:4096 (tokens)",
    )
    mock_loss_share: float | None = option(
        None, "mock data", "share of a sample's tokens that is its answer; none: 0.5, 0..1"
    )
    mock_target: str | None = option(
        None, "mock data", "hidden,layers,vocab: random features in place of a target's forward pass"
    )

    training_seq_len: int = option(4096, "batches", "longest document, and capacity of a packed row (tokens)")
    bucket_granularity: int | None = option(
        None, "batches", "batch lengths are multiples of this; none: min(1024, training_seq_len) (tokens)"
    )
    packing: str = option(
        "multipack",
        "batches",
        "fill rows with whole samples, or batch them (none); the others are there to be compared with "
        "(multipack_v1 and multipack_v2 drop the tail of an epoch)",
        PACKINGS,
    )
    padding_free: bool = option(
        True, "batches", "lay samples flat, end to end; false, with --packing none: in padded rows"
    )
    batch_size: int = option(8, "batches", "with --packing none alone: samples per micro-batch")
    tokens_per_row: int | None = option(
        None,
        "batches",
        "packed rows are filled only so far, rounded up to whole buckets that hold the longest sample, no "
        "further than --training_seq_len; none: --training_seq_len (tokens)",
    )
    accumulation_steps: int | None = option(
        None,
        "batches",
        "micro-batches per optimizer step, as far as an epoch goes; none: 1, or what the next two ask for",
    )
    tokens_per_step: int | None = option(
        None,
        "batches",
        "global batch over all ranks: slots of packed rows, or tokens of unpacked samples, in a step",
    )
    effective_batch_size: int | None = option(
        None, "batches", "the same in samples of mean length, so about this many per optimizer step"
    )

    ttt_steps: int = option(7, "draft head", "K, length of the training-time-test unroll (steps)")
    init_from: str | None = option(
        None,
        "draft head",
        "local directory of a trained draft head (official or speculators layout) to train on; none: a fresh "
        "one",
    )
    draft_vocab_size: int | None = option(
        None,
        "draft head",
        "so many are chosen from the data, and rows of --init_from move by token; none: those of "
        "--init_from, else min(32000, target's vocabulary) (tokens)",
    )
    aux_layer_ids: tuple[int, ...] | None = option(
        None, "draft head", "three 0-based layers whose entering states are read; none: 2, L//2, L-3"
    )
    draft_intermediate_size: int | None = option(
        None, "draft head", "width of the draft's MLP; none: the target's"
    )

    learning_rate: float | None = option(None, "optimizer", "peak; none: 1e-4 x 4096 / hidden size")
    num_epochs: int = option(
        1, "optimizer", "passes over the training samples, where no --max_steps is named"
    )
    max_steps: int | None = option(None, "optimizer", "N optimizer steps instead of --num_epochs")
    warmup_ratio: float = option(0.03, "optimizer", "share of the steps with rising learning rate, 0..1")
    min_lr_ratio: float = option(0.1, "optimizer", "final learning rate as a share of the peak, 0..1")
    weight_decay: float = option(0.0, "optimizer", "AdamW's decay of matrices")
    adam_beta1: float = option(0.9, "optimizer", "AdamW's first moment decay")
    adam_beta2: float = option(0.95, "optimizer", "AdamW's second moment decay")
    max_grad_norm: float = option(0.5, "optimizer", "gradients are clipped to this global norm")
    step_decay: float = option(0.8, "optimizer", "weight of step k in the loss is this to the power k")
    seed: int = option(0, "optimizer", "of initial weights and data order")

    output_dir: str = option("runs/eagle3", "run", "where head, metrics and state are written")
    eval_every: int | None = option(
        None, "run", "optimizer steps between validations; none: a fifth of the run"
    )
    measure_prompts: tuple[str, ...] = option(
        (), "run", "JSONL files of prompts that are really decoded now and then, n = K drafted tokens a step"
    )
    measure_every: int | None = option(
        None, "run", "optimizer steps between such measurements; none: at validations"
    )
    measure_max_prompts: int = option(16, "run", "so many of the prompts, evenly spaced over the files")
    measure_max_new_tokens: int = option(128, "run", "longest answer in a measurement (tokens)")
    select_by: str = option(
        "expected",
        "run",
        "the head kept has the longest acceptance length: expected in validations, or measured by decoding",
        ("expected", "measured"),
    )
    patience: int | None = option(
        None,
        "run",
        "end the run after N validations (measurements, with --select_by measured) without a longer "
        "acceptance length; none: never",
    )
    save_every: int | None = option(None, "run", "optimizer steps between saved states; none: at validations")
    log_every: int = option(10, "run", "optimizer steps between lines in metrics.jsonl")
    resume: bool = option(False, "run", "go on from the state in --output_dir")
    overwrite: bool = option(False, "run", "replace the run in --output_dir")
    ema_alpha: float = option(
        0.9, "run", "weight of the past in the moving averages of speed and time, 0 or more and below 1"
    )
    torch_compile: bool | None = option(
        None, "run", "compile head and loss for each planned shape; none: where a compiler is found"
    )
    num_workers: int | None = option(
        None, "run", "processes that prepare batches ahead; none: 1 for a GPU, 0 (no process) for a CPU"
    )
    rank_timeout: int = option(
        600, "run", "how long a rank waits for another one before it gives up (seconds)"
    )
    gradient_checkpointing: bool = option(
        False, "run", "compute a TTT step's activations again in the backward, for long rows on little memory"
    )
    compile_target: bool = option(False, "run", "compile the target's MLPs too, with --torch_compile")
    num_threads: int | None = option(
        None, "run", "CPU threads; none: OMP_NUM_THREADS, or one for each physical core"
    )

    @property
    def granularity(self) -> int:
        """--bucket_granularity, or its default min(1024, training_seq_len), in tokens."""
        return self.bucket_granularity or min(1024, self.training_seq_len)

    def __post_init__(self) -> None:
        if self.init_from is not None:  # one spelling, because --resume compares it with the recorded one
            object.__setattr__(self, "init_from", str(Path(os.path.expanduser(self.init_from))))
        check_training(self)
        self.parsed_template_options()
        self.parsed_role_map()

    def check_sources(self) -> None:
        """What training needs, and what it would ignore; a plan compares packings, so it takes both."""
        self.check_target_and_data()
        is_idle = self.packing != "none" and self.batch_size != TrainConfig.batch_size
        if is_idle and not self.resume:
            raise InputError(
                f"--batch_size {self.batch_size} does nothing with --packing {self.packing}, which fills "
                "rows with as many samples as fit; drop it, or use --packing none"
            )

    def check_target_and_data(self) -> None:
        """A target is named together with data for it."""
        if self.target is None and self.data:
            raise InputError("--data is named without --target; name the model that these answers come from")
        if self.target not in (None, "demo") and not (self.data or self.mock_data):
            raise InputError("--target is named without --data; name one or more JSONL files")

    def parsed_template_options(self) -> dict[str, Any]:
        """--template_options as a mapping; values are read as YAML, so that false is a bool."""
        try:
            return {
                name: yaml.safe_load(text) for name, text in _pairs("template_options", self.template_options)
            }
        except yaml.YAMLError as error:
            raise InputError(
                f"--template_options {' '.join(self.template_options)}: a value is not YAML ({error}); "
                "quote it"
            ) from error

    def parsed_role_map(self) -> dict[str, str]:
        """--role_map as a mapping."""
        return dict(_pairs("role_map", self.role_map))

    def to_dict(self) -> dict[str, Any]:
        """Plain values under the flags' names, as written to and read from YAML."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}

    def digest(self) -> str:
        """Of the options that ranks must share: all but where each of them runs."""
        shared = {k: v for k, v in self.to_dict().items() if k not in ("device", "num_threads")}
        return hashlib.sha256(repr(shared).encode()).hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Write all values, so that `--config PATH` repeats the run."""
        text = yaml.safe_dump(self.to_dict(), sort_keys=False)
        write_atomically(path, lambda temporary: temporary.write_text(text))


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Options that `python -m eagle_train plan` has beside those of a training run."""

    lengths: str | None = option(
        None, "plan", "file of lengths in place of data: .npy, or text with one a line (tokens)"
    )
    world_size: int = option(1, "plan", "ranks that share each step")
    out: str | None = option(
        None, "plan", "JSONL file for the plan itself: step, rank, samples, tokens and bucket a line"
    )
    json: bool = option(False, "plan", "print the figures as JSON instead of as tables")

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= MOST_RANKS:
            raise InputError(f"--world_size is {self.world_size}; it must lie between 1 and {MOST_RANKS}")


def _pairs(name: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    for text in texts:
        if "=" not in text:
            raise InputError(f"--{name} holds {text!r}; write name=value")
    return [(text.split("=", 1)[0], text.split("=", 1)[1]) for text in texts]
