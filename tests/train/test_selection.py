"""Heads are kept, and runs end, by the acceptance length that --select_by names."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle_train.config import TrainConfig
from eagle_train.decode.figures import acceptance_figures
from eagle_train.decode.results import PromptResult
from eagle_train.errors import InputError
from eagle_train.model.checkpoint import load_draft_head
from eagle_train.train import selection
from eagle_train.train.distributed import Ranks
from eagle_train.train.selection import format_measured, stop_reason
from eagle_train.train.state import RunState
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
    assert ("stopped at step 3: 2 validations without a longer acceptance length\n" in outcome.out) == (
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
    line = "1.00 before, 2.50 after, at n = 3 drafted tokens, measured on the prompts that were decoded\n"
    assert line in outcome.out
    kept = load_draft_head(output).state_dict()
    assert all(torch.equal(kept[name], value) for name, value in seen[2].items())
    assert any(not torch.equal(kept[name], value) for name, value in seen[4].items())


def give_answers_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(_: Any, prompts: Any) -> list[PromptResult]:
        return [PromptResult(p.source, "", (5,), 0, 0, (0, 0, 0), False, False) for p in prompts]

    monkeypatch.setattr(selection, "decode", decode)


def test_the_last_head_is_kept_where_no_measurement_had_a_verify_step(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_answers_of_one_token(monkeypatch)
    output = tmp_path / "run"
    outcome = train(data | OPTIONS | {"select_by": "measured"}, output)
    assert outcome.code == 0, outcome.err
    assert read_events(output, "end")[-1]["best_step"] is None
    assert f"{output} (the last one; no measurement had a verify step)\n" in outcome.out
    assert "before, " not in outcome.out
    kept, last = load_draft_head(output).state_dict(), load_file(output / "state" / "weights.safetensors")
    assert all(torch.equal(kept[name], value) for name, value in last.items())


def test_the_first_measurement_with_a_verify_step_keeps_its_head(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, run_ = iter([None, None, 1.5, None]), SimpleNamespace(state=RunState())
    kept: list[int] = []
    monkeypatch.setattr(selection, "keep_head", lambda of: kept.append(of.state.step))
    for step, length in enumerate(lengths):
        run_.state.step = step
        selection.keep_if_longest(run_, length)
    assert kept == [0, 1, 2]
    assert (run_.state.best_step, run_.state.checks_since_best) == (2, 1)


def test_another_measure_on_resume_is_refused(data: dict[str, Any], tmp_path: Path) -> None:
    """Lengths of two scales, or over other prompts, are not compared."""
    by_expected, by_measured = (data | OPTIONS | {"select_by": by} for by in ("expected", "measured"))
    other = write_jsonl(tmp_path / "other.jsonl", [{"prompt": "three"}])
    on = {"resume": "true"}
    for name, own, foreign in (
        ("expected", by_expected, by_measured),
        ("measured", by_measured, by_expected),
    ):
        output = tmp_path / name
        assert train(own | {"max_steps": 1}, output).code == 0
        change = f"--select_by {own['select_by']} -> {foreign['select_by']}"
        head = (output / "model.safetensors").read_bytes()
        assert change in train(foreign | on, output).refusal()
        assert (output / "model.safetensors").read_bytes() == head
    line = train(by_measured | on | {"measure_prompts": other}, tmp_path / "measured").refusal()
    assert f"--measure_prompts ['{data['measure_prompts']}'] -> ['{other}']" in line
    line = train(by_measured | on | {"measure_max_new_tokens": 9}, tmp_path / "measured").refusal()
    assert "--measure_max_new_tokens 8 -> 9" in line
    assert train(by_measured | on, tmp_path / "measured").code == 0
    assert train(by_expected | on | {"measure_prompts": other}, tmp_path / "expected").code == 0


def test_patience_with_nothing_held_out_is_refused_by_name(data: dict[str, Any], tmp_path: Path) -> None:
    options = {"target": data["target"], "data": data["data"], "patience": 1}
    line = train(options | {"eval_fraction": 0}, tmp_path / "run").refusal()
    assert "--patience does nothing where nothing is held out (--eval_fraction 0 without --eval_data)" in line
    single = write_conversations(tmp_path / "one.jsonl", 1)
    line = train(options | {"data": single, "device": "cpu"}, tmp_path / "run").refusal()
    assert "--patience 1 does nothing, because no sample is held out of 1" in line
    assert not (tmp_path / "run").exists()


def test_reasons_to_stop_are_told_in_the_right_number() -> None:
    named = {"target": "t", "data": ("d",), "measure_prompts": ("p",)}
    assert stop_reason(TrainConfig(**named, patience=1)) == "1 validation without a longer acceptance length"
    by_measured = TrainConfig(**named, patience=2, select_by="measured")
    assert stop_reason(by_measured) == "2 measurements without a longer acceptance length"


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
        (
            {"select_by": "measured", "measure_prompts": "p.jsonl", "measure_max_new_tokens": 1},
            "--measure_max_new_tokens is 1; with --select_by measured it must be at least 2",
        ),
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
    line = train(options, tmp_path / "run").refusal()
    assert (
        "exceed the target's context of 512 tokens; shorten the prompt or lower --measure_max_new_to" in line
    )
    assert "--on_long_prompt" not in line, "an option of another command"
    assert not (tmp_path / "run" / "state").exists()


def test_a_line_says_where_nothing_was_verified() -> None:
    figures = acceptance_figures([PromptResult("p:1", "", (5,), 0, 0, (0, 0), False, True)])
    assert (
        format_measured(7, 2, figures, None, 0)
        == "measured at step 7: 1 prompts decoded, n = 2: no verify step"
    )
