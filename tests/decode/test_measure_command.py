"""`python -m eagle_train measure`, run in-process: figures, files, the run's own options, and bad input."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from eagle_train.config import TrainConfig
from eagle_train.decode.chain import measure_acceptance
from eagle_train.decode.figures import group_figures
from eagle_train.decode.prompts import read_prompts
from eagle_train.model.checkpoint import load_draft_head, save_draft_head
from eagle_train.model.target import load_target
from eagle_train.train.measure_report import Speed, doubt_of_speed
from tests.commands import Outcome, run, write_jsonl
from tests.data.templates import EMPTY, make_tokenizer
from tests.documents import documents_of, fitted_head, with_own_tokens
from tests.tiny import swap_tokens, write_target

NUM_DRAFTED = 3
PROMPTS = [
    {"turns": ["yes no", "one"], "category": "qa"},
    {"turns": ["2+2?"], "category": "qa"},
    {"turns": ["weather and no weather"], "category": "rag"},
    {"turns": ["one two three"], "category": "rag"},
    {"turns": ["user: yes"], "category": "rag"},
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Path:
    """A directory with a draft that hits now and then, as a run leaves it, and a file of prompts."""
    place = tmp_path_factory.mktemp("measure")
    target = load_target(str(target_dir), dtype=torch.float32, device=torch.device("cpu"))
    documents = with_own_tokens(target, documents_of((60, [(10, 60)]), (40, [(5, 40)])))
    head = fitted_head(target, 200, documents, NUM_DRAFTED)
    save_draft_head(head, place / "draft", target_config=target.config, dtype=torch.float32)
    TrainConfig(target=str(target_dir), data=("d.jsonl",)).save(place / "draft" / "run_config.yaml")
    write_jsonl(place / "prompts.jsonl", PROMPTS)
    return place


def measure(place: Path, *flags: object, **named: object) -> Outcome:
    named = {
        "draft": place / "draft",
        "prompts": place / "prompts.jsonl",
        "num_speculative_tokens": NUM_DRAFTED,
        "max_new_tokens": 24,
        "dtype": "float32",
        "num_threads": 1,
    } | named
    return run("measure", *(word for name, value in named.items() for word in (f"--{name}", value)), *flags)


def figures_of(outcome: Outcome, path: Path) -> dict[str, Any]:
    assert outcome.code == 0, outcome.err
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def changed_draft(place: Path, directory: Path, **tensors: torch.Tensor) -> Path:
    shutil.copytree(place / "draft", directory)
    path = directory / "model.safetensors"
    save_file(load_file(path) | tensors, path, metadata={"format": "pt"})
    return directory


def test_the_command_reports_what_the_decoder_counted(place: Path, tmp_path: Path, target_dir: Path) -> None:
    outcome = measure(place, json=tmp_path / "f.json", plot=tmp_path / "f.png")
    figures = figures_of(outcome, tmp_path / "f.json")
    target = load_target(str(target_dir), dtype=torch.float32, device=torch.device("cpu"))
    prompts, _ = read_prompts([place / "prompts.jsonl"], AutoTokenizer.from_pretrained(target_dir))
    results = measure_acceptance(
        target,
        load_draft_head(place / "draft"),
        prompts,
        num_speculative_tokens=NUM_DRAFTED,
        max_new_tokens=24,
        progress=False,
    )
    expected = group_figures(results)
    assert list(figures["groups"]) == list(expected) == ["all", "qa", "rag"]
    for name, group in expected.items():
        found = figures["groups"][name]["every"]
        assert found["verify_steps"] == group.every.verify_steps > 0
        assert found["accepted"] == group.every.accepted
        assert group.every.acceptance_length is not None
        assert found["acceptance_length"]["value"] == group.every.acceptance_length.value
    assert figures["groups"]["all"]["every"]["accepted"] > 0
    length = expected["all"].every.acceptance_length
    assert length is not None
    assert f"{length.value:.2f}" in outcome.out
    assert f"{length.low:.2f}..{length.high:.2f}" in outcome.out
    assert "1 later turns are left out" in outcome.out
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


def test_greedy_float32_answers_equal_plain_ones_and_the_walks_counts(place: Path, tmp_path: Path) -> None:
    figures = figures_of(measure(place, json=tmp_path / "f.json"), tmp_path / "f.json")
    every, expected, speed = figures["groups"]["all"]["every"], figures["expected"], figures["speed"]
    assert figures["answers_unlike_plain"] == 0
    assert expected["verify_steps"] == every["verify_steps"]
    assert expected["acceptance_length"] == pytest.approx(every["emitted_per_step"]["value"])
    # The walk leaves out what the decoder drafts in an answer's last step beyond its limit, and no more.
    measured = [round(share["value"] * every["verify_steps"]) for share in every["acceptance_per_position"]]
    beyond = [found - own for found, own in zip(measured, expected["accepted_per_position"], strict=True)]
    assert all(0 <= count <= len(PROMPTS) for count in beyond)
    assert expected["accepted_per_position"][0] > 0
    assert speed["plain_tokens"] == speed["tokens"] == every["tokens"]
    assert speed["speedup"] == pytest.approx(speed["plain_seconds"] / speed["seconds"])


@pytest.mark.parametrize("proposal", ["greedy", "sampled"])
def test_samples_have_their_own_walk_and_plain_decoding_can_be_left_out(
    place: Path, tmp_path: Path, proposal: str
) -> None:
    outcome = measure(
        place, json=tmp_path / "f.json", temperature=0.5, proposal=proposal, compare_plain="false"
    )
    figures = figures_of(outcome, tmp_path / "f.json")
    assert figures["answers_unlike_plain"] is figures["speed"]["speedup"] is None
    assert f"temperature 0.5, {proposal} proposal" in outcome.out
    every, expected = figures["groups"]["all"]["every"], figures["expected"]
    emitted = every["emitted_per_step"]["value"] * every["verify_steps"]
    assert expected["acceptance_length"] * expected["verify_steps"] == pytest.approx(emitted)
    if proposal == "greedy":  # nothing is left to chance, given the answers
        assert expected["verify_steps"] == every["verify_steps"]
    else:
        assert expected["verify_steps"] % 1 > 0
        assert expected["verify_steps"] == pytest.approx(every["verify_steps"], rel=0.2)


def test_u04_the_runs_template_options_are_used_again(place: Path, tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", template=EMPTY)
    draft = changed_draft(place, tmp_path / "draft")
    values = {"target": str(target), "data": ["d.jsonl"], "template_options": ["enable_thinking=false"]}
    (draft / "run_config.yaml").write_text(yaml.safe_dump(values))
    lengths = []
    for flags in ({}, {"template_options": "enable_thinking=true"}):
        # A context that the longer prompts just exceed tells their length.
        line = measure(place, draft=draft, max_new_tokens=512, **flags).refusal()
        lengths.append(int(line.split("the prompt's ")[1].split()[0]))
    think = len(make_tokenizer(EMPTY)("<think>\n\n</think>\n\n").input_ids)
    assert lengths[0] == lengths[1] + think


def test_prompts_can_be_fewer_and_the_demos_are_found(tmp_path: Path, place: Path) -> None:
    figures = figures_of(measure(place, json=tmp_path / "f.json", max_prompts=2), tmp_path / "f.json")
    assert figures["groups"]["all"]["every"]["prompts"] == 2
    assert figures["data"]["rows_not_measured"] == 3
    line = measure(place, target="demo").refusal()
    assert "and demo has 299 of its 301 tokens not or under another id" in line


def test_the_two_figures_beside_each_other_have_names_of_their_own(place: Path) -> None:
    """Acceptance length counts what a last step accepts beyond an answer's end; emitted tokens do not."""
    outcome = measure(place)
    assert outcome.code == 0, outcome.err
    (line,) = [text for text in outcome.out.splitlines() if "by the chain walk" in text]
    assert line.split("  ")[1] == "emitted tokens per verify step"
    assert "expected" in line
    assert "acceptance length" not in line.split(";")[0]


