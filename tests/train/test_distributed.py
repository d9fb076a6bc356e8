"""Two and three ranks train and validate as one does; disagreement and death end in an error, not a hang."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from eagle_train.objective.acceptance import AcceptanceTotals
from eagle_train.train.distributed import Ranks, join
from tests.commands import read_events, run, write_conversations

MAIN = "from eagle_train.__main__ import main; import sys; sys.exit(main(sys.argv[1:]))"
# The global batch holds the whole epoch for any number of ranks, so each step sees the same samples.
OPTIONS = {
    "training_seq_len": 256,
    "bucket_granularity": 64,
    "tokens_per_step": 4096,
    "ttt_steps": 3,
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "num_epochs": 3,
    "log_every": 1,
    "eval_every": 3,
    "learning_rate": 1e-3,
    "torch_compile": "false",
}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def launch(
    world_size: int, program: str, *arguments: object, timeout: int = 240
) -> list[tuple[int, str, str]]:
    """Processes as a launcher starts them: exit code, standard output and error of each rank."""
    world = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)],
            env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    deadline = time.monotonic() + timeout
    ended = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(deadline - time.monotonic(), 1))
            ended.append((process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
    return ended


def words(options: dict[str, Any]) -> list[str]:
    return [str(word) for name, value in options.items() for word in (f"--{name}", value)]


class Workplace:
    def __init__(self, directory: Path, target: Path) -> None:
        self.directory = directory
        # Lengths and supervised counts differ from rank to rank; 17 samples leave one of three ranks empty.
        data = write_conversations(directory / "data.jsonl", 17)
        heldout = write_conversations(directory / "heldout.jsonl", 5)
        self.common = {"target": target, "data": data, "eval_data": heldout} | OPTIONS

    def train(self, world_size: int, **options: Any) -> Path:
        output = self.directory / "-".join([str(world_size), *map(str, options.values())])
        flags = words(self.common | {"output_dir": output} | options)
        if world_size == 1:
            outcome = run(*flags)
            assert outcome.code == 0, outcome.err
        else:
            for code, _, err in launch(world_size, MAIN, *flags):
                assert code == 0, err
        return output


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("ranks"), target_dir)


@pytest.fixture(scope="module")
def alone(place: Workplace) -> Path:
    return place.train(1)


OF_BATCHING = re.compile(
    "seconds|per_second|data_wait|peak_memory|slots|fill|bucket_len|imbalance|graphs|after_warmup|fallbacks"
)


def figures(output: Path) -> list[dict[str, Any]]:
    """Train and validation events, without what depends on the clock or on how rows were laid out."""
    events = [e for e in read_events(output) if e["event"] in ("train", "validation")]
    return [{key: value for key, value in e.items() if not OF_BATCHING.search(key)} for e in events]


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [float(value)] if isinstance(value, int | float) else []


def assert_same_training(output: Path, expected: Path) -> None:
    assert [sorted(e) for e in figures(output)] == [sorted(e) for e in figures(expected)]
    assert numbers(figures(output)) == pytest.approx(numbers(figures(expected)), rel=1e-5, abs=1e-6)
    weights = [load_file(path / "state" / "weights.safetensors") for path in (output, expected)]
    for name, value in weights[1].items():
        assert float((weights[0][name].double() - value.double()).abs().max()) < 1e-5, name


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_train_and_validate_as_one_process_does(place: Workplace, alone: Path, world_size: int) -> None:
    """The same global batches: loss, acceptance and weights agree; one of three ranks has an empty bucket."""
    output = place.train(world_size)
    assert_same_training(output, alone)
    state = json.loads((output / "state" / "state.json").read_text())
    assert state["position"]["segments"][0]["world_size"] == world_size
    events = read_events(output)
    assert [e["event"] for e in events if e["event"] != "train"] == [
        "start",
        "validation",
        "validation",
        "end",
    ]


@pytest.mark.skipif(
    not os.environ.get("EAGLE_TRAIN_SLOW_TESTS"),
    reason="compiles for a minute on each rank; EAGLE_TRAIN_SLOW_TESTS=1 runs it",
)
def test_a_compiled_pair_of_ranks_trains_as_one_process_does(place: Workplace, alone: Path) -> None:
    output = place.train(2, torch_compile="true")
    assert_same_training(output, alone)
    last = read_events(output, "train")[-1]
    assert last["graphs_compiled"] > 0
    assert (last["recompiles_after_warmup"], last["eager_fallbacks"]) == (0, 0)


def test_another_number_of_ranks_goes_on_where_the_first_stopped(place: Workplace) -> None:
    """Five samples a step: two ranks do part of an epoch, one process the rest, each sample once."""
    options = {"tokens_per_step": 256, "num_epochs": 1, "eval_every": 1, "save_every": 1}
    output = place.train(2, **options, max_steps=1)
    begun = words(place.common | options | {"output_dir": output})
    outcome = run(*begun, "--resume")
    assert outcome.code == 0, outcome.err
    end = read_events(output, "end")[-1]
    assert end["samples"] == 17
    state = json.loads((output / "state" / "state.json").read_text())
    assert [segment["world_size"] for segment in state["position"]["segments"]] == [2, 1]


def test_bad_input_on_any_rank_ends_all_with_one_line(place: Workplace) -> None:
    ended = launch(2, MAIN, *words(place.common | {"training_seq_len": 64, "overlong": "error"}), timeout=120)
    for code, _, err in ended:
        assert code == 2
        assert len([line for line in err.splitlines() if line.startswith("eagle_train: ")]) == 1


ODD = """
import sys, numpy as np
from eagle_train.errors import InputError
from eagle_train.train.distributed import join, leave
ranks = join(True, 60)
try:
    assert ranks.sum([1, ranks.rank]) == [2.0, 1.0]
    assert ranks.gather(ranks.rank) == [0, 1]
    assert ranks.from_first(lambda: "first") == "first"
    plan = "odd" if ranks.rank and "odd" in sys.argv else "even"
    ranks.require_agreement({"options": "same", "plan": plan})
    if "fault" in sys.argv:
        def fault():
            if ranks.rank == 1:
                raise InputError("bad row on rank 1")
        ranks.together(fault)
