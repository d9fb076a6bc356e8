"""The GPU check's CPU subset: every section runs, a failing one is recorded and stops nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def check(tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "check.json"
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "gpu_check.py", "--device", "cpu", "--small",
         "--json", path, *flags],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert path.exists(), done.stderr
    return done.returncode, json.loads(path.read_text())["sections"]


def test_every_section_runs_at_tiny_sizes(tmp_path: Path) -> None:
    code, sections = check(tmp_path)
    assert {name: outcome.get("error") for name, outcome in sections.items()} == dict.fromkeys(
        ("device", "attention", "recompiles", "step", "buckets", "packing")
    )
    assert code == 0
    attention = sections["attention"]["figures"]
    assert set(attention) == {"cpu, float32", "cpu, bfloat16", "matmul, float32", "matmul, bfloat16"}
    assert all(result["holds"] for result in attention.values())
    assert sections["recompiles"]["figures"]["graphs_compiled"] > 0
    assert sections["recompiles"]["figures"]["recompiles_after_warmup"] == 0
    assert sections["step"]["figures"]["ratio"] > 0


def test_a_section_over_its_time_is_stopped_and_recorded(tmp_path: Path) -> None:
    code, sections = check(tmp_path, "--sections", "packing", "--seconds", "0")
    assert code == 1
    assert "took longer than its" in sections["packing"]["error"]
