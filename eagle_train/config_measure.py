"""Options of the commands that look at a trained head: `measure` and `plot`."""

from dataclasses import dataclass

from eagle_train.config import option
from eagle_train.config_checks import check_counts
from eagle_train.errors import InputError

# Options that count something: each is at least 1 where it is set.
COUNTS = ("num_speculative_tokens", "max_new_tokens", "batch_size", "max_prompts", "num_threads")


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """Options of `python -m eagle_train measure`. None means "derived", and the help text says from what."""

    draft: str = option("runs/eagle3", "models", "directory of the draft head: a run, or a published EAGLE-3")
    target: str | None = option(
        None,
        "models",
        "Hugging Face id or directory of the target, or demo; none: the one in the run's options",
    )
    dtype: str = option(
        "auto",
        "models",
        "compute dtype; auto: bf16 on CUDA, the faster by a short timing on a CPU",
        ("auto", "float32", "bfloat16"),
    )
    device: str = option("auto", "models", "torch device; auto: cuda if present, else cpu")
    trust_remote_code: bool = option(False, "models", "run model code that the target's repository ships")

    prompts: tuple[str, ...] = option(
        (),
        "prompts",
        "JSONL files (.gz too): Spec-Bench, MT-Bench, Vicuna, Arena-Hard, GSM8K, HumanEval, or rows with "
        "prompt, messages or input_ids; none: the demo's, where the target is the demo's",
    )
    max_prompts: int | None = option(
        None, "prompts", "measure on N prompts, evenly spaced over the files; none: all"
    )
    on_long_prompt: str = option(
        "error",
        "prompts",
        "a prompt that with --max_new_tokens exceeds the target's context stops the command, or is left out "
        "and counted",
        ("error", "skip"),
    )
    chat_template: str | None = option(
        None, "prompts", "file with a chat template; none: the run's, else the tokenizer's own"
    )
    template_options: tuple[str, ...] = option(
        (), "prompts", "name=value pairs for the chat template; none: the run's"
    )

    num_speculative_tokens: int = option(5, "decoding", "n, drafted tokens per verify step (tokens)")
    max_new_tokens: int = option(128, "decoding", "longest answer (tokens)")
    batch_size: int = option(8, "decoding", "prompts that are decoded together")
    temperature: float = option(0.0, "decoding", "of the target; 0: greedy")
    proposal: str = option(
        "greedy", "decoding", "how the head drafts where the temperature is above 0", ("greedy", "sampled")
    )
    ignore_eos: bool = option(False, "decoding", "go on behind an end-of-text token")
    seed: int = option(0, "decoding", "of sampling and of the intervals' resampling")
    compare_plain: bool = option(
        True, "decoding", "decode without the draft too, for the speed-up and to check that answers are equal"
    )
    num_threads: int | None = option(
        None, "decoding", "CPU threads; none: OMP_NUM_THREADS, or one for each physical core"
    )

    json: str | None = option(None, "output", "file for all figures as JSON")
    plot: str | None = option(
        None, "output", "file (.png, .svg or .pdf) for acceptance by position and category"
    )

    def __post_init__(self) -> None:
        check_counts(self, COUNTS)
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"--temperature is {self.temperature}; it must be at least 0 (0: greedy)")
        if self.seed < 0:
            raise InputError(f"--seed is {self.seed}; it must be at least 0")
        if self.proposal == "sampled" and not self.temperature:
            raise InputError(
                "--proposal sampled needs a --temperature above 0; at 0 the target takes its arg-max only"
            )


@dataclass(frozen=True, kw_only=True)
class PlotConfig:
    """Options of `python -m eagle_train plot`."""

    run_dirs: tuple[str, ...] = option(
        (), "plot", "directories of runs (each its --output_dir), overlaid in one figure", positional=True
    )
    out: str | None = option(
        None, "plot", "file (.png, .svg or .pdf); none: plot.png in the first run's directory"
    )

    def __post_init__(self) -> None:
        if not self.run_dirs:
            raise InputError("no run is named; give one or more directories of runs")
