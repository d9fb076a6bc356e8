"""Acceptance as a figure, and what all figures share. matplotlib (extra `plot`) is imported when drawing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle_train.decode.figures import ALL, Estimate, GroupFigures
from eagle_train.errors import InputError
from eagle_train.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

SUFFIXES = (".png", ".svg", ".pdf")
DOTS_PER_INCH = 130
TEXT_COLUMNS, CHARACTER_INCHES, LINE_INCHES = 110, 0.085, 0.24  # of an answer's text
INK, FAINT = "#222222", "#8a8a8a"
# Okabe and Ito's colours, which colour-blind readers tell apart, without the yellow that paper swallows.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")


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


def draw_acceptance(
    groups: Mapping[str, GroupFigures], expected_per_position: Sequence[float] | None = None
) -> "Figure":
    """Acceptance by position with 95 % intervals, beside what the chain walk expects where it is given, and
    acceptance length by category where there are any.

    groups: from `group_figures`; expected_per_position: shares of the walk's verify steps, `[N]`.
    """
    categories = [name for name in groups if name != ALL]
    figure = new_figure(12 if categories else 6.5, max(4.6, 0.3 * len(groups)))
    panels = figure.subplots(1, 2 if categories else 1, squeeze=False)[0]
    total = groups[ALL].every
    positions = np.arange(1, len(total.acceptance_per_position) + 1)
    panels[0].errorbar(
        positions,
        [estimate.value for estimate in total.acceptance_per_position],
        yerr=error_bars(total.acceptance_per_position),
        fmt="o-",
        color=COLOURS[0],
        capsize=4,
        linewidth=1.8,
        label="measured, 95 % interval",
    )
    if expected_per_position is not None:
        panels[0].plot(
            positions,
            expected_per_position,
            "x",
            color=COLOURS[1],
            markersize=9,
            zorder=3,
            label="expected",
        )
    panels[0].set_ylim(0, 1)
    panels[0].xaxis.get_major_locator().set_params(integer=True)
    dress(panels[0], "Acceptance by position", "share of verify steps", "drafted token")
    figure.legend(loc="outside lower left", ncols=2, frameon=False)
    if categories:
        _draw_categories(panels[1], groups)
    return figure


def draw_answer(tokens: Sequence[str], runs: Sequence[tuple[int, int, int]]) -> "Figure":
    """The text of an answer, one box a verify step: drafted and accepted tokens on a ground that is the
    deeper the more of them the step brought, the target's own token framed.

    tokens: the text of each token; runs: from `answer_runs`.
    """
    from matplotlib.patches import Rectangle

    boxes: list[tuple[int, int, str, float | None]] = []  # column, line, text, depth of the ground or none
    longest = max((accepted - start for start, accepted, _ in runs), default=0)
    column = line = 0
    for start, accepted, end in runs:
        for index in range(start, end):
            text = tokens[index].replace("\n", "\u21b5").replace("\t", " ")
            if column + len(text) > TEXT_COLUMNS and column:
                column, line = 0, line + 1
            depth = 0.15 + 0.45 * (accepted - start) / max(longest, 1) if index < accepted else None
            boxes.append((column, line, text, depth))
            column += len(text)
            if "\n" in tokens[index]:
                column, line = 0, line + 1
    figure = new_figure(TEXT_COLUMNS * CHARACTER_INCHES + 0.3, (line + 1) * LINE_INCHES + 0.7)
    panel = figure.subplots()
    panel.set_xlim(0, TEXT_COLUMNS)
    panel.set_ylim(line + 1, 0)
    panel.set_axis_off()
    panel.set_title(
        f"blue: drafted and accepted, deeper the more in a step (up to {longest}); framed: the target's own",
        fontsize=9,
        loc="left",
        color=INK,
    )
    for left, top, text, depth in boxes:
        own = {"facecolor": "none", "edgecolor": "#bbbbbb", "linewidth": 0.6}
        drafted = {"facecolor": COLOURS[0], "alpha": depth, "linewidth": 0}
        style: dict[str, Any] = own if depth is None else drafted
        panel.add_patch(Rectangle((left, top + 0.08), len(text), 0.84, **style))
        for place, character in enumerate(text):
            panel.text(
                left + place + 0.5,
                top + 0.53,
                character,
                family="monospace",
                fontsize=9,
                ha="center",
                va="center",
                parse_math=False,
            )
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
            xerr=error_bars([length]),
            fmt="o",
            color=INK if name == ALL else COLOURS[0],
            capsize=4,
            markersize=7,
        )
    names = [f"{name} ({prompts:,})" for name, _, prompts in reversed(drawn)]
    panel.set_yticks(range(len(drawn)), names)
    panel.set_ylim(-0.6, len(drawn) - 0.4)
    dress(panel, "Acceptance length by category", "", "tokens per verify step, 95 % interval")
    total = groups[ALL].every.acceptance_length
    if total is not None:
        panel.axvline(total.value, color=FAINT, linewidth=1, linestyle=":")


def error_bars(estimates: Sequence[Estimate]) -> np.ndarray:
    """Distances below and above each value, `[2, len]`; NaN, which draws nothing, without an interval."""
    return np.array(
        [
            [np.nan if e.low is None else e.value - e.low for e in estimates],
            [np.nan if e.high is None else e.high - e.value for e in estimates],
        ]
    )


def dress(panel: "Axes", title: str, unit: str, horizontal: str) -> None:
    """Title, axes with their units, and no more lines than are read."""
    panel.set_title(title, fontsize=11, loc="left", color=INK)
    panel.set_ylabel(unit)
    panel.set_xlabel(horizontal)
    panel.grid(color="#e6e6e6", linewidth=0.8)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def legend_line(**style: Any) -> "Line2D":
    """A line for a legend, drawn nowhere else; style: what matplotlib's Line2D takes, its label among it."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **style)
