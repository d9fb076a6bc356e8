"""bench_step, profile_step and bench_memory at tiny sizes: what they count and split, not what they time."""

import argparse
import copy
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_train.train.loop import Run, train_step
from eagle_train.train.schedule import Position

FLAGS = ["--training_seq_len", "64", "--mock_len", "16", "--mock_num_samples", "32", "--ttt_steps", "3"]
FLAGS += ["--draft_vocab_size", "40", "--dtype", "float32", "--device", "cpu"]


@pytest.fixture(scope="module")
def flags(target_dir: Path) -> list[str]:
    return ["--target", str(target_dir), *FLAGS]


@pytest.fixture(scope="module")
def run(flags: list[str], scripts_on_path: None) -> Iterator[Run]:
    with importlib.import_module("bench_step").open_run(flags, compiled=False) as run:
        yield run


def batches_of(run: Run) -> Any:
    return next(run.schedule.windows(run.prepared.data.train_samples, 0, Position(), 1)).batches


def test_recorded_products_are_those_of_the_formula(run: Run) -> None:
    """Target and attention exactly; the others do what is needed and rows that fill up or are not read."""
    bench_step = importlib.import_module("bench_step")
    parts = importlib.import_module("step_parts")
    batches = batches_of(run)
    clock = parts.Clock(torch.device("cpu"))
    products = bench_step.record(run, batches, clock)
    done = {part: sum(p.times[part] * p.flops for p in products) for part in parts.PARTS}
    needed = bench_step.formula_flops(run, batches)
    assert done[parts.TARGET] == needed[parts.TARGET] > 0
    assert done[parts.ATTENTION] == pytest.approx(needed[parts.ATTENTION])
    for part in (parts.HEAD, parts.LABELS, parts.LOSS):
        assert done[part] >= 0.95 * needed[part] > 0, part
    assert done[parts.OPTIMIZER] == done[parts.DATA] == done[parts.OTHER] == 0


def test_timers_change_no_gradient_and_give_each_part_time(run: Run) -> None:
    parts = importlib.import_module("step_parts")
    batches = batches_of(run)
    before = {name: value.clone() for name, value in run.prepared.head.state_dict().items()}
    optimizer_before = copy.deepcopy(run.optimizer.state_dict())
    weights = []
    for timed in (False, True):
        run.prepared.head.load_state_dict(before)
        run.optimizer.load_state_dict(copy.deepcopy(optimizer_before))
        run.state.step = 0
        clock = parts.Clock(torch.device("cpu"))
        if timed:
            with parts.wrapped_parts(run, clock.timed):
                clock.start()
                train_step(run, batches)
                seconds = clock.stop()
        else:
            train_step(run, batches)
        weights.append({name: value.clone() for name, value in run.prepared.head.state_dict().items()})
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-4, atol=1e-5, msg=name)
    assert {part for part, value in seconds.items() if value > 0} >= set(parts.PARTS) - {parts.DATA}


def test_backward_time_goes_to_the_part_that_made_the_node() -> None:
    """Two parts in a row: their backwards come in reverse order, and nothing else is in between."""
    parts = importlib.import_module("step_parts")
    clock = parts.Clock(torch.device("cpu"))
    first = clock.timed("first", lambda x: x * 2)
    second = clock.timed("second", lambda x: x * 3)
    weight = torch.ones(3, requires_grad=True)
    clock.start()
    loss = second(first(weight + 0)).sum()
    at_backward = len(clock.stamps)
    loss.backward()
    order = [part for part, _ in clock.stamps[at_backward:]]
    clock.stop()
    assert weight.grad is not None
    assert weight.grad.tolist() == [6.0] * 3
    assert [part for part in order if part != parts.OTHER] == ["second", "first"]


def test_bench_step_reports_a_ratio_over_all_parts(flags: list[str]) -> None:
    bench_step = importlib.import_module("bench_step")
    options = argparse.Namespace(repeats=2, compiled=False, random_target=None)
    results = bench_step.bench(flags, options)
    assert results["alone_seconds"] > 0
    parts = results["parts"].values()
    assert results["flops"] == pytest.approx(sum(part["flops"] for part in parts))
    assert sum(part["seconds"] for part in parts) == pytest.approx(
        results["timed_step_seconds"] + results["parts"]["data"]["seconds"], rel=0.5
    )
    text = bench_step.report(results)
    assert "step / its products alone" in text
    assert json.loads(json.dumps(results)) == results


def test_trace_has_a_range_for_every_part(run: Run, tmp_path: Path) -> None:
    profile_step = importlib.import_module("profile_step")
    path = tmp_path / "trace.json"
    profile_step.write_trace(run, 1, path)
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert names >= {
        "step 0", "data", "target forward", "fc: fuse", "draft step 0: project", "draft step 2: attention",
        "draft step 2: finish", "vocabulary labels", "vocabulary loss", "backward", "optimizer",
    }  # fmt: skip
    assert list(tmp_path.iterdir()) == [path]


def test_memory_calculation_is_linear_and_holds_no_full_logits() -> None:
    """Llama-3.1-8B's sizes at T = 8192: some GiB, of which no part is the 4 GiB of T x V in float32."""
    bench_memory = importlib.import_module("bench_memory")
    sizes = (4096, 128_256, 32_000)
    peaks = [bench_memory.peak(bench_memory.vocabulary_memory(*sizes, t)) for t in (4096, 8192, 12288)]
    assert peaks[1] - peaks[0] == peaks[2] - peaks[1] > 0
    parts = bench_memory.vocabulary_memory(*sizes, 8192)
    assert max(part.num_bytes for part in parts) < 8192 * 128_256 * 4 / 4
