"""Around compiling and ranks: too many shapes, targets that do not compile, launchers, finished runs.

Dynamo runs for real, with graphs executed as they are (`backend="eager"`), because only counts matter here.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from eagle_train.config import TrainConfig
from eagle_train.data.packing import Shape
from eagle_train.errors import InputError
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.mock_target import MockTarget
from eagle_train.model.target_config import draft_config
from eagle_train.objective.losses import PLAIN_CHUNKS
from eagle_train.train import compile as compiling
from eagle_train.train import run as running
from eagle_train.train import schedule as scheduling
from eagle_train.train.compile import (
    Compiled,
    compile_objective,
    compile_target,
    describe_compiled,
    try_compiled_target,
    warm_up,
)
from eagle_train.train.distributed import UNSUPPORTED_LAUNCHES, join
from eagle_train.train.evaluate import micro_batch_sums
from eagle_train.train.prepare import choose_rank_device
from eagle_train.train.schedule import Position, Schedule
from tests.commands import read_events, run, write_conversations, write_jsonl
from tests.tiny import tiny_target, write_target
from tests.train.test_distributed import launch

GRANULARITY = 64
SHAPES = [Shape(1, t, r) for t in range(64, 257, 64) for r in range(64, t + 1, 64)]
MOCK = {
    "mock_target": "64,8,160", "mock_num_samples": 40, "mock_len": "uniform:20:90", "training_seq_len": 96,
    "ttt_steps": 2, "dtype": "float32", "num_threads": 1, "log_every": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def graphs_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def compiled(function: Any, dynamic: bool) -> Any:
        return torch.compile(function, fullgraph=True, dynamic=dynamic, backend="eager")

    monkeypatch.setattr(compiling, "_compiled", compiled)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def words(options: dict[str, Any]) -> list[Any]:
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def test_any_number_of_unplanned_shapes_is_counted_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "why_not_compiled", lambda *args, **options: None)  # asks the C++ compiler
    monkeypatch.setattr(compiling, "HEAD_FUNCTIONS", ("fuse",))  # the quickest to compile: one graph a length
    planned = Schedule.shapes
    monkeypatch.setattr(Schedule, "shapes", lambda *args: {max(planned(*args))})
    options = MOCK | {
        "packing": "none", "batch_size": 1, "bucket_granularity": 1, "max_steps": 20, "eval_fraction": 0
    }  # fmt: skip
    outcome = run("--mock_data", *words(options), "--torch_compile", "true", "--output_dir", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    last = read_events(tmp_path / "out", "train")[-1]
    assert last["recompiles_after_warmup"] > 10
    assert last["eager_fallbacks"] == 0
    assert len(re.findall(r"^note: step \d+ compiled anew, for the unplanned shape", outcome.out, re.M)) > 10


@pytest.mark.parametrize("form", [{}, {"packing": "none", "padding_free": "false", "batch_size": 2}])
def test_measuring_checkpointing_and_workers_meet_no_new_shape(
    form: dict[str, Any], tmp_path: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding has other shapes at each step, a checkpoint runs functions again in the backward, and batches
    of worker processes come in shared memory: none may compile anything behind the warm-up.
    """
    monkeypatch.setattr(running, "why_not_compiled", lambda *args, **options: None)  # asks the C++ compiler
    options = {
        "target": target_dir,
        "data": write_conversations(tmp_path / "data.jsonl", 9),
        "eval_data": write_conversations(tmp_path / "heldout.jsonl", 5),
        "measure_prompts": write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "one two"}]),
        "measure_max_new_tokens": 8, "measure_every": 1, "eval_every": 1, "training_seq_len": 192,
        "bucket_granularity": 64, "ttt_steps": 3, "dtype": "float32", "device": "cpu", "num_threads": 1,
        "gradient_checkpointing": "true", "num_workers": 2, "num_epochs": 1, "log_every": 1,
        "torch_compile": "true", "compile_target": "true", "output_dir": tmp_path / "out",
    }  # fmt: skip
    outcome = run(*words(options | form))
    assert outcome.code == 0, outcome.err
    end = read_events(tmp_path / "out", "end")[-1]
    assert end["graphs_compiled"] > 0
    assert (end["recompiles_after_warmup"], end["eager_fallbacks"]) == (0, 0)
    assert len(read_events(tmp_path / "out", "measured")) == end["step"] + 1 > 1


