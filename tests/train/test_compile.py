"""Compiled equals eager, shapes are known before step 1, and the counters are Dynamo's own."""

import copy
import json
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
from eagle_train.model.target_config import draft_config
from eagle_train.objective.losses import PLAIN_CHUNKS
from eagle_train.objective.unroll import UnrolledSums
from eagle_train.train.compile import Compiled, compile_objective, compile_target, shape_of, warm_up
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


def sample(number: int, length: int, num_supervised: int) -> Sample:
    ids = np.random.default_rng(number).integers(0, V, length).astype(np.int32)
    spans = [(length - num_supervised - 1, length)] if num_supervised else []
    return Sample(ids, answer_remaining_from_spans(length, spans), f"s:{number}")


# Every form in two lengths, 64 and 208: rows, row length, rows of later TTT steps.
FORM_SHAPES = [Shape(1, 64, 64), Shape(2, 32, 64), Shape(13, 16, 64), Shape(13, 16, 208)]
THIRTEEN = [sample(number, 4 + number % 12, (number % 12) // 2 + 1) for number in range(13)]


def batch_forms() -> dict[str, PackedBatch]:
    flat, rows = BucketingCollator(16), BucketingCollator(16, padding_free=False)
    return {
        "unpacked, flat": flat([sample(0, 30, 12), sample(1, 9, 4), sample(2, 1, 0)], 64, 64),
        "a full row": flat([sample(3, 40, 38), sample(4, 24, 22)], 64, 64),
        "the tail of an epoch": flat([sample(5, 5, 1)], 64, 64),
        "a placeholder": flat([], 64, 64),
        "padded rows": rows([sample(6, 32, 30), sample(7, 20, 3)], 32, 64),
        "thirteen padded rows": rows(THIRTEEN, 16, 64),
        "thirteen padded rows, much supervised": rows([sample(n, 16, 14) for n in range(13)], 16, 208),
    }


def in_float32(target: MockTarget) -> MockTarget:
    """The same numbers, exactly."""
    wide = copy.copy(target)
    wide.lm_head = copy.deepcopy(target.lm_head).float()
    wide.embedding_VH = wide.lm_head.weight
    wide.aux_table, wide.final_table = target.aux_table.float(), target.final_table.float()
    return wide


def loss_and_gradients(
    head: Eagle3DraftHead, target: MockTarget, batch: PackedBatch, compiled: Compiled | None = None
) -> tuple[UnrolledSums, torch.Tensor]:
    """Sums, and all gradients as one float64 vector in which each parameter has unit weight."""
    weights = torch.tensor([0.8**k / max(n, 1) for k, n in enumerate(batch.supervised_counts(4))])
    chunks = compiled.chunks if compiled else PLAIN_CHUNKS
    sums = micro_batch_sums(head, target, batch, weights, chunks)
    grads = gradients(head, sums)
    assert len(grads) == len(list(head.parameters()))
    return sums, torch.cat([grads[name].double().flatten() for name in sorted(grads)])


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=SLOW)])
def test_compiled_equals_eager_in_every_form_of_batch(dtype: torch.dtype) -> None:
    """Loss, counts and gradients, then validation. In float32 to 1e-5 of the gradient's norm (other order of
    sums); in bfloat16 compiled code lies about as far from float32 as eager code does, though it keeps more
    of what is in between unrounded.
    """
    target = MockTarget(H, 8, V, dtype=dtype, device=torch.device("cpu"))
    plain, head, wide = new_head(target), new_head(target), in_float32(target)
    compiled = compile_objective(head)
    warm_up(compiled, head, target, FORM_SHAPES, 16, progress=False)
    for form, batch in batch_forms().items():
        assert shape_of(batch) in FORM_SHAPES, form
        sums, grads = loss_and_gradients(head, target, batch, compiled)
        eager, eager_grads = loss_and_gradients(plain, target, batch)
        exact, exact_grads = loss_and_gradients(plain, wide, batch)
        assert (
            sums.supervised_rows.tolist() == eager.supervised_rows.tolist() == exact.supervised_rows.tolist()
        )
        if dtype == torch.float32:
            assert sums.loss.item() == pytest.approx(eager.loss.item(), rel=1e-6), form
            torch.testing.assert_close(sums.acceptance_sum, eager.acceptance_sum, rtol=1e-5, atol=1e-5)
            assert sums.top1_hits.tolist() == eager.top1_hits.tolist(), form
            assert float((grads - eager_grads).norm()) <= 1e-5 * float(eager_grads.norm()), form
        else:
            rounding = float((eager_grads - exact_grads).norm())
            assert rounding <= 0.05 * float(exact_grads.norm()), form
            assert float((grads - exact_grads).norm()) <= 1.5 * rounding, form  # 1.3 where few rows count
            assert sums.loss.item() == pytest.approx(exact.loss.item(), rel=1e-2), form
    assert float(exact_grads.norm()) > 0
    for options in (
        {"training_seq_len": 64, "bucket_granularity": 64},
        {"training_seq_len": 64, "bucket_granularity": 16, "padding_free": False, "batch_size": 13},
    ):
        common: dict[str, Any] = {"ttt_steps": 3, "progress": False, **options}
        figures = evaluate(head, target, THIRTEEN, chunks=compiled.chunks, supervised_sizes=(64,), **common)
        expected = evaluate(plain, target, THIRTEEN, **common)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        for key in ("loss", "loss_per_step", "acceptance_rate"):
            assert figures[key] == pytest.approx(expected[key], rel=tolerance), key
        assert figures["supervised_rows"] == expected["supervised_rows"]
    assert compiled.counts()["recompiles_after_warmup"] == 0


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