except InputError as error:
    print(error)
    sys.exit(2)
finally:
    leave()
print("agreed", ranks.rank, ranks.world_size)
"""


def test_ranks_that_agree_go_on_and_others_all_get_the_error() -> None:
    assert [(code, out) for code, out, _ in launch(2, ODD)] == [(0, "agreed 0 2\n"), (0, "agreed 1 2\n")]
    for code, out, err in launch(2, ODD, "odd"):
        assert code == 2, err
        assert out.startswith("rank 1 has another plan than rank 0 (odd and even); start all ranks")
    assert [(code, out) for code, out, _ in launch(2, ODD, "fault")] == [(2, "bad row on rank 1\n")] * 2


DYING = """
import os, sys
from eagle_train.train import loop
from eagle_train.__main__ import main
whole_step = loop.train_step
def step(run, window):
    if run.ranks.rank == 1 and run.state.step == 1:
        os._exit(9)
    return whole_step(run, window)
loop.train_step = step
sys.exit(main(sys.argv[1:]))
"""


def test_a_rank_that_dies_ends_the_others_with_a_message(place: Workplace) -> None:
    options = place.common | {"output_dir": place.directory / "dying", "rank_timeout": 20}
    started = time.monotonic()
    survivor, dead = launch(2, DYING, *words(options), timeout=120)
    assert dead[0] == 9
    assert survivor[0] == 1, survivor[2]
    assert re.search(
        r"^eagle_train: rank 0: another rank died or stopped answering", survivor[2], re.MULTILINE
    )
    assert time.monotonic() - started < 90


def test_torchrun_itself_starts_two_ranks(place: Workplace) -> None:
    """The launcher's own environment, and `-m eagle_train` as users write it: one summary, one header."""
    output = place.directory / "torchrun"
    launcher = ["--nproc_per_node", "2", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    flags = words(place.common | {"output_dir": output, "max_steps": 2, "num_epochs": 1})
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *launcher, "-m", "eagle_train", *flags],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    for fact in ("steps", "best head", "figures"):
        assert len(re.findall(f"^  {fact} ", ended.stdout, re.MULTILINE)) == 1, ended.stdout
    assert [event["event"] for event in read_events(output)].count("end") == 1
    state = json.loads((output / "state" / "state.json").read_text())
    assert (state["step"], state["position"]["segments"][0]["world_size"]) == (2, 2)


def test_a_process_alone_is_rank_zero_of_one() -> None:
    assert join(True, 60) == Ranks() == Ranks(0, 1, None)
    assert Ranks().sum([1, 2]) == [1.0, 2.0]
    assert Ranks().gather("x") == ["x"]
    assert Ranks().together(lambda: 5) == 5


def test_totals_survive_being_flattened() -> None:
    totals = AcceptanceTotals(3, (2, 3))
    rng = np.random.default_rng(0)
    totals.sums = {name: rng.random(3) for name in totals.sums}
    totals.walks[2].add(totals.walks[2].__class__(4, 9, np.array([3, 2])))
    totals.own_tokens, totals.own_token_rows = 5.0, 7
    again = totals.from_list(totals.as_list())
    assert again.metrics(0.8) == totals.metrics(0.8)
    doubled = totals.from_list([2 * value for value in totals.as_list()]).metrics(0.8)
    assert doubled["verify_steps"] == {"2": 8, "3": 0}
    assert doubled["acceptance_rate"] == totals.metrics(0.8)["acceptance_rate"]
