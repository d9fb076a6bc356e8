"""What a person sees, and the same figures as one JSON object an event in `metrics.jsonl`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_train.files import write_atomically, writing

CHECKS = ("validation", "measured")


class MetricsLog:
    """Appends events to a JSON-lines file. A missing figure is null; NaN is never written.

    is_kept: False on all ranks but the first.
    """

    def __init__(self, path: Path, *, is_kept: bool = True) -> None:
        self.path, self.is_kept = path, is_kept

    def write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        if not self.is_kept:
            return
        line = json.dumps({"event": event, "step": step, **values}, allow_nan=False)
        with writing(self.path), self.path.open("a") as file:
            file.write(line + "\n")

    def drop_after(self, step: int, *, owes_checks: bool) -> None:
        """Forget events of steps that a resumed run will do again, and a line that a crash cut short.

        owes_checks: the run will do the checks of `step` itself again.
        """
        if not self.is_kept or not self.path.exists():
            return
        lines = self.path.read_text().splitlines(keepends=True)
        events = [(line, json.loads(line)) for line in lines if line.endswith("\n")]
        kept = [
            line
            for line, event in events
            if event["step"] < step + (not owes_checks or event["event"] not in CHECKS)
        ]
        write_atomically(self.path, lambda temporary: temporary.write_text("".join(kept)))


def format_facts(title: str, facts: Mapping[str, str]) -> str:
    """A title and aligned `name  value` lines."""
    width = max(map(len, facts))
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in facts.items())])


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns, the first one left-aligned."""
    table = [header, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    lines = []
    for row in table:
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def format_figure(value: float | None, digits: int = 3) -> str:
    """A figure, or a dash where there was nothing to measure."""
    return "-" if value is None else f"{value:.{digits}f}"


def format_shapes(shapes: Mapping[str, int], limit: int = 6) -> str:
    """Batch shapes and how often each occurs, the most frequent first."""
    ranked = sorted(shapes.items(), key=lambda item: -item[1])
    more = f" and {len(ranked) - limit} more" if len(ranked) > limit else ""
    return ", ".join(f"{shape} (x{times:,})" for shape, times in ranked[:limit]) + more


def format_sources(sources: Sequence[str], limit: int = 5) -> str:
    """The first places in data files, and how many more there are."""
    more = f" and {len(sources) - limit} more" if len(sources) > limit else ""
    return ", ".join(sources[:limit]) + more


def format_validation(step: int, metrics: Mapping[str, Any], baseline: Mapping[str, float | None]) -> str:
    """The validation table: figures per TTT step, then acceptance lengths at each n beside the bigram
    drafter's.
    """
    per_step = [
        ("loss", metrics["loss_per_step"]),
        ("acceptance_rate", metrics["acceptance_rate"]),
        ("top1_agreement", metrics["top1_agreement"]),
    ]
    header = ["ttt_step", *(str(k) for k in range(len(metrics["acceptance_rate"])))]
    steps = format_table(header, [[name, *map(format_figure, values)] for name, values in per_step])
    lengths = metrics["acceptance_length"]
    walk = format_table(
        ["drafted tokens n", *lengths],
        [
            ["acceptance_length (expected)", *(format_figure(lengths[n], 2) for n in lengths)],
            ["bigram drafter", *(format_figure(baseline.get(n), 2) for n in lengths)],
        ],
    )
    rows = f"{metrics['supervised_rows']:,} supervised rows"
    title = f"validation at step {step}: loss {format_figure(metrics['loss'])}, {rows}"
    return f"{title}\n{steps}\n{walk}"