def test_u23_where_compiling_is_disabled_a_run_says_so_and_one_that_asked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TORCHDYNAMO_DISABLE=1 makes torch.compile return functions as they are, without an error."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    options = words(MOCK | {"max_steps": 1})
    outcome = run("--mock_data", *options, "--output_dir", tmp_path / "default", "--torch_compile", "none")
    assert outcome.code == 0, outcome.err
    assert re.search("^torch.compile is off: .*TORCHDYNAMO_DISABLE", outcome.out, re.MULTILINE)
    assert re.search(r"^  graphs +none compiled$", outcome.out, re.MULTILINE)
    asked = run("--mock_data", *options, "--output_dir", tmp_path / "asked", "--torch_compile")
    assert re.search("--torch_compile: .*TORCHDYNAMO_DISABLE", asked.refusal())
    assert not (tmp_path / "asked" / "state").exists()


START = """
import json, torch
from torch._dynamo.utils import counters
from eagle_train.data.packing import Shape
from eagle_train.model.mock_target import MockTarget
from eagle_train.train.compile import compile_objective, warm_up
from tests.train.test_compile import H, V, new_head
target = MockTarget(H, 8, V, dtype=torch.float32, device=torch.device("cpu"))
head = new_head(target)
compiled = compile_objective(head)
warm_up(compiled, head, target, [Shape(1, 64, 64)], 64, progress=False)
hits, misses = (counters["inductor"][f"fxgraph_cache_{end}"] for end in ("hit", "miss"))
print(json.dumps({"hits": hits, "misses": misses, "graphs": compiled.counts()["graphs_compiled"]}))
"""


@SLOW
def test_a_second_start_takes_its_graphs_from_the_cache_of_inductor(tmp_path: Path) -> None:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    first, second = (
        json.loads(
            subprocess.run(
                [sys.executable, "-c", START], env=environment, capture_output=True, text=True, check=True
            ).stdout
        )
        for _ in range(2)
    )
    assert first["hits"] == 0
    assert first["misses"] > first["graphs"] > 0, "forward and backward graphs are compiled"
    assert second == {"hits": first["misses"], "misses": 0, "graphs": first["graphs"]}
