"""Records that other programs left beside a sound head: they stop no export and reach no card."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from eagle_train.export.record import read_run_record
from eagle_train.model.target import load_target
from tests.export.heads import command, copy_of, save_head

OURS = {"ttt_steps": 3, "training_seq_len": 128, "bucket_granularity": 64, "data": ["a.jsonl"], "seed": 0}
LENGTHS, RATES = {"3": 1.5, "5": None}, [0.5, 0.25]
VALIDATION = {
    "event": "validation", "step": 10, "eval_acceptance_length": LENGTHS, "eval_acceptance_rate": RATES,
    "eval_top1_agreement": RATES,
}  # fmt: skip
START = {"event": "start", "train_samples": 4, "train_tokens": 100, "target_own_token_share": 0.5}
MEASURED = {
    "event": "measured", "step": 10, "num_speculative_tokens": 3,
    "acceptance_length": {"value": 1.4, "low": 1.3, "high": 1.5},
}  # fmt: skip


@pytest.fixture(scope="module")
def head_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("record") / "head"
    save_head(directory, load_target(str(target_dir), dtype=torch.float32, device=torch.device("cpu")))
    return directory


@pytest.fixture
def head(head_dir: Path, tmp_path: Path) -> Path:
    return copy_of(head_dir, tmp_path / "head")


def card_of(head: Path, options: Any, *lines: Any) -> str:
    """The card of an export of the head with these files beside it; a line that is text stays as it is."""
    (head / "run_config.yaml").write_text(yaml.safe_dump(options))
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (head / "metrics.jsonl").write_text("\n".join(texts) + "\n")
    outcome = command("export", "--draft", head, "--to", "vllm", "--out", head.parent / "out")
    assert outcome.code == 0, outcome.err
    return (head.parent / "out" / "README.md").read_text()


def test_a_sound_record_is_shown(head: Path) -> None:
    card = card_of(head, OURS, START, VALIDATION, MEASURED)
    for part in ("trained with eagle_train", "`a.jsonl` (4 samples, 100 tokens); 50.0%", "`--ttt_steps 3`"):
        assert part in card
    assert "| expected | 1.500 | - |" in card
    assert "| measured by decoding | 1.400 (1.300 to 1.500) | - |" in card


BAD_OPTIONS = [
    {key: value}
    for key in ("data", "eval_data", "mock_data", "seed", "learning_rate", "training_seq_len", "ttt_steps")
    for value in (["a", 3], {"a": 1}, [[]])
] + [
    {"data": 3},
    {"data": "a.jsonl"},
    {"mock_data": "no"},
    {"aux_layer_ids": 3},
    {"training_seq_len": "long"},
]


@pytest.mark.parametrize("wrong", BAD_OPTIONS, ids=str)
def test_options_of_another_type_are_left_out(wrong: dict[str, Any], head: Path) -> None:
    card = card_of(head, OURS | wrong, START, VALIDATION)
    assert "| expected | 1.500 | - |" in card
    assert "bundled demo" not in card
    if "data" in wrong:
        assert "Data: not recorded" in card


@pytest.mark.parametrize("options", [{"model": "x", "data": 3, "mock_data": True}, [1, 2], "text", 5, None])
def test_options_of_another_program_are_not_taken_for_ours(options: Any, head: Path) -> None:
    card = card_of(head, options)
    assert "eagle_train" not in card
    assert "## Training" not in card


BAD_EVENTS: list[Any] = [
    {"event": "validation"},
    {"event": "validation", "step": 10},
    {"event": "validation", "step": 10, "eval_acceptance_length": LENGTHS},
    VALIDATION | {"step": "ten"},
    VALIDATION | {"eval_acceptance_length": [1.5]},
    VALIDATION | {"eval_acceptance_length": {"3": "long"}},
    VALIDATION | {"eval_acceptance_rate": 0.5},
    VALIDATION | {"eval_acceptance_rate": [0.5]},
    VALIDATION | {"eval_top1_agreement": ["a", "b"]},
]
OTHER_LINES: list[Any] = [
    {"event": "start"}, START | {"train_samples": "many"}, START | {"target_own_token_share": "half"},
    {"event": "measured", "step": 10}, MEASURED | {"acceptance_length": 1.4},
    MEASURED | {"acceptance_length": {"value": 1.4, "low": 1.3}}, {"event": ["end"]},
    {"event": "end", "best_step": []},
    {"loss": 1.0}, [1], 5, "no JSON", '{"event": "validation", "st', "",
]  # fmt: skip


@pytest.mark.parametrize("line", BAD_EVENTS + OTHER_LINES, ids=str)
def test_events_of_another_form_are_left_out(line: Any, head: Path) -> None:
    card = card_of(head, OURS, line, VALIDATION, line)
    assert "| expected | 1.500 | - |" in card
    assert "measured by decoding" not in card


@pytest.mark.parametrize("line", BAD_EVENTS, ids=str)
def test_a_card_without_a_sound_validation_has_no_table(line: Any, head: Path) -> None:
    assert "## Acceptance" not in card_of(head, OURS, line)


@pytest.mark.parametrize("name", [5, ["a"], {"a": 1}, True, " "])
def test_a_target_that_is_no_name_is_refused_unless_it_is_named(
    name: Any, head: Path, target_dir: Path, tmp_path: Path
) -> None:
    (head / "run_config.yaml").write_text(yaml.safe_dump({"target": name}))
    words = ("export", "--draft", head, "--to", "vllm", "--out", tmp_path / "out")
    line = command(*words).refusal()
    assert f"{head / 'run_config.yaml'}: target is {name!r}" in line
    assert "name the target with --target" in line
    assert command(*words, "--target", target_dir).code == 0


def test_options_that_are_no_yaml_are_refused_by_file(head: Path) -> None:
    (head / "run_config.yaml").write_text("target: [")
    line = command("export", "--draft", head, "--to", "vllm", "--out", head.parent / "out").refusal()
    assert f"{head / 'run_config.yaml'} cannot be read" in line
    assert "take it away" in line


def test_another_programs_target_is_used(head: Path, target_dir: Path) -> None:
    (head / "run_config.yaml").write_text(yaml.safe_dump({"target": str(target_dir), "mock_data": True}))
    record = read_run_record(head)
    assert (record.target, record.is_ours, record.is_mock) == (str(target_dir), False, False)
