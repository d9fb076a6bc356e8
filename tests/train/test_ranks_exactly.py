"""Ranks against one process to 1e-6: gradients, sums and validation; tiny sets (U19); a fault on one rank.

Each number of ranks is started once and measures everything; see tests/train/rank_cases.py.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle_train.model.target import load_target
from eagle_train.train.distributed import Ranks
from tests.commands import read_events, write_conversations, write_jsonl
from tests.export.heads import V_D, save_head
from tests.train import rank_cases
from tests.train.rank_cases import FAULTY_STEP, GLOBAL_BATCHES
from tests.train.test_distributed import OPTIONS, figures, launch, numbers, words

PROGRAM = "from tests.train.rank_cases import main; main()"
EPOCHS = 2


@dataclass
class Measured:
    """What the ranks of one start left. results, gradients, codes: of each rank."""

    directory: Path
    world_size: int
    results: list[dict[str, Any]]
    gradients: list[dict[str, Tensor]]
    codes: list[dict[str, int]]
    ended: list[tuple[int, str, str]]

    def output(self, name: str) -> Path:
        return self.directory / f"{name}-{self.world_size}"


def token_row(number: int, length: int, answer: int) -> dict[str, Any]:
    ids = np.random.default_rng(number).integers(3, 90, length).tolist()
    return {"input_ids": ids, "loss_mask": [0] * (length - answer) + [1] * answer}


def prepare_runs(directory: Path, target: Path) -> list[str]:
    """Data and runs.json of the U19 cases; returns the flags that all runs share."""
    heldout = write_conversations(directory / "heldout.jsonl", 4)
    write_conversations(directory / "many.jsonl", 30)
    # One long sample and six of which nothing but one row is supervised.
    seven = [token_row(0, 250, 200), *(token_row(i, 2 + i, 2) for i in range(1, 7))]
    data = {
        "one": write_conversations(directory / "one.jsonl", 1),
        "seven": write_jsonl(directory / "seven.jsonl", seven),
    }
    head = directory / "head"
    save_head(head, load_target(str(target), dtype=torch.float32, device=torch.device("cpu")))
    unpacked = ["--packing", "none", "--batch_size", "8"]
    runs = {
        "one": ["--data", str(data["one"])],
        "one-unpacked": ["--data", str(data["one"]), *unpacked],
        "one-warm": ["--data", str(data["one"]), "--init_from", str(head)],
        "seven": ["--data", str(data["seven"])],
        "seven-unpacked": ["--data", str(data["seven"]), *unpacked],
        "seven-padded": ["--data", str(data["seven"]), *unpacked, "--padding_free", "false"],
    }
    (directory / "runs.json").write_text(json.dumps(runs))
    changes = {"num_epochs": EPOCHS, "eval_every": 100}
    return words({"target": target, "eval_data": heldout} | OPTIONS | changes)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> tuple[Path, list[str]]:
    directory = tmp_path_factory.mktemp("exactly")
    return directory, prepare_runs(directory, target_dir)


def read(directory: Path, world_size: int, ended: list[tuple[int, str, str]]) -> Measured:
    stems = [f"{directory}/{world_size}-{rank}" for rank in range(world_size)]
    return Measured(
        directory,
        world_size,
        [json.loads(Path(f"{stem}.json").read_text()) for stem in stems],
        [load_file(f"{stem}.safetensors") for stem in stems],
        [json.loads(Path(f"{stem}-codes.json").read_text()) for stem in stems],
        ended,
    )


@pytest.fixture(scope="module")
def alone(place: tuple[Path, list[str]]) -> Measured:
    directory, flags = place
    rank_cases.measure(Ranks(), directory)
    codes = rank_cases.train_all(Ranks(), directory, flags)
    (directory / "1-0-codes.json").write_text(json.dumps(codes))
    return read(directory, 1, [])


@pytest.fixture(scope="module", params=[2, 3])
def group(place: tuple[Path, list[str]], request: pytest.FixtureRequest) -> Measured:
    directory, flags = place
    ended = launch(request.param, PROGRAM, directory, *flags, timeout=120)
    for code, _, err in ended:
        assert code == 2, err  # of the last run, which has a fault
    return read(directory, request.param, ended)


def distance(value: Tensor, expected: Tensor) -> float:
    """Norm of the difference over norm of what is expected."""
    difference = (value.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize("name", GLOBAL_BATCHES)
def test_u20_u21_gradients_sums_and_counts_of_a_global_batch_are_one_process_s(
    group: Measured, alone: Measured, name: str
) -> None:
    expected = alone.results[0]["steps"][name]
    assert len(GLOBAL_BATCHES[name]) == expected["micro_batches"]
    for measured in (result["steps"][name] for result in group.results):
        assert measured["micro_batches"] == -(-len(GLOBAL_BATCHES[name]) // group.world_size)
        assert len(set(measured["supervised_rows"])) > 1, "ranks should differ, or this shows nothing"
        assert measured["sums"]["supervised_rows"] == expected["sums"]["supervised_rows"]
        assert measured["sums"]["top1_hits"] == expected["sums"]["top1_hits"]
        for key in ("loss", "sums", "metrics"):
            assert numbers([measured[key]]) == pytest.approx(numbers([expected[key]]), rel=1e-6, abs=0)
    names = [key for key in alone.gradients[0] if key.startswith(f"{name}/")]
    assert len(names) > 10
    for of_rank in group.gradients:
        for key in names:
            assert float(alone.gradients[0][key].norm()) > 0
            assert distance(of_rank[key], alone.gradients[0][key]) < 1e-6, key
            assert torch.equal(of_rank[key], group.gradients[0][key]), f"ranks would drift apart: {key}"


def test_u21_validation_does_not_depend_on_ranks_or_rows(group: Measured, alone: Measured) -> None:
    for count in ("4 documents", "7 documents"):
        cells = [
            numbers([metrics])
            for result in (*alone.results, *group.results)
            for name, metrics in result["validation"].items()
            if name.startswith(count)
        ]
        assert len(cells) == 4 * (1 + group.world_size)
        for cell in cells:
            assert cell == pytest.approx(cells[0], rel=1e-6, abs=0)


def test_u19_tiny_sets_train_on_every_rank_as_on_one(group: Measured, alone: Measured) -> None:
    """One sample, and seven uneven ones, packed and not: each sample once an epoch, equal steps, 120 s."""
    names = list(alone.codes[0])
    assert len(names) == 6
    for name in names:
        assert [codes[name] for codes in (*alone.codes, *group.codes)] == [0] * (1 + group.world_size)
        count = 1 if name.startswith("one") else 7
        output, expected = group.output(name), alone.output(name)
        (end,) = read_events(output, "end")
        assert end["samples"] == count * EPOCHS
        (untrained, _), (untrained_alone, _) = (read_events(o, "validation") for o in (output, expected))
        assert numbers(untrained) == pytest.approx(numbers(untrained_alone), rel=1e-6, abs=0)
        assert [sorted(e) for e in figures(output)] == [sorted(e) for e in figures(expected)]
        # Behind AdamW, which divides by gradients: elements near zero carry their rounding into the weights.
        assert numbers(figures(output)) == pytest.approx(numbers(figures(expected)), rel=1e-5, abs=1e-6)


def test_every_rank_starts_from_the_head_of_init_from(group: Measured) -> None:
    fresh, warm = (read_events(group.output(name), "validation")[0] for name in ("one", "one-warm"))
    assert numbers(warm) != pytest.approx(numbers(fresh), rel=1e-2)
    (start,) = read_events(group.output("one-warm"), "start")
    assert start["warm_start"]["rows_kept"] == V_D


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_loss_that_is_not_finite_on_one_rank_ends_all_with_the_step_before_saved(
    group: Measured, kind: str
) -> None:
    codes = [code for code, _, _ in group.ended] if kind == "loss" else [c[kind] for c in group.codes]
    assert codes == [2] * group.world_size
    state = json.loads((group.output(kind) / "state" / "state.json").read_text())
    assert state["step"] == FAULTY_STEP - 1
    weights = load_file(group.output(kind) / "state" / "weights.safetensors")
    assert all(bool(value.isfinite().all()) for value in weights.values())
    assert [event["step"] for event in read_events(group.output(kind), "train")] == list(
        range(1, FAULTY_STEP)
    )
    for _, _, err in group.ended:
        lines = [line for line in err.splitlines() if line.startswith("eagle_train: ")]
        assert len(lines) == 2, "one for each of the two faults"
        for line in lines:
            assert re.search(rf"not finite at step {FAULTY_STEP}, on \S*many.jsonl:\d+", line)