@pytest.mark.parametrize(
    ("prompts", "seconds", "is_rough"), [(19, 60.0, True), (200, 4.9, True), (20, 5.0, False)]
)
def test_a_speed_up_on_little_is_called_rough(prompts: int, seconds: float, is_rough: bool) -> None:
    text = doubt_of_speed(Speed(100, seconds, 100, 60.0), prompts)
    assert bool(text) == is_rough
    assert not is_rough or f"{prompts} prompts in {seconds:.1f} s; take 20 prompts" in text


def test_the_report_says_that_five_prompts_are_few_for_a_speed_up(place: Path) -> None:
    assert "x (a rough figure: 5 prompts in " in measure(place).out
    assert "rough" not in measure(place, compare_plain="false").out


def test_long_prompts_are_refused_or_left_out_and_counted(place: Path, tmp_path: Path) -> None:
    long = [{"input_ids": [20] * 500}, {"input_ids": [21] * 30}, {"input_ids": [22] * 488}]
    path = write_jsonl(tmp_path / "long.jsonl", long)
    line = measure(place, prompts=path).refusal()
    assert "long.jsonl:1: the prompt's 500 tokens and 24 new ones exceed the target's context of 512" in line
    assert line.endswith("lower --max_new_tokens to 12, or leave it out: --on_long_prompt skip")
    skipped = measure(place, prompts=path, on_long_prompt="skip", json=tmp_path / "f.json")
    figures = figures_of(skipped, tmp_path / "f.json")
    assert figures["groups"]["all"]["every"]["prompts"] == 2
    assert (figures["data"]["rows_read"], figures["data"]["long_prompts_left_out"]) == (3, 1)
    assert "note: 1 prompts are left out, because with --max_new_tokens they exceed" in skipped.out
    line = measure(place, prompts=path, on_long_prompt="skip", max_new_tokens=512).refusal()
    assert "none of 3 prompts is left: with --max_new_tokens 512" in line


