"""The embedded demo's assets are what they claim: small, separate by family, the target's own."""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

DEMO = Path(__file__).resolve().parent.parent / "eagle_train" / "demo"
SPLITS = ("train", "heldout")
MAX_BYTES = 8 * 1000 * 1000


@cache
def rows(split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DEMO / f"{split}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO / "target")


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32).eval()


def contents(split: str, role: str) -> list[str]:
    return [
        message["content"] for row in rows(split) for message in row["messages"] if message["role"] == role
    ]


def families(split: str) -> set[str]:
    return {family for row in rows(split) for family in row["family"].split("+")}


def answer_spans(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[tuple[int, int]]:
    """Half-open token ranges of the answers with their end-of-turn token, from prefix renderings."""
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before = tokenizer.apply_chat_template(
                messages[:i], add_generation_prompt=True, return_dict=False
            )
            assert whole[: len(before)] == before
            spans.append((len(before), whole.index(tokenizer.eos_token_id, len(before)) + 1))
    return spans


def test_everything_fits_and_nothing_is_pickled() -> None:
    files = [path for path in DEMO.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES
    assert {path.suffix for path in files} <= {".json", ".jsonl", ".jinja", ".safetensors", ".md", ".yaml"}


def test_no_family_and_no_prompt_is_shared() -> None:
    assert families("train").isdisjoint(families("heldout"))
    assert len(families("train")) + len(families("heldout")) >= 24
    assert len(families("heldout")) >= 5
    assert set(contents("train", "user")).isdisjoint(contents("heldout", "user"))


@pytest.mark.parametrize("split", SPLITS)
def test_prompts_and_answers_are_unique(split: str) -> None:
    for role in ("user", "assistant"):
        texts = contents(split, role)
        assert len(texts) == len(set(texts))


@pytest.mark.parametrize("split", SPLITS)
def test_no_answer_loops(split: str, tokenizer: PreTrainedTokenizerBase) -> None:
    for ids in tokenizer(contents(split, "assistant"), add_special_tokens=False)["input_ids"]:
        grams = [tuple(ids[i : i + 8]) for i in range(len(ids) - 7)]
        assert 1 - len(set(grams)) / len(grams) <= 0.3


def test_default_aux_layers_are_distinct(target: PreTrainedModel) -> None:
    layers = target.config.num_hidden_layers
    assert layers >= 7
    assert len({2, layers // 2, layers - 3}) == 3


def test_supervised_token_totals(tokenizer: PreTrainedTokenizerBase) -> None:
    def count(split: str) -> int:
        ids = tokenizer(contents(split, "assistant"), add_special_tokens=False)["input_ids"]
        return sum(len(answer) + 1 for answer in ids)

    assert 150_000 <= count("train") <= 450_000
    assert count("heldout") >= 10_000


def test_rows_are_complete_conversations() -> None:
    for row in rows("train") + rows("heldout"):
        assert row["finish_reason"] == "stop"
        assert row["temperature"] == 0.0
        roles = [message["role"] for message in row["messages"] if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


@pytest.mark.parametrize("split", SPLITS)
def test_chat_template_is_prefix_consistent(split: str, tokenizer: PreTrainedTokenizerBase) -> None:
    multi_turn = [row["messages"] for row in rows(split) if len(row["messages"]) > 3][:10]
    for messages in multi_turn + [row["messages"] for row in rows(split)[:10]]:
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        for stop in range(1, len(messages) + 1):
            assert whole.startswith(tokenizer.apply_chat_template(messages[:stop], tokenize=False))
        assert len(answer_spans(tokenizer, messages)) == sum(m["role"] == "assistant" for m in messages)


@torch.inference_mode()
def test_heldout_answers_are_the_targets_own(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    step = math.ceil(len(rows("heldout")) / 10)
    for row in rows("heldout")[::step]:
        ids = torch.tensor([tokenizer.apply_chat_template(row["messages"], return_dict=False)])
        chosen = target(input_ids=ids).logits[0].argmax(dim=-1)
        for start, stop in answer_spans(tokenizer, row["messages"]):
            assert chosen[start - 1 : stop - 1].tolist() == ids[0, start:stop].tolist(), row["id"]
