"""The state that --resume goes on from: float32 masters, optimizer moments, and where in the data the run
stands.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from eagle_train.errors import InputError
from eagle_train.files import write_json, writing
from eagle_train.model.layouts import INDEX
from eagle_train.train.schedule import Position, Segment
from eagle_train.train.statistics import Statistics

WEIGHTS = "weights.safetensors"


@dataclass(slots=True)
class RunState:
    """Progress of a run. step: optimizer steps done; position: how far these went in the data.

    statistics: speed so far; empty_steps: steps without a supervised row; first_acceptance_length: at step 0,
    best_*: at the step where it was longest, by what --select_by names, and checks_since_best how many since
    were not longer; owes_checks: what is due at `step`, validation or measurement, is still to be done;
    data_digest, plan_digest: of the samples and of the plan behind `position`, to notice other ones.
    """

    step: int = 0
    position: Position = field(default_factory=Position)
    statistics: Statistics = field(default_factory=Statistics)
    empty_steps: int = 0
    first_acceptance_length: float | None = None
    best_step: int | None = None
    best_acceptance_length: float | None = None
    checks_since_best: int = 0
    owes_checks: bool = False
    data_digest: str = ""
    plan_digest: str = ""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunState":
        """Plain values, as `asdict` gives them, back into a state."""
        position = values.pop("position")
        segments = tuple(Segment(**segment) for segment in position["segments"])
        statistics = Statistics(**values.pop("statistics"))
        return cls(position=Position(position["epoch"], segments), statistics=statistics, **values)


def save_state(
    directory: Path,
    state: RunState,
    head: nn.Module,
    optimizer: torch.optim.Optimizer,
    head_config: Mapping[str, Any],
) -> None:
    """Write `directory` anew; the old state stays in place until the new one is complete.

    head_config: `config.json` of the head, with which `directory` is a stored head of its own, so that a
    resumed run needs no other. Raises InputError where it cannot be written.
    """
    fresh = directory.with_name(directory.name + ".new")
    old = directory.with_name(directory.name + ".old")
    weights = {name: value.detach().cpu().contiguous() for name, value in head.state_dict().items()}
    moments = {
        f"{name}/{key}": value.detach().cpu()
        for name, parameter in head.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    shutil.rmtree(fresh, ignore_errors=True)
    with writing(directory):
        try:
            fresh.mkdir(parents=True)
            save_file(weights, fresh / WEIGHTS)
            write_json(fresh / "config.json", head_config)
            write_json(fresh / INDEX, {"weight_map": dict.fromkeys(weights, WEIGHTS)})
            save_file(moments, fresh / "optimizer.safetensors")
            write_json(fresh / "state.json", asdict(state))
            if directory.exists():
                shutil.rmtree(old, ignore_errors=True)
                directory.rename(old)
            fresh.rename(directory)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)  # on a full disk, half a state would stay in the way
    shutil.rmtree(old, ignore_errors=True)


def save_progress(directory: Path, state: RunState) -> None:
    """Write anew what is known of the step whose weights and moments `directory` holds already."""
    write_json(directory / "state.json", asdict(state))


def has_saved_state(directory: Path) -> bool:
    """Whether there is a state to go on from, be it after `restore_interrupted_save`."""
    place = directory if directory.exists() else directory.with_name(directory.name + ".old")
    return (place / "state.json").is_file()


def restore_interrupted_save(directory: Path) -> None:
    """Put the old state back where a save ended between its two renames."""
    old = directory.with_name(directory.name + ".old")
    if not directory.exists() and old.exists():
        old.rename(directory)


def load_state(directory: Path, head: nn.Module, optimizer: torch.optim.Optimizer) -> RunState:
    """Fill head and optimizer, and return where the run stood.

    Raises InputError when it cannot be read or belongs to a head of other sizes.
    """
    try:
        head.load_state_dict(load_file(directory / WEIGHTS))
        moments = load_file(directory / "optimizer.safetensors")
        state = RunState.from_dict(json.loads((directory / "state.json").read_text()))
    except (SafetensorError, RuntimeError, OSError, TypeError, KeyError, json.JSONDecodeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"--resume: {directory} cannot be read: {reason}") from error
    for name, parameter in head.named_parameters():
        entries = {
            key.rsplit("/", 1)[1]: value for key, value in moments.items() if key.rsplit("/", 1)[0] == name
        }
        if entries:
            optimizer.state[parameter] = {
                # `step` too: a fused AdamW reads it on the parameter's device.
                key: value.to(parameter.device)
                for key, value in entries.items()
            }
    return state
