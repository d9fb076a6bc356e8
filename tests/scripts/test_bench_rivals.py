"""What bench_rivals.py gives both sides, and what it makes of their answers; no rival is run."""

import argparse
import importlib
import io
from pathlib import Path
from typing import Any

import pytest

from eagle_train.errors import InputError


def options(rival: str, **changes: Any) -> argparse.Namespace:
    values: dict[str, Any] = {
        "rival": rival, "target": "demo", "random_llama": "32,8,96", "data": [], "mock_len": "uniform:10:40",
        "supervise": "all", "ttt_steps": 2, "draft_vocab_size": None, "row_len": 64, "samples_per_step": 3,
        "bucket_granularity": 16, "dtype": "float32", "num_threads": 1, "repeats": 4,
    }  # fmt: skip
    return argparse.Namespace(**(values | changes))


@pytest.mark.parametrize("rival", ["modelopt", "speculators"])
def test_both_sides_get_the_same_whole_steps(rival: str, tmp_path: Path) -> None:
    job = importlib.import_module("bench_rivals").make_job(options(rival), tmp_path)
    lengths = [[len(job["samples"][index]["input_ids"]) for index in step] for step in job["steps"]]
    assert len(lengths) == 5
    assert len({index for step in job["steps"] for index in step}) == sum(map(len, lengths))
    if rival == "modelopt":
        assert all(len(step) == 3 for step in lengths)
    else:
        assert all(sum(step) <= 64 for step in lengths)
    assert len(job["draft_token_ids"]) == 48
    assert all(s["loss_mask"] == [0] + [1] * (len(s["input_ids"]) - 1) for s in job["samples"])


def test_figures_leave_the_first_step_out() -> None:
    answers = [
        {"cpu_seconds": seconds, "wall_seconds": seconds, "loss": 1.0, "peak_memory_mib": 5.0}
        for seconds in (100.0, 2.0, 1.0, 4.0)
    ]
    figures = importlib.import_module("bench_rivals").side_figures(answers, [8] * 4, [16] * 4)
    assert figures["tokens_per_cpu_second"] == 4.0
    assert figures["slots_per_cpu_second"] == 8.0
    assert figures["fill"] == 0.5


def test_a_rival_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    log = tmp_path / "rival.log"
    log.write_text("ModuleNotFoundError: No module named 'modelopt'")
    with pytest.raises(InputError, match="No module named 'modelopt'"):
        importlib.import_module("bench_rivals").read_answer(io.StringIO("noise\n"), Path("run.py"), log)
