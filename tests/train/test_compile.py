"""Compiled equals eager, shapes are known before step 1, and the counters are Dynamo's own."""

import copy
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from eagle_train.batch import PackedBatch
from eagle_train.data.collator import BucketingCollator, round_up
from eagle_train.data.packing import Shape
from eagle_train.data.samples import Sample, answer_remaining_from_spans
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.mock_target import MockTarget
from eagle_train.model.target import draft_config
from eagle_train.objective.unroll import UnrolledSums
from eagle_train.train.compile import Compiled, compile_objective, compile_target, warm_up
from eagle_train.train.evaluate import evaluate, micro_batch_sums
from tests.commands import read_events, run
from tests.tiny import tiny_target

GRANULARITY, ROW = 64, 128
H, V, V_D = 64, 160, 96
SHAPES = [Shape(1, t, r) for t in range(64, ROW + 1, 64) for r in range(64, t + 1, 64)]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def target() -> MockTarget:
    return MockTarget(H, 8, V, dtype=torch.float32, device=torch.device("cpu"))


def new_head(target: MockTarget) -> Eagle3DraftHead:
    torch.manual_seed(0)
    head = Eagle3DraftHead(draft_config(target, V_D, 96))
    head.set_vocabulary(torch.arange(0, V, 1)[:V_D])
    return head


def random_samples(rng: np.random.Generator, room: int) -> list[Sample]:
    """Documents of any number and length that fit in `room` tokens, with any share supervised."""
    samples = []
    while room >= 1 and (not samples or rng.random() < 0.9):
        length = (
            int(rng.integers(1, room + 1)) if rng.random() < 0.3 else int(rng.integers(1, min(room, 12) + 1))
        )
        start = int(rng.integers(0, length + 1))
        spans = [(start, length)] if start < length else []
        ids = rng.integers(0, V, length).astype(np.int32)
        samples.append(Sample(ids, answer_remaining_from_spans(length, spans), f"s:{len(samples)}"))
        room -= length
    return samples


def collate(samples: list[Sample]) -> PackedBatch:
    """Both lengths rounded up to the granularity, as a plan would."""
    count = sum(sample.num_supervised_rows for sample in samples)
    return BucketingCollator(GRANULARITY)(samples, supervised_len=round_up(count, GRANULARITY))


def gradients(head: Eagle3DraftHead, sums: UnrolledSums) -> dict[str, torch.Tensor]:
    head.zero_grad()
    sums.loss.backward()
    return {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}


def compiled_head(target: MockTarget) -> tuple[Eagle3DraftHead, Compiled]:
    head = new_head(target)
    compiled = compile_objective(head)
    warm_up(compiled, head, target, SHAPES, GRANULARITY, progress=False)
    return head, compiled


