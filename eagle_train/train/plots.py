"""Figures of runs and of a measurement. matplotlib (extra `plot`) is imported when something is drawn."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle_train.config_measure import PlotConfig
from eagle_train.decode.figures import ALL, Estimate, GroupFigures
from eagle_train.errors import InputError
from eagle_train.files import write_atomically
from eagle_train.train.output import METRICS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
DEFAULT_NAME = "plot.png"
DOTS_PER_INCH = 130
INK, FAINT = "#222222", "#8a8a8a"
# Okabe and Ito's colours, which colour-blind readers tell apart, without the yellow that paper swallows.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """The events of one run's metrics.jsonl by kind, in order.

    measured: `num_speculative_tokens` and the fields of `AcceptanceFigures`.
    """

    label: str
    train: list[Event]
    validations: list[Event]
    measured: list[Event]

    def tokens(self, events: Sequence[Event]) -> list[float]:
        """Training tokens seen at each event, in millions; only train events say it, others lie between."""
        steps = [0, *(event["step"] for event in self.train)]
        tokens = [0, *(event["total_tokens"] for event in self.train)]
        return [float(np.interp(event["step"], steps, tokens)) / 1e6 for event in events]


def plot(config: PlotConfig) -> Path:
    """Draw the curves of runs into one file; returns its path. Raises InputError for a directory without
    metrics, and without matplotlib.
    """
    out = Path(config.out) if config.out is not None else Path(config.run_dirs[0]) / DEFAULT_NAME
    check_plot("--out", out)
    labels = run_labels(config.run_dirs)
    runs = [read_run(Path(path), label) for path, label in zip(config.run_dirs, labels, strict=True)]
    save_figure(draw_runs(runs), out)
    return out


def check_plot(flag: str, path: Path) -> None:
    """Raise InputError unless a figure can be drawn and written there; before the work that it shows."""
    if path.suffix not in SUFFIXES:
        raise InputError(f"{flag} {path} must end with one of {', '.join(SUFFIXES)}")
    check_parent(flag, path)
    new_figure(1, 1)


def check_parent(flag: str, path: Path) -> None:
    """Raise InputError unless a file can be put there."""
    if path.is_dir() or not path.parent.is_dir():
        found = "is a directory" if path.is_dir() else f"lies in {path.parent}, which does not exist"
        raise InputError(f"{flag} {path} {found}; name a file in a directory that exists")


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of so many inches, without any window system."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            "plots need matplotlib, which is not installed; pip install 'eagle_train[plot]'"
        ) from error
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def save_figure(figure: "Figure", path: Path) -> None:
    write_atomically(
        path, lambda temporary: figure.savefig(temporary, format=path.suffix[1:], dpi=DOTS_PER_INCH)
    )


def run_labels(run_dirs: Sequence[str]) -> list[str]:
    """The directories' names, or their paths where names repeat."""
    names = [Path(path).resolve().name for path in run_dirs]
    return names if len(set(names)) == len(names) else [str(Path(path)) for path in run_dirs]


def read_run(run_dir: Path, label: str) -> RunMetrics:
    """The events of a run. A last line that is still being written is left out."""
    path = run_dir / METRICS
    if not path.is_file():
        raise InputError(f"{path} does not exist; name the --output_dir of a training run")
    events: dict[str, list[Event]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        try:
            event = json.loads(line)
            events.setdefault(event["event"], []).append(event)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}:{number}: not an event of a training run ({error!r})") from error
    if not events.get("train"):
        raise InputError(f"{path} has no training step yet; wait for the first one, or name another run")
    return RunMetrics(
        label, events["train"], events.get("validation", []), events.get("measured", [])
    )


