"""The chain walk: hand-made hits, and the counts that three engines give for a real head."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle_train.data.collator import BucketingCollator
from eagle_train.data.samples import Sample, answer_remaining_from_spans
from eagle_train.model.checkpoint import load_draft_head
from eagle_train.model.target import load_target
from eagle_train.objective.acceptance import answer_starts, chain_walk, leading_hits, pool
from eagle_train.train.evaluate import micro_batch_sums


def walk(leading: list[int], remaining: list[int], n: int) -> list[tuple[int, int, list[int]]]:
    counts = chain_walk(np.array(leading), np.array(remaining, dtype=np.int32), n)
    return [(c.steps, c.emitted, c.accepted_per_position.tolist()) for c in counts]


def test_a_draft_that_never_hits_emits_one_token_a_step() -> None:
    # An answer of 5 tokens at 3..7: serving starts at row 2 and emits x4..x7 one by one.
    assert walk([0] * 8, [0, 0, 5, 4, 3, 2, 1, 0], 3) == [(4, 4, [0, 0, 0])]


def test_a_draft_that_always_hits_jumps_and_gets_no_bonus_past_the_end() -> None:
    # Row 2: 3 hits and the bonus emit x4..x7, all that is left.
    assert walk([0, 0, 4, 3, 2, 1, 0, 0], [0, 0, 5, 4, 3, 2, 1, 0], 3) == [(1, 4, [1, 1, 1])]
    # With n = 4 all four are drafted and the bonus would lie past the end: still 4 emitted.
    assert walk([0, 0, 4, 3, 2, 1, 0, 0], [0, 0, 5, 4, 3, 2, 1, 0], 4) == [(1, 4, [1, 1, 1, 1])]
    # With n = 1 each step emits two.
    assert walk([0, 0, 4, 3, 2, 1, 0, 0], [0, 0, 5, 4, 3, 2, 1, 0], 1) == [(2, 4, [2])]


def test_hard_rows_weigh_more_than_in_a_mean_over_rows() -> None:
    # Rows 0..5 of an answer of 7 tokens from row 0; easy rows are jumped over, so the walk visits rows 0, 4
    # and 5.
    leading = [3, 2, 1, 0, 0, 0, 0]
    remaining = [7, 6, 5, 4, 3, 2, 1]
    assert walk(leading, remaining, 3) == [(3, 6, [1, 1, 1])]
    row_mean = 1 + np.mean(leading[:6])
    assert row_mean == 2.0
    assert (
        pool(chain_walk(np.array(leading), np.array(remaining, dtype=np.int32), 3), 3).acceptance_length
        == 2.0
    )


def test_every_answer_of_a_packed_row_has_its_own_start() -> None:
    # Two documents: answers at 1..2 and 4..5 of the first, then one that begins at the second's first token.
    remaining = np.array([2, 1, 0, 2, 1, 0, 3, 2, 1, 0], dtype=np.int32)
    assert answer_starts(remaining).tolist() == [0, 3, 6]
    # Adjacent turns without a token between them: the second starts on the first one's last token.
    assert answer_starts(answer_remaining_from_spans(7, [(1, 4), (4, 7)])).tolist() == [0, 3]


def test_counts_are_pooled_before_the_division() -> None:
    """U30: prompt A 10 verify steps and 30 accepted, prompt B 90 and 9: 1 + 39/100, not the mean of means."""
    a = chain_walk(np.full(41, 3), np.arange(41, 0, -1, dtype=np.int32), 3)
    b = chain_walk(np.array(([1] + [0] * 10) * 9 + [0] * 1), np.arange(100, 0, -1, dtype=np.int32), 3)
    assert [(c.steps, int(c.accepted_per_position.sum())) for c in (*a, *b)] == [(10, 30), (90, 9)]
    pooled = pool([*a, *b], 3)
    assert pooled.acceptance_length == pytest.approx(1.39)


@pytest.mark.shared
def test_the_walk_gives_the_engines_counts_prompt_by_prompt(shared: Path) -> None:
    """vLLM gave these counts; llama.cpp and OpenVINO gave the capped totals (fixtures/engine_probe)."""
    probe = shared / "fixtures" / "engine_probe"
    expected = json.loads((probe / "counts.json").read_text())
    n = expected["num_speculative_tokens"]
    target = load_target(str(probe / "target"), dtype=torch.float32, device=torch.device("cpu"))
    head = load_draft_head(probe / "draft")
    assert list(target.aux_layer_ids) == expected["aux_layer_ids"]
    steps, capped_accepted, full_accepted = 0, 0, np.zeros(n, dtype=np.int64)
    for prompt in expected["prompts"]:
        tokens = prompt["prompt_ids"] + prompt["greedy_ids"]
        # A few more greedy tokens let the last verify step draft beyond the limit, as the uncapped counts do.
        with torch.no_grad():
            extended = target.model.generate(
                torch.tensor([tokens]), max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0
            )[0].tolist()
        num_prompt, num_answer = len(prompt["prompt_ids"]), len(prompt["greedy_ids"])
        leading = {}
        for name, ids, stop in (("capped", tokens, len(tokens)), ("full", extended, len(extended))):
            remaining = answer_remaining_from_spans(len(ids), [(num_prompt, stop)])
            sample = Sample(np.array(ids, dtype=np.int32), remaining, "probe")
            batch = BucketingCollator(64)([sample])
            with torch.no_grad():
                sums = micro_batch_sums(head, target, batch, torch.ones(n))
            leading[name] = leading_hits(sums.hits_KT.numpy())[: len(ids)], remaining
        (counts,) = chain_walk(*leading["capped"], n)
        assert counts.steps == prompt["verify_steps"], "verify steps"
        assert counts.emitted == num_answer - 1
        steps += counts.steps
        capped_accepted += int(counts.accepted_per_position.sum())
        # Uncapped: the same walk over the longer document, stopped where the 40 tokens are out.
        row, accepted_here = num_prompt - 1, np.zeros(n, dtype=np.int64)
        for _ in range(counts.steps):
            accepted = min(int(leading["full"][0][row]), n)
            accepted_here[:accepted] += 1
            row += accepted + 1
        assert accepted_here.tolist() == prompt["accepted_per_position"]
        full_accepted += accepted_here
    assert steps == expected["verify_steps"] > 0
    assert full_accepted.tolist() == expected["accepted_per_position"]
    assert expected["capped"]["accepted"] <= capped_accepted <= expected["accepted"]