SLOW = pytest.mark.skipif(
    not os.environ.get("EAGLE_TRAIN_SLOW_TESTS"),
    reason="compiles for half a minute; EAGLE_TRAIN_SLOW_TESTS=1 runs it",
)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=SLOW)])
def test_compiled_equals_eager_in_sums_and_gradients(dtype: torch.dtype) -> None:
    target = MockTarget(H, 8, V, dtype=dtype, device=torch.device("cpu"))
    plain, head = new_head(target), new_head(target)
    compiled = compile_objective(head)
    rng = np.random.default_rng(0)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 3e-2}
    for _ in range(3):
        batch = collate(random_samples(rng, ROW))
        weights = torch.full((4,), 1 / max(batch.supervised_counts(1)[0], 1))
        expected = micro_batch_sums(plain, target, batch, weights)
        sums = micro_batch_sums(head, target, batch, weights, compiled.chunks)
        torch.testing.assert_close(sums.loss, expected.loss, **tolerance)
        torch.testing.assert_close(sums.acceptance_sum, expected.acceptance_sum, rtol=1e-2, atol=1e-2)
        assert sums.supervised_rows.tolist() == expected.supervised_rows.tolist()
        wanted = gradients(plain, expected)
        for name, grad in gradients(head, sums).items():
            torch.testing.assert_close(grad, wanted[name], msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def test_u22_two_hundred_ragged_batches_need_no_graph_beyond_the_warm_up(target: MockTarget) -> None:
    head, compiled = compiled_head(target)
    warm = compiled.counts()["graphs_compiled"]
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    assert warm > 0
    rng = np.random.default_rng(1)
    documents = set()
    for number in range(200):
        batch = collate(random_samples(rng, int(rng.integers(1, ROW + 1))))
        documents.add(len(batch.sources))
        weights = torch.ones(2 + number % 4)
        if number % 2:
            micro_batch_sums(head, target, batch, weights, compiled.chunks).loss.backward()
        else:
            micro_batch_sums(head, target, batch, weights, compiled.chunks, differentiable=False)
    assert len(documents) > 8
    assert compiled.counts() == {
        "graphs_compiled": warm, "recompiles_after_warmup": 0, "eager_fallbacks": 0
    }  # fmt: skip
    assert counters["stats"]["unique_graphs"] == graphs
    assert sum(counters["graph_break"].values()) == breaks
    assert warm <= 3 * (ROW // GRANULARITY) + 3


def test_the_number_of_graphs_does_not_grow_with_the_ttt_steps(target: MockTarget) -> None:
    graphs = []
    for ttt_steps in (2, 7):
        torch._dynamo.reset()
        head = new_head(target)
        compiled = compile_objective(head)
        samples = random_samples(np.random.default_rng(2), ROW)
        batch = collate(samples)
        micro_batch_sums(head, target, batch, torch.ones(ttt_steps), compiled.chunks).loss.backward()
        graphs.append(compiled.counts()["graphs_compiled"])
    assert graphs[0] == graphs[1] > 0


def test_all_products_of_head_and_vocabulary_run_inside_compiled_code(target: MockTarget) -> None:
    """Counted in the autograd profiler: each product's event lies within a compiled region's."""
    head, compiled = compiled_head(target)
    batch = collate(random_samples(np.random.default_rng(3), ROW))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        micro_batch_sums(head, target, batch, torch.ones(3), compiled.chunks).loss.backward()
    products, outside = 0, []
    for event in profile.events():
        if event.name not in ("aten::mm", "aten::addmm", "aten::linear", "aten::bmm"):
            continue
        products += 1
        parent = event
        while parent is not None and "Compiled" not in parent.name and "Torch-Compiled" not in parent.name:
            parent = parent.cpu_parent
        if parent is None:
            outside.append(event.name)
    assert products > 20
    assert outside == []


def test_validation_uses_the_graphs_of_training(target: MockTarget) -> None:
    head, compiled = compiled_head(target)
    plain = copy.deepcopy(new_head(target))
    samples = [s for s in random_samples(np.random.default_rng(4), 900) if len(s) <= ROW]
    options: dict[str, Any] = {
        "ttt_steps": 3, "training_seq_len": ROW, "bucket_granularity": GRANULARITY, "progress": False
    }  # fmt: skip
    sizes = (64, 128)
    figures = evaluate(head, target, samples, chunks=compiled.chunks, supervised_sizes=sizes, **options)
    expected = evaluate(plain, target, samples, **options)
    assert figures["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert figures["acceptance_rate"] == pytest.approx(expected["acceptance_rate"], rel=1e-5)
    assert compiled.counts()["recompiles_after_warmup"] == 0


def test_an_unplanned_shape_is_counted_and_still_right(target: MockTarget) -> None:
    head = new_head(target)
    compiled = compile_objective(head)
    warm_up(compiled, head, target, [Shape(1, 64, 64)], GRANULARITY, progress=False)
    batch = collate(random_samples(np.random.default_rng(5), ROW))
    assert batch.num_slots == round_up(batch.num_tokens, GRANULARITY) > 64
    sums = micro_batch_sums(head, target, batch, torch.ones(2), compiled.chunks)
    expected = micro_batch_sums(new_head(target), target, batch, torch.ones(2))
    torch.testing.assert_close(sums.loss, expected.loss, rtol=1e-5, atol=1e-5)
    assert compiled.counts()["recompiles_after_warmup"] > 0


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_compiled_target_gives_the_same_states_from_one_graph_a_row_length(family: str) -> None:
    target = tiny_target(family)
    collator = BucketingCollator(GRANULARITY)
    documents = {
        length: Sample(np.arange(length, dtype=np.int32) % 90, np.zeros(length, np.int32), "s")
        for length in (20, 40, 180)
    }
    batches = [collator([documents[20], documents[40]]), collator([documents[180], documents[20]])]
    assert [batch.num_slots for batch in batches] == [64, 256]
    expected = [target.features(batch) for batch in batches]
    before = counters["stats"]["unique_graphs"]
    compile_target(target)
    for batch, wanted in zip(batches, expected, strict=True):
        torch.testing.assert_close(
            target.features(batch).final_hidden, wanted.final_hidden, rtol=1e-4, atol=1e-5
        )
    assert counters["stats"]["unique_graphs"] - before == 2, "all layers share a graph"


MOCK = {
    "mock_target": "64,8,160", "mock_num_samples": 30, "mock_len": "lognormal:40:120",
    "training_seq_len": 256, "bucket_granularity": 64, "ttt_steps": 3, "dtype": "float32",
    "num_threads": 1, "log_every": 1,
}  # fmt: skip


def words(options: dict[str, Any]) -> list[Any]:
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def test_a_compiled_run_says_what_it_compiled_and_never_compiles_again(tmp_path: Path) -> None:
    outputs = {}
    for compiled in (True, False):
        output = tmp_path / str(compiled)
        outcome = run(
            "--mock_data",
            *words(MOCK),
            "--torch_compile",
            compiled,
            "--num_epochs",
            2,
            "--output_dir",
            output,
        )
        assert outcome.code == 0, outcome.err
        outputs[compiled] = outcome
    assert re.search(
        r"^compiled \d+ graphs for \d+ shapes in \d+ s: 256/\d+ \(\d+\.\d s\)", outputs[True].out, re.M
    )
    assert "graphs for" not in outputs[False].out
    assert re.search(r"^  graphs +none compiled$", outputs[False].out, re.MULTILINE)
    assert re.search(r"graphs +\d+ compiled, 0 after the warm-up, 0 fallbacks", outputs[True].out)
    last = read_events(tmp_path / "True", "train")[-1]
    assert last["graphs_compiled"] > 0
    assert (last["recompiles_after_warmup"], last["eager_fallbacks"]) == (0, 0)
    eager = read_events(tmp_path / "False", "train")[-1]
    assert last["loss"] == pytest.approx(eager["loss"], rel=1e-4)


def test_a_run_goes_on_compiled_or_not_as_it_was_begun_or_not(tmp_path: Path) -> None:
    common = words(MOCK | {"max_steps": 4})
    whole = tmp_path / "whole"
    assert run("--mock_data", *common, "--torch_compile", "false", "--output_dir", whole).code == 0
    for first in ("true", "false"):
        output = tmp_path / first
        second = "false" if first == "true" else "true"
        begun = words(MOCK | {"max_steps": 2})
        assert run("--mock_data", *begun, "--torch_compile", first, "--output_dir", output).code == 0
        outcome = run("--mock_data", *common, "--torch_compile", second, "--output_dir", output, "--resume")
        assert outcome.code == 0, outcome.err
        losses = [read_events(path, "train")[-1]["loss"] for path in (whole, output)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_hundreds_of_lengths_are_not_compiled_unasked(tmp_path: Path) -> None:
    options = MOCK | {
        "bucket_granularity": 1,
        "max_steps": 2,
        "packing": "none",
        "batch_size": 1,
        "num_epochs": 1,
    }
    outcome = run("--mock_data", *words(options), "--output_dir", tmp_path / "out", "--torch_compile", "none")
    assert outcome.code == 0, outcome.err
    assert re.search(
        r"^torch.compile is off: \d+ lengths .* raise --bucket_granularity", outcome.out, re.MULTILINE
    )


def train_without_compiler(tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """A run without a compiler on PATH or in CXX; the cache is empty, or it would not be asked."""
    environment = os.environ | {
        "CXX": "/bin/false", "PATH": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")
    }  # fmt: skip
    words_of = [str(word) for word in words(MOCK | {"max_steps": 1, "output_dir": tmp_path / "out"})]
    return subprocess.run(
        [sys.executable, "-m", "eagle_train", "--mock_data", *words_of, *flags],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_u23_without_a_compiler_a_run_says_so_and_runs_eager(tmp_path: Path) -> None:
    ended = train_without_compiler(tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert re.search("^torch.compile is off: .*g\\+\\+", ended.stdout, re.MULTILINE)


def test_u23_a_compile_that_was_asked_for_is_refused_without_a_compiler(tmp_path: Path) -> None:
    ended = train_without_compiler(tmp_path, "--torch_compile")
    assert ended.returncode == 2
    assert re.search("^eagle_train: --torch_compile: .*g\\+\\+", ended.stderr, re.MULTILINE)
    assert not (tmp_path / "out" / "state").exists()
