"""--resume: the options of a run that goes on are those that it was started with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_train.config import TrainConfig
from eagle_train.errors import InputError
from eagle_train.flags import named_options
from eagle_train.train.output import RUN_CONFIG, check_output_dir

# Options that may differ between a run and its resumption; all others change what is computed.
FREE_ON_RESUME = {
    "resume", "overwrite", "output_dir", "device", "num_threads", "log_every", "eval_every", "save_every",
    "max_steps", "num_epochs", "learning_rate", "dtype", "ema_alpha",
    "torch_compile", "compile_target", "gradient_checkpointing", "num_workers", "patience",
    "measure_prompts", "measure_every", "measure_max_prompts", "measure_max_new_tokens",
    "data", "eval_data",  # which may have moved; the saved digest guards what they hold
}  # fmt: skip
# What --select_by measured compares lengths over: other prompts, another scale.
SELECTION_SCALE = {"measure_prompts", "measure_max_prompts", "measure_max_new_tokens"}
# Their none or auto stands for what the run's first start derived and recorded.
DERIVED = {
    "dtype", "aux_layer_ids", "bucket_granularity", "draft_vocab_size", "draft_intermediate_size",
    "learning_rate",
}  # fmt: skip
# Which file is meant counts, not how its name is spelt.
PATHS = {"target", "data", "eval_data", "init_from", "measure_prompts", "chat_template", "mock_len"}
NOT_TOLD = {"resume", "overwrite", "output_dir"}


def resumed_config(named: Mapping[str, Any]) -> TrainConfig:
    """The options of the run in --output_dir under those that are named on the command line or in --config.

    Raises InputError where there is no run to go on with, or where a named option would make it another one.
    """
    output_dir = named.get("output_dir", TrainConfig.output_dir)
    check_output_dir(Path(output_dir), resume=True)
    saved = saved_options(Path(output_dir))
    changed = {
        name: value
        for name, value in named.items()
        if not (name in DERIVED and value in (None, "auto")) and not _is_same(name, value, saved[name])
    }
    free = FREE_ON_RESUME - (SELECTION_SCALE if saved["select_by"] == "measured" else set())
    if refused := [_change(name, saved[name], value) for name, value in changed.items() if name not in free]:
        raise InputError(
            f"--resume: other options than the saved run: {'; '.join(refused)}. Leave them out to go on with "
            "its own, or start anew"
        )
    values = saved | changed | {"output_dir": output_dir}
    if "num_epochs" in named and "max_steps" not in named:
        values["max_steps"] = None  # which would win over epochs
    return TrainConfig(**values)


def saved_options(output_dir: Path) -> dict[str, Any]:
    """All options of the run in a directory; those that its version did not have are the defaults.

    Raises InputError where they cannot be read or hold what is no option.
    """
    path = output_dir / RUN_CONFIG
    try:
        saved = named_options(TrainConfig, ["--config", str(path)], command="train", description="")
    except InputError as error:
        raise InputError(f"--resume: {error}; mend the file, or start anew with --overwrite") from error
    return vars(TrainConfig()) | saved


def told_changes(config: TrainConfig, num_steps: int) -> str:
    """One line on what differs from the run that goes on; empty where nothing does, or a run starts anew.
    num_steps: the run's new end.
    """
    if not config.resume:
        return ""
    saved, values = saved_options(Path(config.output_dir)), vars(config)
    changed = [
        name for name in values if name not in NOT_TOLD and not _is_same(name, values[name], saved[name])
    ]
    if not changed:
        return ""
    line = "; ".join(_change(name, saved[name], values[name]) for name in changed)
    if {"max_steps", "num_epochs"} & set(changed):
        line += f"; the learning rate's schedule now ends at step {num_steps:,}"
    return f"changed on resume: {line}"


def _change(name: str, saved: Any, value: Any) -> str:
    before, after = (list(each) if isinstance(each, tuple) else each for each in (saved, value))
    return f"--{name} {before} -> {after}"


def _is_same(name: str, left: Any, right: Any) -> bool:
    return bool(left == right or (name in PATHS and _full(left) == _full(right)))


def _full(value: str | tuple[str, ...] | None) -> list[Path]:
    """Full paths; of a Hugging Face id one that means nothing, but is the same for the same id."""
    names = [value] if isinstance(value, str) else value or ()
    return [Path(name).expanduser().resolve() for name in names]
