"""Expected equals measured: on greedy float32 answers the chain walk counts what the decoder counts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from eagle_train import load_target
from eagle_train.data.collator import BucketingCollator
from eagle_train.data.samples import Sample, answer_remaining_from_spans
from eagle_train.decode.chain import measure_acceptance
from eagle_train.decode.results import Prompt, PromptResult, answer_samples
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.target import FrozenTarget
from eagle_train.model.target_config import draft_config
from eagle_train.model.vocab import choose_draft_vocabulary
from eagle_train.objective.acceptance import WalkCounts, chain_walk, leading_hits, pool
from eagle_train.objective.unroll import supervise, unrolled_sums
from eagle_train.train.evaluate import evaluate, micro_batch_sums, step_weights

DEMO = Path(__file__).resolve().parents[2] / "eagle_train" / "demo"
N = 5
MAX_NEW_TOKENS = 72
NUM_PROMPTS = 8


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    torch.set_num_threads(1)
    return load_target(str(DEMO / "target"), dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def head(target: FrozenTarget, conversations: list[tuple[Prompt, list[int]]]) -> Eagle3DraftHead:
    """A head fitted for a while to the very answers: it hits about as often as it misses."""
    samples = [
        Sample(
            np.array(prompt.token_ids + tuple(answer), dtype=np.int32),
            answer_remaining_from_spans(
                len(prompt.token_ids) + len(answer),
                [(len(prompt.token_ids), len(prompt.token_ids) + len(answer))],
            ),
            prompt.source,
        )
        for prompt, answer in conversations
    ]
    counts_V = np.bincount(np.concatenate([s.input_ids for s in samples]), minlength=target.vocab_size)
    draft_token_ids, _ = choose_draft_vocabulary(counts_V, 300, always=[3])
    torch.manual_seed(0)
    head = Eagle3DraftHead(draft_config(target, len(draft_token_ids)))
    head.set_vocabulary(draft_token_ids)
    batch = BucketingCollator(64)(samples)
    features = target.features(batch)
    head.start_from_target(target.lm_head.weight, target.final_norm_weight(), features.aux_hidden_states)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    weights = step_weights(batch.supervised_counts(N), 0.8)
    supervision = supervise(batch.answer_remaining, N)
    for _ in range(16):
        sums = unrolled_sums(head, target.embed, target.logits, batch, supervision, features, weights)
        sums.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return head


@pytest.fixture(scope="module")
def conversations() -> list[tuple[Prompt, list[int]]]:
    """Held-out prompts, and the target's own answers as the demo's files have them."""
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO / "target")
    rows = [json.loads(line) for line in (DEMO / "heldout.jsonl").read_text().splitlines()]
    pairs = []
    for index, row in enumerate(rows[:: len(rows) // NUM_PROMPTS][:NUM_PROMPTS]):
        messages = row["messages"]
        ids = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
        whole = tokenizer.apply_chat_template(messages, return_dict=False)
        answer = whole[len(ids) : whole.index(tokenizer.eos_token_id, len(ids)) + 1]
        pairs.append((Prompt(tuple(ids), f"heldout:{index}", row["family"]), answer))
    return pairs


@pytest.fixture(scope="module")
def results(
    target: FrozenTarget, head: Eagle3DraftHead, conversations: list[tuple[Prompt, list[int]]]
) -> list[PromptResult]:
    return measure_acceptance(
        target,
        head,
        [prompt for prompt, _ in conversations],
        num_speculative_tokens=N,
        max_new_tokens=MAX_NEW_TOKENS,
        progress=False,
    )


def walks(target: FrozenTarget, head: Eagle3DraftHead, samples: list[Sample]) -> list[WalkCounts]:
    """The chain walk of each sample's answer, all packed on one row."""
    batch = BucketingCollator(64)(samples)
    sums = micro_batch_sums(head, target, batch, torch.ones(N), differentiable=False)
    return chain_walk(leading_hits(sums.hits_KT.numpy()), batch.answer_remaining.numpy(), N)


def test_the_answers_are_those_that_the_target_gave_before(
    conversations: list[tuple[Prompt, list[int]]], results: list[PromptResult]
) -> None:
    for (prompt, answer), result in zip(conversations, results, strict=True):
        assert list(result.token_ids) == answer[:MAX_NEW_TOKENS]
        assert result.stopped == (len(answer) <= MAX_NEW_TOKENS)
        assert (result.source, result.category) == (prompt.source, prompt.category)


def test_walked_counts_equal_decoded_counts_prompt_by_prompt(
    target: FrozenTarget,
    head: Eagle3DraftHead,
    conversations: list[tuple[Prompt, list[int]]],
    results: list[PromptResult],
) -> None:
    samples = answer_samples([prompt for prompt, _ in conversations], results)
    walked = walks(target, head, samples)
    for walk, result in zip(walked, results, strict=True):
        assert walk.steps == result.verify_steps
        assert walk.emitted == len(result.token_ids) - 1
        if result.stopped:
            assert walk.accepted_per_position.tolist() == list(result.accepted_per_position)
    stopped = sum(result.stopped for result in results)
    assert 0 < stopped < len(results), "answers that end by themselves, and answers that are cut"
    pooled = pool(walked, N)
    assert pooled.acceptance_length is not None
    assert 1.3 < pooled.acceptance_length < 5, "hits and misses"
    metrics = evaluate(
        head,
        target,
        samples,
        ttt_steps=N,
        training_seq_len=1024,
        bucket_granularity=64,
        progress=False,
    )
    assert metrics["acceptance_length"][str(N)] == pooled.acceptance_length
    assert metrics["verify_steps"][str(N)] == sum(result.verify_steps for result in results)
    assert metrics["target_own_token_share"] == 1.0
