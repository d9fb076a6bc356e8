"""Heads are kept, and runs end, by the acceptance length that --select_by names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_train.decode.figures import acceptance_figures
from eagle_train.decode.results import PromptResult
from eagle_train.errors import InputError
from eagle_train.model.checkpoint import load_draft_head
from eagle_train.train import selection
from eagle_train.train.distributed import Ranks
from eagle_train.train.selection import format_measured
from tests.commands import read_events, run, write_conversations, write_jsonl

OPTIONS: dict[str, Any] = {
    "training_seq_len": 256,
    "bucket_granularity": 64,
    "ttt_steps": 3,
    "dtype": "float32",
    "device": "cpu",
    "max_steps": 4,
    "eval_every": 2,
    "learning_rate": 1e-3,
    "measure_max_new_tokens": 8,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("selection")
    rows = [{"prompt": f"one two {number}"} for number in range(5)]
    return {
        "target": target_dir,
        "data": write_conversations(directory / "data.jsonl", 12),
        "eval_data": write_conversations(directory / "heldout.jsonl", 4),
        "measure_prompts": write_jsonl(directory / "prompts.jsonl", rows),
    }


def train(options: dict[str, Any], output: Path) -> Any:
    return run(*[f"--{name}={value}" for name, value in (options | {"output_dir": output}).items()])


def test_measured_and_expected_agree_on_the_answers_that_were_decoded(
    data: dict[str, Any], tmp_path: Path
) -> None:
    outcome = train(data | OPTIONS | {"measure_every": 1, "measure_max_prompts": 3}, tmp_path / "run")
    assert outcome.code == 0, outcome.err
    events = read_events(tmp_path / "run", "measured")
    assert [event["step"] for event in events] == [0, 1, 2, 3, 4]
    for event in events:
        assert event["prompts"] == 3
        assert event["num_speculative_tokens"] == 3
        assert event["verify_steps"] > 0
        assert event["emitted_per_step"]["value"] == pytest.approx(
            event["expected_emitted_per_step"], rel=1e-9
        )
    assert outcome.out.count("prompts decoded, n = 3: acceptance_length ") == 5


def give_lengths(monkeypatch: pytest.MonkeyPatch, lengths: list[float]) -> None:
    """Selection sees these acceptance lengths in place of the validations' own."""
    original, given = selection.select_by_validation, iter(lengths)

    def select(run_: Any, metrics: Any) -> None:
        original(run_, metrics | {"acceptance_length": {str(run_.config.ttt_steps): next(given)}})

    monkeypatch.setattr("eagle_train.train.loop.select_by_validation", select)


@pytest.mark.parametrize(
    ("lengths", "best_step", "last_step"),
    [([1.0, 1.5, 1.4, 1.3, 9.9], 1, 3), ([1.0, 1.1, 1.05, 1.2, 1.3], 4, 4)],
)
def test_patience_ends_a_run_behind_its_peak_and_keeps_the_peak(
    data: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[float],
    best_step: int,
    last_step: int,
) -> None:
    give_lengths(monkeypatch, lengths)
    output = tmp_path / "run"
    options = {k: v for k, v in data.items() if k != "measure_prompts"} | OPTIONS | {"eval_every": 1}
    del options["measure_max_new_tokens"]
    outcome = train(options | {"patience": 2, "save_every": 1}, output)
    assert outcome.code == 0, outcome.err
    end = read_events(output, "end")[-1]
    assert (end["best_step"], end["step"]) == (best_step, last_step)
    assert ("stopped at step 3: 2 validations without a longer acceptance length" in outcome.out) == (
        last_step == 3
    )
    state = json.loads((output / "state" / "state.json").read_text())
    assert state["step"] == last_step
    assert state["best_acceptance_length"] == max(lengths[: last_step + 1])
    if last_step == 3:
        refused = train(options | {"patience": 2, "resume": "true"}, output).refusal()
        assert "--patience 2 ended the run at step 3" in refused


def test_the_head_kept_is_the_one_that_measured_best(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoder is told to accept most at step 2; the head of that step is what the directory holds."""
    seen: dict[int, dict[str, torch.Tensor]] = {}

    def decode(run_: Any, prompts: Any) -> list[PromptResult]:
        step = run_.state.step
        seen[step] = {name: x.clone() for name, x in run_.prepared.head.state_dict().items()}
        accepted = (4, 2, 0) if step == 2 else (step % 2, 0, 0)
        return [PromptResult(p.source, "", tuple(range(12)), 4, 12, accepted, False, False) for p in prompts]

    monkeypatch.setattr(selection, "decode", decode)
    output = tmp_path / "run"
    outcome = train(data | OPTIONS | {"measure_every": 1, "select_by": "measured"}, output)
    assert outcome.code == 0, outcome.err
    assert read_events(output, "end")[-1]["best_step"] == 2
    kept = load_draft_head(output).state_dict()
    assert all(torch.equal(kept[name], value) for name, value in seen[2].items())
    assert any(not torch.equal(kept[name], value) for name, value in seen[4].items())


def test_what_goes_wrong_in_one_rank_s_measurement_is_told_to_all(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that gave up alone would leave the others waiting for its results."""
    gathered: list[Any] = []
    gather = Ranks.gather

    def heard(ranks: Ranks, value: Any) -> list[Any]:
        gathered.append(value)
        return gather(ranks, value)

    def decode(*_: Any) -> list[PromptResult]:
        raise InputError("cannot be decoded")

    monkeypatch.setattr(Ranks, "gather", heard)
    monkeypatch.setattr(selection, "decode", decode)
    assert train(data | OPTIONS, tmp_path / "run").refusal() == "eagle_train: cannot be decoded"
    assert gathered[-1] == "cannot be decoded"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"select_by": "measured"}, "--select_by measured needs prompts to decode"),
        ({"measure_every": 5}, "--measure_every does nothing without --measure_prompts"),
        ({"patience": 0}, "--patience is 0; it must be at least 1"),
        ({"num_workers": -1}, "--num_workers is -1"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert message in train(options, tmp_path / "run").refusal()


def test_prompts_that_do_not_fit_are_refused_before_step_one(data: dict[str, Any], tmp_path: Path) -> None:
    options = data | OPTIONS | {"measure_max_new_tokens": 600}
    assert "exceed the target's context of 512 tokens" in train(options, tmp_path / "run").refusal()
    assert not (tmp_path / "run" / "state").exists()


def test_a_line_says_where_nothing_was_verified() -> None:
    figures = acceptance_figures([PromptResult("p:1", "", (5,), 0, 0, (0, 0), False, True)])
    assert (
        format_measured(7, 2, figures, None, 0)
        == "measured at step 7: 1 prompts decoded, n = 2: no verify step"
    )
