"""`python -m eagle_train plot`: the curves of runs, from their metrics.jsonl."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle_train.config_measure import PlotConfig
from eagle_train.decode.figures import Estimate
from eagle_train.decode.plots import (
    COLOURS,
    INK,
    check_plot,
    dress,
    error_bars,
    legend_line,
    new_figure,
    save_figure,
)
from eagle_train.errors import InputError
from eagle_train.train.output import METRICS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEFAULT_NAME = "plot.png"
FEWEST_POINTS = 4  # validations that make a curve; with fewer, training is shown

# What is drawn of each kind of event.
DRAWN_KEYS = {
    "train": (
        *("step", "total_tokens", "loss", "acceptance_length", "acceptance_rate", "top1_agreement"),
        *("fill", "tokens_per_second"),
    ),
    "validation": (
        *("step", "eval_loss", "eval_acceptance_length", "eval_acceptance_rate", "eval_top1_agreement"),
    ),
    "measured": ("step", "num_speculative_tokens", "acceptance_length"),
}

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

    @property
    def ttt_steps(self) -> int:
        """K, the length of the run's unroll."""
        return len(self.train[-1]["top1_agreement"])

    def tokens(self, events: Sequence[Event]) -> list[float]:
        """Training tokens seen at each event; only train events say it, others lie between."""
        steps = [0, *(event["step"] for event in self.train)]
        tokens = [0, *(event["total_tokens"] for event in self.train)]
        return [float(np.interp(event["step"], steps, tokens)) for event in events]


def plot(config: PlotConfig) -> Path:
    """Draw the curves of runs into one file; returns its path. Raises InputError for a directory without
    metrics, and without matplotlib.
    """
    out = Path(config.out) if config.out is not None else Path(config.run_dirs[0]) / DEFAULT_NAME
    check_plot("--out", out)
    labels = run_labels(config.run_dirs)
    runs = [read_run(Path(path), label) for path, label in zip(config.run_dirs, labels, strict=True)]
    save_figure(draw_runs(runs), out)
    for note in comparison_notes(runs):
        print(f"note: {note}")
    return out


def comparison_notes(runs: Sequence[RunMetrics]) -> list[str]:
    """What the runs of a figure do not have in common, and what is therefore not drawn or not comparable."""
    if len({run.ttt_steps for run in runs}) == 1:
        return []
    of_each = ", ".join(f"{run.label} K = {run.ttt_steps}" for run in runs)
    notes = [f"the runs differ in K ({of_each}): a loss sums over a run's own K steps, so compare no losses"]
    if shown_length(runs) is None:
        notes.append("the runs have no acceptance length at a common n, so none is drawn")
    return notes


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
            kind = event["event"]
            events.setdefault(kind, []).append(event)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}:{number}: not an event of a training run ({error!r})") from error
        if missing := [key for key in DRAWN_KEYS.get(kind, ()) if key not in event]:
            raise InputError(
                f"{path}:{number}: the {kind} event lacks {', '.join(missing)}; plot runs of this package's "
                "present version, or remove the line"
            )
    if not events.get("train"):
        raise InputError(f"{path} has no training step yet; wait for the first one, or name another run")
    return RunMetrics(label, events["train"], events.get("validation", []), events.get("measured", []))