def draw_runs(runs: Sequence[RunMetrics]) -> "Figure":
    """Loss, acceptance length, acceptance by depth, its course, fill and speed; a colour a run."""
    figure = new_figure(15, 8.4)
    axes = figure.subplots(2, 3)
    colours = [COLOURS[index % len(COLOURS)] for index in range(len(runs))]
    n = shown_length(runs)
    for run, colour in zip(runs, colours, strict=True):
        _draw_curve(axes[0, 0], run, "loss", colour)
        _draw_curve(axes[0, 1], run, "acceptance_length", colour, key=n)
        _draw_measured(axes[0, 1], run, colour)
        _draw_depths(axes[0, 2], run, colour)
        _draw_depth_courses(axes[1, 0], run, colour)
        fill = [100 * event["fill"] for event in run.train]
        axes[1, 1].plot(run.tokens(run.train), fill, color=colour, linewidth=1.6)
        speed = [event["tokens_per_second"] or np.nan for event in run.train]
        axes[1, 2].plot(run.tokens(run.train), speed, color=colour, linewidth=1.6)
    measured = sorted({event["num_speculative_tokens"] for run in runs for event in run.measured})
    note = f", measured at n = {', '.join(map(str, measured))}" if measured else ""
    titles = (
        ("Loss", "sum of weighted cross-entropies (nats)"),
        (f"Acceptance length at n = {n} drafted tokens", f"tokens per verify step (expected{note})"),
        ("Acceptance by depth, last validation", "share of supervised rows"),
        ("Top-1 agreement of each depth", "share of supervised rows"),
        ("Fill of the batches", "real tokens / computed slots (%)"),
        ("Speed (moving average)", "tokens per second"),
    )
    for panel, (title, unit) in zip(axes.flat, titles, strict=True):
        _dress(panel, title, unit, "training tokens (millions)")
    axes[0, 2].set_xlabel("ttt_step k, drafted tokens before this one")
    axes[0, 2].xaxis.get_major_locator().set_params(integer=True)
    for panel in (axes[0, 2], axes[1, 0]):
        panel.set_ylim(0, 1)
    axes[1, 1].set_ylim(top=101)
    axes[1, 2].set_ylim(bottom=0)
    figure.legend(handles=_legend(runs, colours), loc="outside lower center", ncols=5, frameon=False)
    return figure


def shown_length(runs: Sequence[RunMetrics]) -> str:
    """The n at which acceptance lengths are drawn: the measured one, else the largest that all runs have."""
    common = set.intersection(*(set(run.train[-1]["acceptance_length"]) for run in runs))
    if not common:
        raise InputError("the runs have no acceptance length at a common n; plot them one at a time")
    measured = {str(event["num_speculative_tokens"]) for run in runs for event in run.measured}
    return max(measured & common or common, key=int)


def _draw_curve(panel: "Axes", run: RunMetrics, name: str, colour: str, key: str | None = None) -> None:
    """Training as a thin line, validation as a line with markers."""
    for events, prefix in ((run.train, ""), (run.validations, "eval_")):
        values = [event[prefix + name] if key is None else event[prefix + name].get(key) for event in events]
        is_eval = bool(prefix)
        panel.plot(
            run.tokens(events),
            [np.nan if value is None else value for value in values],
            color=colour,
            linewidth=2.0 if is_eval else 1.0,
            alpha=1.0 if is_eval else 0.55,
            marker="o" if is_eval else None,
            markersize=4.5,
        )


def _draw_measured(panel: "Axes", run: RunMetrics, colour: str) -> None:
    drawn = [event for event in run.measured if event["acceptance_length"] is not None]
    if drawn:
        estimates = [Estimate(**event["acceptance_length"]) for event in drawn]
        panel.errorbar(
            run.tokens(drawn),
            [estimate.value for estimate in estimates],
            yerr=_error_bars(estimates),
            color=colour,
            fmt="D",
            markerfacecolor="white",
            markersize=6,
            capsize=3,
        )


def _draw_depths(panel: "Axes", run: RunMetrics, colour: str) -> None:
    last = run.validations[-1] if run.validations else None
    for name, style in (("top1_agreement", "-"), ("acceptance_rate", "--")):
        values = run.train[-1][name] if last is None else last[f"eval_{name}"]
        shown = [np.nan if value is None else value for value in values]
        panel.plot(range(len(shown)), shown, style, color=colour, marker="o", markersize=4, linewidth=1.6)


def _draw_depth_courses(panel: "Axes", run: RunMetrics, colour: str) -> None:
    """One line a depth, the fainter the deeper."""
    of_validation = len(run.validations) > 1
    events = run.validations if of_validation else run.train
    curves_KE = np.array(
        [event["eval_top1_agreement" if of_validation else "top1_agreement"] for event in events], dtype=float
    ).T
    for depth, curve in enumerate(curves_KE):
        alpha = 1 - 0.75 * depth / max(len(curves_KE) - 1, 1)
        panel.plot(run.tokens(events), curve, color=colour, alpha=alpha, linewidth=1.6)