def test_warm_up_runs_no_shape_whose_parts_are_compiled_and_misses_no_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = MockTarget(64, 8, 160, dtype=torch.float32, device=torch.device("cpu"))
    head = Eagle3DraftHead(draft_config(target, 96, 96))
    compiled = compile_objective(head)
    met: list[Shape] = []

    def counting(*args: Any, **options: Any) -> Any:
        met.append(compiling.shape_of(args[2]))
        return micro_batch_sums(*args, **options)

    monkeypatch.setattr(compiling, "micro_batch_sums", counting)
    warm_up(compiled, head, target, SHAPES, GRANULARITY, progress=False)
    assert len(set(met)) == 7, "four sizes of supervised rows in the longest row, then three shorter rows"
    assert list(compiled.warm_seconds) == [str(shape) for shape in sorted(SHAPES, reverse=True)]
    assert compiled.chunks is not PLAIN_CHUNKS
    for shape in SHAPES:
        batch = compiling._example(shape, GRANULARITY)
        micro_batch_sums(head, target, batch, torch.ones(3), compiled.chunks).loss.backward()
        micro_batch_sums(head, target, batch, torch.ones(3), compiled.chunks, differentiable=False)
    assert compiled.counts()["recompiles_after_warmup"] == 0
    assert compiled.counts()["graphs_compiled"] > 0