def test_a_misspelt_template_option_is_refused(place: Path) -> None:
    line = measure(place, template_options="enable_thinkin=false").refusal()
    assert "--template_options enable_thinkin: the chat template has no such option" in line


def test_a_target_without_chat_template_trains_and_measures_on_token_ids(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", template=None)
    rows = [{"input_ids": list(range(20 + i, 50 + i)), "loss_mask": [0] * 10 + [1] * 20} for i in range(8)]
    data = write_jsonl(tmp_path / "d.jsonl", rows)
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"input_ids": row["input_ids"][:10]} for row in rows[:2]])
    paths = ("--target", target, "--data", data, "--eval_data", data, "--output_dir", tmp_path / "run")
    how = ("--training_seq_len", 64, "--ttt_steps", 2, "--max_steps", 1, "--dtype", "float32")
    outcome = run(
        *paths, *how, "--measure_prompts", prompts, "--measure_max_new_tokens", 8, "--num_threads", 1
    )
    assert outcome.code == 0, outcome.err
    assert "validation at step 1" in outcome.out
    assert "measured at step 1" in outcome.out
    assert measure(tmp_path, draft=tmp_path / "run", prompts=prompts).code == 0


BAD_FLAGS = {
    "num_speculative_tokens": (0, ("--num_speculative_tokens is 0", "at least 1")),
    "temperature": (-1.0, ("--temperature is -1.0",)),
    "seed": (-1, ("--seed is -1", "at least 0")),
    "proposal": ("sampled", ("--proposal sampled", "--temperature")),
    "json": ("/nowhere/f.json", ("--json /nowhere/f.json", "/nowhere")),
    "plot": ("f.bmp", ("--plot f.bmp", ".png")),
    "draft": ("/nowhere", ("/nowhere/config.json does not exist",)),
    "target": ("/nowhere", ("--target /nowhere", "does not exist")),
    "prompts": ("/nowhere.jsonl", ("/nowhere.jsonl: no such file", "--prompts")),
    "max_new_tokens": (4096, ("prompts.jsonl:", "context of 512", "--max_new_tokens")),
    "promts": ("a", ("unknown flag --promts; did you mean --prompts",)),
}


@pytest.mark.parametrize("flag", BAD_FLAGS)
def test_bad_options_are_refused_in_one_line(place: Path, flag: str) -> None:
    value, words = BAD_FLAGS[flag]
    line = measure(place, **{flag: value}).refusal()
    for word in words:
        assert word in line


def test_drafts_and_prompts_that_cannot_be_used_are_refused_in_one_line(
    place: Path, tmp_path: Path, target_dir: Path
) -> None:
    head = load_file(place / "draft" / "model.safetensors")
    broken = head["fc.weight"].clone()
    broken[0, 0] = float("nan")
    nan_draft = changed_draft(place, tmp_path / "nan", **{"fc.weight": broken})
    no_run = changed_draft(place, tmp_path / "no_run")
    (no_run / "run_config.yaml").unlink()
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    narrow = write_target(tmp_path / "narrow", hidden_size=16, num_attention_heads=2)
    other = shutil.copytree(target_dir, tmp_path / "other")
    swap_tokens(other / "tokenizer.json")
    deep = write_target(tmp_path / "deep", num_hidden_layers=12)
    recorded = changed_draft(place, tmp_path / "recorded")
    values = yaml.safe_load((recorded / "run_config.yaml").read_text())
    values |= {"bucket_granularity": 64, "aux_layer_ids": [2, 4, 5]}  # as a run resolves them
    (recorded / "run_config.yaml").write_text(yaml.safe_dump(values))
    for named, words in (
        ({"draft": recorded, "target": deep}, ("trained on aux layers 2 4 5", "here 2 6 9 would be read")),
        ({"draft": nan_draft}, ("fc.weight holds a NaN",)),
        ({"draft": no_run}, ("--target is not named",)),
        ({"prompts": empty}, ("empty.jsonl", "no rows")),
        ({"target": narrow}, ("hidden size is 32", "16")),
        ({"target": other}, ("the tokenizer of", "tokens not or under another id, such as", "trained for")),
    ):
        line = measure(place, **named).refusal()
        for word in words:
            assert word in line


def test_a_draft_with_another_embedding_is_not_measured_with_the_target_s(
    place: Path, tmp_path: Path, target_dir: Path
) -> None:
    """Engines draft with the head's own table; its bf16 copy of the target's is the target's."""
    own_VH = load_file(target_dir / "model.safetensors")["model.embed_tokens.weight"]
    copied = changed_draft(place, tmp_path / "copied", **{"embed_tokens.weight": own_VH.bfloat16()})
    assert measure(place, draft=copied).code == 0
    trained = changed_draft(place, tmp_path / "trained", **{"embed_tokens.weight": own_VH * 1.1})
    assert "has an embed_tokens.weight that is not the target's" in measure(place, draft=trained).refusal()