def _legend(runs: Sequence[RunMetrics], colours: Sequence[str]) -> list[Any]:
    """Handles below the panels, where they cover nothing: runs, then what the line styles mean."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=colour, linewidth=4, label=run.label)
        for run, colour in zip(runs, colours, strict=True)
    ]
    handles += [
        Line2D([], [], color=INK, linewidth=1, alpha=0.55, label="training"),
        Line2D([], [], color=INK, linewidth=2, marker="o", markersize=4.5, label="validation"),
    ]
    if any(run.measured for run in runs):
        handles.append(
            Line2D([], [], color=INK, linestyle="", marker="D", markerfacecolor="white", label="measured, 95 %")
        )
    return [
        *handles,
        Line2D([], [], color=INK, linestyle="-", label="top1_agreement (paler: deeper)"),
        Line2D([], [], color=INK, linestyle="--", label="acceptance_rate"),
    ]


def draw_acceptance(
    groups: Mapping[str, GroupFigures], expected_per_position: Sequence[float] | None = None
) -> "Figure":
    """Acceptance by position with 95 % intervals, beside what the chain walk expects where it is given, and
    acceptance length by category where there are any.

    groups: from `group_figures`; expected_per_position: shares of the walk's verify steps, `[N]`.
    """
    categories = [name for name in groups if name != ALL]
    figure = new_figure(12 if categories else 6.5, 4.6)
    panels = figure.subplots(1, 2 if categories else 1, squeeze=False)[0]
    total = groups[ALL].every
    positions = np.arange(1, len(total.acceptance_per_position) + 1)
    panels[0].errorbar(
        positions,
        [estimate.value for estimate in total.acceptance_per_position],
        yerr=_error_bars(total.acceptance_per_position),
        fmt="o-",
        color=COLOURS[0],
        capsize=4,
        linewidth=1.8,
        label="measured, 95 % interval",
    )
    if expected_per_position is not None:
        panels[0].plot(positions, expected_per_position, "x", color=COLOURS[1], markersize=9, label="expected")
    panels[0].set_ylim(0, 1)
    panels[0].xaxis.get_major_locator().set_params(integer=True)
    _dress(panels[0], "Acceptance by position", "share of verify steps", "drafted token")
    panels[0].legend(frameon=False)
    if categories:
        _draw_categories(panels[1], groups)
    return figure


def _draw_categories(panel: "Axes", groups: Mapping[str, GroupFigures]) -> None:
    """Horizontal, so that names are read without turning the head; the first category on top."""
    drawn = [
        (name, group.every.acceptance_length, group.every.prompts)
        for name, group in groups.items()
        if group.every.acceptance_length is not None
    ]
    for height, (name, length, _) in enumerate(reversed(drawn)):
        assert length is not None
        panel.errorbar(
            length.value,
            height,
            xerr=_error_bars([length]),
            fmt="o",
            color=INK if name == ALL else COLOURS[0],
            capsize=4,
            markersize=7,
        )
    names = [f"{name} ({prompts:,})" for name, _, prompts in reversed(drawn)]
    panel.set_yticks(range(len(drawn)), names)
    panel.set_ylim(-0.6, len(drawn) - 0.4)
    _dress(panel, "Acceptance length by category", "", "tokens per verify step, 95 % interval")
    if groups[ALL].every.acceptance_length is not None:
        panel.axvline(groups[ALL].every.acceptance_length.value, color=FAINT, linewidth=1, linestyle=":")


def _error_bars(estimates: Sequence[Estimate]) -> np.ndarray:
    """Distances below and above each value, `[2, len]`; NaN, which draws nothing, without an interval."""
    return np.array(
        [
            [np.nan if e.low is None else e.value - e.low for e in estimates],
            [np.nan if e.high is None else e.high - e.value for e in estimates],
        ]
    )


def _dress(panel: "Axes", title: str, unit: str, horizontal: str) -> None:
    panel.set_title(title, fontsize=11, loc="left", color=INK)
    panel.set_ylabel(unit)
    panel.set_xlabel(horizontal)
    panel.grid(color="#e6e6e6", linewidth=0.8)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