def draw_runs(runs: Sequence[RunMetrics]) -> "Figure":
    """Loss, acceptance length, acceptance by depth, its course, fill and speed; a colour a run."""
    figure = new_figure(15, 8.4)
    axes = figure.subplots(2, 3)
    colours = [COLOURS[index % len(COLOURS)] for index in range(len(runs))]
    n = shown_length(runs)
    prefix = "eval_" if min(len(run.validations) for run in runs) >= FEWEST_POINTS else ""
    for run, colour in zip(runs, colours, strict=True):
        _draw_curve(axes[0, 0], run, "loss", colour)
        if n is not None:
            _draw_curve(axes[0, 1], run, "acceptance_length", colour, key=n)
            _draw_measured(axes[0, 1], run, colour)
        _draw_depths(axes[0, 2], run, colour)
        _draw_depth_courses(axes[1, 0], run, colour, prefix)
        fill = [100 * event["fill"] for event in run.train]
        axes[1, 1].plot(run.tokens(run.train), fill, color=colour, linewidth=1.6)
        speed = [event["tokens_per_second"] or np.nan for event in run.train]
        axes[1, 2].plot(run.tokens(run.train), speed, color=colour, linewidth=1.6)
    measured = sorted({event["num_speculative_tokens"] for run in runs for event in run.measured})
    note = f", measured at n = {', '.join(map(str, measured))}" if measured else ""
    is_one_k = len({run.ttt_steps for run in runs}) == 1
    titles = (
        (
            "Loss" if is_one_k else "Loss over each run's own K steps, not comparable",
            "sum of weighted cross-entropies (nats)",
        ),
        (
            f"Acceptance length at n = {n} drafted tokens" if n else "Acceptance length: no common n",
            f"tokens per verify step (expected{note})",
        ),
        ("Acceptance by depth, last validation", "share of supervised rows"),
        (
            f"Top-1 agreement of each depth, {'validation' if prefix else 'training'}",
            "share of supervised rows",
        ),
        ("Fill of the batches", "real tokens / computed slots (%)"),
        ("Speed (moving average)", "tokens per second"),
    )
    for panel, (title, unit) in zip(axes.flat, titles, strict=True):
        dress(panel, title, unit, "training tokens")
        if panel is not axes[0, 2]:
            panel.set_xlim(left=-0.03 * panel.get_xlim()[1])  # from the start on, its marker whole
            panel.xaxis.set_major_formatter(_in_thousands)
    axes[0, 2].set_xlabel("ttt_step k, drafted tokens before this one")
    axes[0, 2].xaxis.get_major_locator().set_params(integer=True)
    for panel in (axes[0, 2], axes[1, 0]):
        panel.set_ylim(0, 1)
    axes[1, 1].set_ylim(top=101)
    axes[1, 2].set_ylim(bottom=0)
    axes[1, 2].yaxis.set_major_formatter(_in_thousands)
    names = [
        legend_line(
            color=colour, linewidth=4, label=run.label if is_one_k else f"{run.label} (K = {run.ttt_steps})"
        )
        for run, colour in zip(runs, colours, strict=True)
    ]
    figure.legend(handles=names, loc="outside upper center", ncols=4, frameon=False)
    figure.legend(handles=_style_legend(runs), loc="outside lower center", ncols=5, frameon=False)
    return figure


def shown_length(runs: Sequence[RunMetrics]) -> str | None:
    """The n at which acceptance lengths are drawn: the measured one, else the largest that all runs have;
    None where they have none in common.
    """
    common = set.intersection(*(set(run.train[-1]["acceptance_length"]) for run in runs))
    if not common:
        return None
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
            yerr=error_bars(estimates),
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


def _draw_depth_courses(panel: "Axes", run: RunMetrics, colour: str, prefix: str) -> None:
    """One line a depth, the fainter the deeper. prefix: of the names in validation events, or none."""
    events = run.validations if prefix else run.train
    curves_KE = np.array([event[f"{prefix}top1_agreement"] for event in events], dtype=float).T
    for depth, curve in enumerate(curves_KE):
        alpha = 1 - 0.75 * depth / max(len(curves_KE) - 1, 1)
        panel.plot(run.tokens(events), curve, color=colour, alpha=alpha, linewidth=1.6)


def _in_thousands(value: float, _: int) -> str:
    """12,000 and 1.5 M: an axis without powers of ten."""
    return f"{value / 1e6:,.4g} M" if abs(value) >= 1e6 else f"{value:,.6g}"


def _style_legend(runs: Sequence[RunMetrics]) -> list[Any]:
    """Handles for what the line styles mean; beside the panels, where they cover nothing."""
    handles = [
        legend_line(color=INK, linewidth=1, alpha=0.55, label="training"),
        legend_line(color=INK, linewidth=2, marker="o", markersize=4.5, label="validation"),
    ]
    if any(run.measured for run in runs):
        handles.append(
            legend_line(color=INK, linestyle="", marker="D", markerfacecolor="white", label="measured, 95 %")
        )
    return [
        *handles,
        legend_line(color=INK, linestyle="-", label="top1_agreement (paler: deeper)"),
        legend_line(color=INK, linestyle="--", label="acceptance_rate"),
    ]
