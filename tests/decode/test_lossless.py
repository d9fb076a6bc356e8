"""Greedy output is the target's own, token for token in float32: any family, any batch, any draft head."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eagle_train.decode.chain import decode_plain, end_of_text_ids, measure_acceptance
from eagle_train.decode.results import Prompt, PromptResult
from eagle_train.errors import InputError
from eagle_train.model.target import FrozenTarget
from tests.decode.pairs import MAX_NEW_TOKENS, own_head, random_prompts
from tests.documents import random_head
from tests.tiny import tiny_target

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5, "head_dim": 8, "attn_logit_softcapping": 0.5},
    "gemma3_text": {"sliding_window": 5, "head_dim": 8},
    "gpt_oss": {"sliding_window": 5, "head_dim": 8, **EXPERTS},
    "phi3": {},
}


def generated(target: FrozenTarget, prompts: list[Prompt]) -> list[tuple[int, ...]]:
    """transformers' own greedy answers, a prompt at a time, with its eager attention."""
    model: Any = copy.deepcopy(target.model)
    model.set_attn_implementation("eager")
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt.token_ids])
        with torch.no_grad():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_NEW_TOKENS, do_sample=False
            )
        answers.append(tuple(output[0, ids.shape[1] :].tolist()))
    return answers


def tokens(results: list[PromptResult]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


@pytest.mark.parametrize("family", FAMILIES)
def test_batched_speculation_gives_the_tokens_of_transformers(family: str) -> None:
    target = tiny_target(family, **FAMILIES[family])
    prompts = random_prompts()
    head = own_head(target, prompts)
    expected = generated(target, prompts)
    plain = decode_plain(target, prompts, max_new_tokens=MAX_NEW_TOKENS, batch_size=3, progress=False)
    assert tokens(plain) == expected
    drafted = measure_acceptance(
        target,
        head,
        prompts,
        num_speculative_tokens=4,
        max_new_tokens=MAX_NEW_TOKENS,
        batch_size=3,
        progress=False,
    )
    assert tokens(drafted) == expected
    accepted = sum(sum(result.accepted_per_position) for result in drafted)
    assert 0.05 < accepted / sum(result.drafted for result in drafted) < 0.95, "hits and misses"
    stop_ids = end_of_text_ids(target)
    assert stop_ids == {2} or family == "gpt_oss"
    for result in plain:
        assert result.stopped == (result.token_ids[-1] in stop_ids)
        assert result.stopped or len(result.token_ids) == MAX_NEW_TOKENS
        assert (result.drafted, result.accepted_per_position) == (0, ())
        assert result.verify_steps == len(result.token_ids) - 1


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_a_target_with_another_attention_is_read_row_by_row(family: str) -> None:
    target = tiny_target(family, **FAMILIES[family])
    prompts = random_prompts()
    head = own_head(target, prompts)
    together = measure_acceptance(target, head, prompts, max_new_tokens=MAX_NEW_TOKENS, progress=False)
    model: Any = copy.deepcopy(target.model)
    model.set_attn_implementation("eager")
    apart = measure_acceptance(
        FrozenTarget(model), head, prompts, max_new_tokens=MAX_NEW_TOKENS, progress=False
    )
    assert apart == together


def test_drafts_beyond_the_context_are_harmless() -> None:
    """A prompt and an answer that fill the context: the last drafts stand at positions that do not exist."""
    target = tiny_target(max_position_embeddings=32)
    prompts = random_prompts((8, 3))
    head = own_head(target, prompts)
    results = measure_acceptance(
        target, head, prompts, max_new_tokens=24, ignore_eos=True, num_speculative_tokens=6, progress=False
    )
    assert tokens(results) == tokens(
        decode_plain(target, prompts, max_new_tokens=24, ignore_eos=True, progress=False)
    )
    with pytest.raises(InputError, match=r"prompts:0: the prompt's 8 tokens and 25 new ones exceed .* 32 "):
        measure_acceptance(target, head, prompts, max_new_tokens=25, progress=False)


def test_a_target_with_alibi_is_read_row_by_row() -> None:
    """Its attention lies outside transformers' interface, so it is trained and decoded with its own."""
    sizes = {"d_model": 32, "n_layers": 8, "n_heads": 4, "vocab_size": 96, "eos_token_id": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model("mpt", **sizes)
    target = FrozenTarget(AutoModelForCausalLM.from_config(config, attn_implementation="eager").float())
    prompts = random_prompts()
    results = measure_acceptance(
        target, random_head(target, 48), prompts, max_new_tokens=MAX_NEW_TOKENS, progress=False
    )
    assert tokens(results) == generated(target, prompts)


def test_a_state_that_cannot_be_taken_back_is_refused_by_name() -> None:
    target = tiny_target("lfm2", layer_types=["conv", "full_attention"] * 4)
    with pytest.raises(InputError, match="Lfm2ForCausalLM keeps a state that cannot be taken back"):
        measure_acceptance(target, random_head(target, 48), random_prompts(), progress=False)