def test_a_target_that_does_not_compile_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = LlamaMLP.forward

    def broken(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return forward(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", broken)
    data = write_conversations(tmp_path / "data.jsonl", 12)
    flags = ["--target", write_target(tmp_path / "target"), "--data", data, "--output_dir", tmp_path / "out"]
    small = {"training_seq_len": 128, "bucket_granularity": 64, "ttt_steps": 2, "dtype": "float32"}
    refusal = run(*flags, *words(small), "--torch_compile", "true", "--compile_target").refusal()
    assert re.search(r"the MLP of LlamaForCausalLM does not compile as one graph \(.+\); drop", refusal)
    assert not (tmp_path / "out" / "state").exists()


def test_experts_that_are_looped_over_are_refused() -> None:
    target = tiny_target("mixtral", num_local_experts=4, num_experts_per_tok=2)
    target.model.config._experts_implementation = "eager"
    compile_target(target)
    with pytest.raises(InputError, match=r"MixtralForCausalLM .*; drop --compile_target"):
        try_compiled_target(target, [Shape(1, 64, 64)], GRANULARITY)


def describe(num_shapes: int) -> str:
    seconds = {str(Shape(1, 64 * t, 64)): 1.0 + (t == 3) for t in range(num_shapes, 0, -1)}
    return describe_compiled(Compiled(PLAIN_CHUNKS, compiling.graphs_so_far(), warm_seconds=seconds))


def test_few_compiled_shapes_are_listed_and_many_are_summed_up() -> None:
    few = "192/64 (2.0 s), 128/64 (1.0 s), 64/64 (1.0 s)"
    assert describe(3) == f"compiled 0 graphs for 3 shapes in 4 s: {few}"
    many = "smallest 64/64, largest 1280/64, slowest 192/64 (2.0 s)"
    assert describe(20) == f"compiled 0 graphs for 20 shapes in 21 s: {many}"


def test_a_finished_run_that_is_resumed_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = words(MOCK | {"max_steps": 2, "output_dir": tmp_path})
    assert run("--mock_data", *options).code == 0
    monkeypatch.delattr(compiling, "_compiled")
    outcome = run("--mock_data", *options, "--torch_compile", "true", "--resume")
    assert outcome.code == 0, outcome.err
    assert read_events(tmp_path, "compiled") == []
    assert len(read_events(tmp_path, "end")) == 2
    assert "nothing left to do: the run is at step 2" in outcome.out
    assert "an epoch takes" not in outcome.out


def test_each_epoch_of_a_run_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    plan_of = Schedule._plan_of

    def counting(self: Schedule, samples: Any, epoch: int, *args: Any) -> Any:
        planned.append(epoch)
        return plan_of(self, samples, epoch, *args)

    monkeypatch.setattr(Schedule, "_plan_of", counting)
    config = TrainConfig(training_seq_len=64, bucket_granularity=64, num_epochs=4)
    lengths = np.random.default_rng(0).integers(3, 60, 100)
    schedule = Schedule(lengths, config, 1, lengths // 2)
    num_steps = schedule.total_steps(0, Position())
    schedule.choose_supervised_sizes()
    assert schedule.shapes(Position(), 0, num_steps)
    schedule.digest(Position())
    assert sorted(planned) == [0, 1, 2, 3]


def test_only_the_first_rank_shows_that_it_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden: list[bool] = []

    def bar(epochs: Any, **options: Any) -> Any:
        hidden.append(options["disable"])
        return epochs

    monkeypatch.setattr(scheduling, "tqdm", bar)
    schedule = Schedule([5, 6], TrainConfig(training_seq_len=64, num_epochs=2), 1)
    for is_first in (True, False):
        schedule.total_steps(0, Position(), progress=is_first)
    assert hidden == [False, True]


@pytest.mark.parametrize("variable", UNSUPPORTED_LAUNCHES)
def test_launchers_of_sharded_training_are_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "true")
    with pytest.raises(InputError, match=f"{variable} is set.*accelerate launch --multi_gpu, or torchrun"):
        join(True, 60)
    monkeypatch.setenv(variable, "false")
    assert join(True, 60).world_size == 1


def test_several_ranks_take_no_device_of_ones_own_choice() -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    for name in ("auto", "cuda"):
        assert choose_rank_device(name, second) == second
    assert choose_rank_device("cpu", torch.device("cpu")) == torch.device("cpu")
    assert choose_rank_device("cpu:0", None) == torch.device("cpu", 0), "a process alone may choose"
    for name, given in (
        ("cuda:1", first),
        ("cuda:1", second),
        ("cpu:0", torch.device("cpu")),
        ("cpu", first),
    ):
        with pytest.raises(InputError, match=f"--device {name} .* use --device {given.type}, or auto"):
            choose_rank_device(name, given)


PAIR = """
import sys, warnings
warnings.simplefilter("error", FutureWarning)
import torch
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.mock_target import MockTarget
from eagle_train.model.target_config import draft_config
from eagle_train.train.distributed import data_parallel, join, leave
from eagle_train.__main__ import main
ranks = join(True, 60)
head = Eagle3DraftHead(draft_config(MockTarget(64, 8, 160, dtype=torch.float32, device=ranks.device), 96, 96))
print(type(data_parallel(head, ranks)).__name__)
code = main(sys.argv[1:])
leave()
sys.exit(code)
"""


def test_two_ranks_wrap_the_head_without_a_warning_and_refuse_one_device(tmp_path: Path) -> None:
    flags = ["--mock_data", *words(MOCK), "--device", "cpu:0", "--output_dir", tmp_path / "out"]
    for code, out, err in launch(2, PAIR, *flags, timeout=120):
        assert "DistributedDataParallel" in out, err
        assert code == 2, err
        assert err.splitlines()[-1].startswith("eagle_train: --device cpu:0 cannot be had with several ranks")


def test_plan_reads_the_target_as_training_does() -> None:
    flags = ("--mock_data", "--mock_target", "64,8")
    assert run("plan", *flags).refusal() == run(*flags).refusal()
