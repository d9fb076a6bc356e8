"""Options that change nothing, or less than they ask for, are told; none is passed over without a word."""

from pathlib import Path
from typing import Any

import pytest

from eagle_train.__main__ import with_demo_config
from eagle_train.config import TrainConfig
from eagle_train.errors import InputError
from eagle_train.flags import parse
from eagle_train.train.option_notes import option_notes, own_token_notes
from eagle_train.train.prepare import find_target, load_tokenizer
from eagle_train.train.splits import PreparedData, prepare_data
from tests.commands import Outcome, read_events, run, write_conversations
from tests.data.templates import OWN, make_tokenizer

SHAPE = {"training_seq_len": 512, "bucket_granularity": 64}


def notes(tmp_path: Path, *, eval_data: bool = False, **options: Any) -> list[str]:
    path = str(write_conversations(tmp_path / "d.jsonl", 28))
    named = {"target": "t", "data": (path,), "eval_data": (path,) if eval_data else ()}
    config = TrainConfig(**named, **(SHAPE | options))
    data = prepare_data(config, make_tokenizer(OWN), 10_000, None)
    return option_notes(config, data)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_epochs": 2},
        {"max_steps": 3},
        {"eval_fraction": 0.0},
        {"tokens_per_row": 256},
        {"tokens_per_row": 512},
        {"accumulation_steps": 2},
        {"packing": "none", "batch_size": 4, "accumulation_steps": 7},
    ],
)
def test_options_that_are_met_need_no_note(tmp_path: Path, options: dict[str, Any]) -> None:
    assert notes(tmp_path, **options) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"num_epochs": 2, "max_steps": 3},
            "--num_epochs 2 has no effect, because --max_steps 3 says how long",
        ),
        (
            {"eval_data": True, "eval_fraction": 0.0},
            "--eval_fraction 0 has no effect, because --eval_data names the held-out data",
        ),
        (
            {"tokens_per_row": 100_000},
            "--tokens_per_row 100,000: rows are filled to 512 tokens, because --training_seq_len 512 is",
        ),
        ({"tokens_per_row": 1}, "tokens, because a row holds the longest sample, of "),
        (
            {"tokens_per_row": 200},
            "--tokens_per_row 200: rows are filled to 256 tokens, because rows are whole buckets of 64",
        ),
        (
            {"packing": "none", "batch_size": 1, "accumulation_steps": 1000},
            "--accumulation_steps 1,000: an epoch has 27 micro-batches and a step ends with its epoch",
        ),
        ({"accumulation_steps": 1000}, "so each epoch is one step"),
    ],
)
def test_an_option_without_its_effect_is_told_with_the_reason(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    (note,) = notes(tmp_path, **options)
    assert words in note


def test_the_demo_has_held_out_data_of_its_own() -> None:
    for flags, number in (((), 0), (("--eval_fraction", "0"), 1), (("--eval_fraction", "1"), 1)):
        config = parse(TrainConfig, with_demo_config(flags), command="train", description="")
        as_demo = prepare_data_of_demo(config)
        found = option_notes(config, as_demo)
        assert len(found) == number, found
        assert all("because the demo has held-out data" in note for note in found)


def prepare_data_of_demo(config: TrainConfig) -> PreparedData:
    source = find_target(config)
    return prepare_data(config, load_tokenizer(source.name, config), source.vocab_size, source.max_positions)


def test_answers_that_are_hardly_the_target_s_own_are_noted_with_the_remedy() -> None:
    (note,) = own_token_notes(0.441)
    assert "only 44.1% of the first answers' tokens" in note
    assert "regenerate them" in note
    assert own_token_notes(0.526) == [], "of SmolLM2-135M's own answers, sampled at temperature 1"


def trained(place: Path, target: Path, *flags: object) -> Outcome:
    data = write_conversations(place / "d.jsonl", 6)
    paths = ("--target", target, "--data", data, "--output_dir", place / "run")
    shape = ("--training_seq_len", 512, "--bucket_granularity", 64, "--ttt_steps", 2)
    return run(*paths, *shape, "--dtype", "float32", "--num_threads", 1, *flags)


def test_a_run_shows_and_keeps_its_notes(tmp_path: Path, target_dir: Path) -> None:
    outcome = trained(tmp_path, target_dir, "--max_steps", 1, "--num_epochs", 2)
    assert outcome.code == 0, outcome.err
    (start,) = read_events(tmp_path / "run", "start")
    for words in (
        "--num_epochs 2 has no effect",
        "of the first answers' tokens are the target's own arg-max, as",
    ):
        assert words in outcome.out
        assert any(words in note for note in start["notes"])


def test_a_batch_size_that_fills_no_batch_is_refused_but_not_by_resume_or_plan(
    tmp_path: Path, target_dir: Path
) -> None:
    line = trained(tmp_path, target_dir, "--batch_size", 4).refusal()
    assert "--batch_size 4 does nothing with --packing multipack" in line
    assert not (tmp_path / "run").exists()
    assert run("plan", "--data", tmp_path / "d.jsonl", "--target", target_dir, "--batch_size", 4).code == 0
    named = {"target": "t", "data": ("d.jsonl",), "batch_size": 4}
    with pytest.raises(InputError, match="does nothing"):
        TrainConfig(**named).check_sources()
    TrainConfig(**named, resume=True).check_sources()
    TrainConfig(**named, packing="none").check_sources()
