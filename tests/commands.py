"""The command line, run in-process on a tiny target, and the data files that it reads."""

import contextlib
import io
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_train.__main__ import main
from tests.data.templates import turns

PROMPTS = ("yes no", "2+2?", "one two three", "weather and no weather")
ANSWERS = ("4", "one yes", "no weather today", "yes, and two more", "three four five six")


@dataclass(frozen=True)
class Outcome:
    """What a command left: exit code, standard output, standard error."""

    code: int
    out: str
    err: str

    def refusal(self) -> str:
        """The one line that a refused command prints, behind any progress bar and not on the bar's line."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        own = [line for line in lines if line.startswith("eagle_train: ")]
        assert self.code == 2, f"exit code {self.code}: {self.err}"
        assert own == lines[-1:], self.err
        return own[0]


def run(*flags: object) -> Outcome:
    """`python -m eagle_train` with these words, in this process; eager where they do not ask to compile,
    because compiling takes longer than these runs.
    """
    out, err = io.StringIO(), io.StringIO()
    words = [str(flag) for flag in flags]
    is_training = "--help" not in words and words[:1] not in (["plan"], ["measure"], ["plot"])
    eager = [] if "--torch_compile" in words or not is_training else ["--torch_compile", "false"]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*words, *eager])
    return Outcome(code, out.getvalue(), err.getvalue())


def conversation(index: int) -> dict[str, Any]:
    """A short talk; each index has other words or another length."""
    text = ANSWERS[index % len(ANSWERS)] + f" {index}" * (index % 3)
    return {"messages": turns(PROMPTS[index % len(PROMPTS)] + f" {index}", text)}


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_conversations(path: Path, count: int) -> Path:
    return write_jsonl(path, map(conversation, range(count)))


def read_events(output_dir: Path, event: str | None = None) -> list[dict[str, Any]]:
    """The events of metrics.jsonl, or those of one kind."""
    events = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return [values for values in events if event in (None, values["event"])]
