"""The engines' counts: tokens, verify steps and accepted tokens per position, prompt by prompt."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_train import Prompt, load_draft_head, load_target, measure_acceptance
from eagle_train.decode.results import PromptResult

pytestmark = pytest.mark.shared


@pytest.fixture(scope="module")
def probe(shared: Path) -> Path:
    return shared / "fixtures" / "engine_probe"


@pytest.fixture(scope="module")
def counts(probe: Path) -> dict[str, Any]:
    return json.loads((probe / "counts.json").read_text())


def measured(probe: Path, counts: dict[str, Any], batch_size: int, cap_last_step: bool) -> list[PromptResult]:
    target = load_target(str(probe / "target"), dtype=torch.float32, device=torch.device("cpu"))
    prompts = [
        Prompt(tuple(prompt["prompt_ids"]), f"counts.json:{index}")
        for index, prompt in enumerate(counts["prompts"])
    ]
    return measure_acceptance(
        target,
        load_draft_head(probe / "draft"),
        prompts,
        num_speculative_tokens=counts["num_speculative_tokens"],
        max_new_tokens=counts["max_new_tokens"],
        batch_size=batch_size,
        ignore_eos=True,
        cap_last_step=cap_last_step,
        progress=False,
    )


def totals(results: list[PromptResult]) -> tuple[int, int, list[int]]:
    accepted = [sum(column) for column in zip(*(r.accepted_per_position for r in results), strict=True)]
    return sum(r.verify_steps for r in results), sum(r.drafted for r in results), accepted


@pytest.mark.parametrize("batch_size", [1, 5, 12])
def test_uncapped_counts_are_those_of_vllm(probe: Path, counts: dict[str, Any], batch_size: int) -> None:
    results = measured(probe, counts, batch_size, cap_last_step=False)
    for index, (result, expected) in enumerate(zip(results, counts["prompts"], strict=True)):
        assert result.source == f"counts.json:{index}"
        assert list(result.token_ids) == expected["greedy_ids"]
        assert result.verify_steps == expected["verify_steps"]
        assert list(result.accepted_per_position) == expected["accepted_per_position"]
        assert result.drafted == 3 * result.verify_steps
        assert not result.stopped
    assert totals(results) == (154, 462, [135, 109, 85])
    assert (counts["verify_steps"], counts["accepted_per_position"]) == (154, [135, 109, 85])


def test_capped_counts_are_those_of_llama_cpp(probe: Path, counts: dict[str, Any]) -> None:
    results = measured(probe, counts, 5, cap_last_step=True)
    assert [list(r.token_ids) for r in results] == [p["greedy_ids"] for p in counts["prompts"]]
    capped = counts["capped"]
    assert totals(results) == (capped["verify_steps"], capped["drafted"], capped["accepted_per_position"])
    assert totals(results) == (150, 437, [131, 105, 78])
