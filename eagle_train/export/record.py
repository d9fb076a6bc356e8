"""What a training left beside its head, as far as a model card can use it. A directory from elsewhere may
hold files of the same names: what is not as this package writes it is left out and never stops an export.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eagle_train.bundled import target_path
from eagle_train.errors import InputError
from eagle_train.export.engines import full_path

RUN_CONFIG, METRICS = "run_config.yaml", "metrics.jsonl"
# What of a run's options tells how a head came about.
SHOWN_OPTIONS = (
    "init_from", "ttt_steps", "training_seq_len", "packing", "num_epochs", "max_steps", "learning_rate",
    "weight_decay", "step_decay", "dtype", "seed",
)  # fmt: skip
START_DIGEST = "weights_sha256"  # of a start event's warm_start: first digits over the files of --init_from
OWN_KEYS = {"ttt_steps", "training_seq_len", "bucket_granularity"}  # of every run's options here


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a training left beside its head; empty for a head from elsewhere.

    options: `run_config.yaml`, of another program its `target` alone; events: the lines of `metrics.jsonl`;
    path: of the options.
    """

    options: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]
    path: Path = Path(RUN_CONFIG)

    @property
    def target(self) -> str | None:
        """The target's id or directory; None where it is not recorded. Raises InputError where it is no
        text.
        """
        name = self.options.get("target")
        if name is None:
            return None
        if not isinstance(name, str) or not name.strip():
            raise InputError(f"{self.path}: target is {name!r}, not a name; name the target with --target")
        return target_path(name)

    def other_target(self, name: str) -> str | None:
        """The recorded target where it is another one than `name`; None too where none, or no name, is
        recorded.
        """
        try:
            own = self.target
        except InputError:
            return None
        return own if own is not None and full_path(own) != full_path(target_path(name)) else None

    def layers_fault(self, read: Sequence[int]) -> str | None:
        """Why the aux layers that would be read are not those that the head was trained on; None where they
        are, or no layers are recorded.
        """
        own = self.options.get("aux_layer_ids")
        if own is None or list(own) == list(read):
            return None
        return (
            f"the head was trained on aux layers {' '.join(map(str, own))}, as {self.path} says, and here "
            f"{' '.join(map(str, read))} would be read"
        )

    @property
    def start_digest(self) -> str | None:
        """Of the weights that the head started from; None where it started afresh or none is recorded."""
        warm_start = self.last("start").get("warm_start")
        digest = warm_start.get(START_DIGEST) if isinstance(warm_start, dict) else None
        return digest if isinstance(digest, str) else None

    @property
    def is_ours(self) -> bool:
        """Whether the options are those of a training with this package."""
        return set(self.options) >= OWN_KEYS

    @property
    def is_mock(self) -> bool:
        """Whether the head was trained on random tokens."""
        return bool(self.options.get("mock_data"))

    def last(self, event: str) -> Mapping[str, Any]:
        """The last event of a kind; empty where there is none."""
        return next((values for values in reversed(self.events) if values.get("event") == event), {})

    def kept_validation(self) -> Mapping[str, Any]:
        """The validation of the head that was kept; empty where nothing was held out."""
        validations = [values for values in self.events if values.get("event") == "validation"]
        best = self.last("end").get("best_step")
        chosen = [values for values in validations if values["step"] == best]
        return chosen[-1] if chosen else max(validations, key=_longest, default={})


def _longest(validation: Mapping[str, Any]) -> float:
    lengths = list(validation["eval_acceptance_length"].values())
    return lengths[-1] or 0.0 if lengths else 0.0


def read_run_record(directory: Path) -> RunRecord:
    """The record beside a head. Raises InputError where its options cannot be read."""
    path = directory / RUN_CONFIG
    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path} cannot be read ({reason}); mend it or take it away") from error
    options = options if isinstance(options, dict) else {}
    is_ours = set(options) >= OWN_KEYS
    kept = {k: v for k, v in options.items() if k == "target" or (is_ours and _is_sound_option(k, v))}
    return RunRecord(kept, _read_events(directory / METRICS), path)


def _read_events(path: Path) -> list[dict[str, Any]]:
    """The sound events of a file; a crash may have cut its last line short."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); mend it or take it away") from error
    events = []
    for line in lines:
        try:
            event = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            continue
        if isinstance(event, dict) and _is_sound_event(event):
            events.append(event)
    return events


def _is_sound_option(name: str, value: Any) -> bool:
    if name in OWN_KEYS:
        return type(value) is int
    if name in ("data", "eval_data"):
        return value is None or _is_list_of(value, str)
    if name == "aux_layer_ids":
        return _is_list_of(value, int)
    return value is None or isinstance(value, bool if name == "mock_data" else int | float | str)


def _is_sound_event(event: Mapping[str, Any]) -> bool:
    """Whether an event holds what a card reads of its kind."""
    if event.get("event") == "start":
        counts = (event.get("train_samples"), event.get("train_tokens"))
        return _is_list_of([*counts], int) and _is_figure(event.get("target_own_token_share"))
    if event.get("event") == "validation":
        lengths = event.get("eval_acceptance_length")
        by_depth = [event.get("eval_acceptance_rate"), event.get("eval_top1_agreement")]
        return (
            type(event.get("step")) is int
            and isinstance(lengths, dict)
            and all(isinstance(values, list) for values in by_depth)
            and len(by_depth[0] or ()) == len(by_depth[1] or ())
            and all(map(_is_figure, [*lengths.values(), *(v for values in by_depth for v in values or ())]))
        )
    if event.get("event") == "measured":
        figure = event.get("acceptance_length")
        counts = (event.get("step"), event.get("num_speculative_tokens"))
        return _is_list_of([*counts], int) and (figure is None or _is_interval(figure))
    return True


def _is_interval(figure: Any) -> bool:
    if not isinstance(figure, dict):
        return False
    bounds = [figure.get("low"), figure.get("high")]
    return _is_number(figure.get("value")) and (bounds == [None, None] or all(map(_is_number, bounds)))


def _is_figure(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)
