"""The GPU check's CPU subset: all sections run; one that fails, dies or hangs is recorded alone."""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_every_section_runs_at_tiny_sizes(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "gpu_check.py", "--device", "cpu", "--small", "--json", path],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert path.exists(), done.stderr
    sections = json.loads(path.read_text())["sections"]
    names = ("device", "attention", "recompiles", "step", "buckets", "packing")
    assert {name: outcome.get("error") for name, outcome in sections.items()} == dict.fromkeys(names)
    assert done.returncode == 0
    attention = sections["attention"]["figures"]
    assert set(attention) == {"cpu, float32", "cpu, bfloat16", "matmul, float32", "matmul, bfloat16"}
    assert all(result["holds"] for result in attention.values())
    assert sections["recompiles"]["figures"]["graphs_compiled"] > 0
    assert sections["recompiles"]["figures"]["recompiles_after_warmup"] == 0
    assert sections["step"]["figures"]["ratio"] > 0


def raises(args: argparse.Namespace) -> dict[str, Any]:
    raise RuntimeError("no such kernel")


def dies(args: argparse.Namespace) -> dict[str, Any]:
    os._exit(7)


def hangs(args: argparse.Namespace) -> dict[str, Any]:
    time.sleep(60)
    return {}


def does_not_hold(args: argparse.Namespace) -> dict[str, Any]:
    return {"cpu": {"holds": False}}


def gives_no_number(args: argparse.Namespace) -> dict[str, Any]:
    return {"error": float("nan")}


@pytest.mark.parametrize(
    ("section", "error"),
    [
        (raises, "RuntimeError: no such kernel"),
        (dies, "exit code 7"),
        (hangs, "took longer than its 1 seconds"),
        (gives_no_number, "not finite"),
        (does_not_hold, None),
    ],
)
def test_what_goes_wrong_in_a_section_is_its_result(
    section: Any, error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_check = importlib.import_module("gpu_check")
    monkeypatch.setitem(gpu_check.SECTIONS, "section", (section, 1))
    outcome = gpu_check.fenced("section", argparse.Namespace(), 1.0 if section is hangs else 20.0)
    assert not outcome["ok"]
    assert (error or "") in outcome.get("error", "")
