"""Expected equals measured at a temperature, within what chance allows."""

import numpy as np
import pytest

from eagle_train.data.collator import BucketingCollator
from eagle_train.decode.chain import measure_acceptance
from eagle_train.decode.figures import acceptance_figures
from eagle_train.decode.results import PromptResult, answer_samples
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.target import FrozenTarget
from eagle_train.objective.acceptance import chain_walk, leading_hits
from eagle_train.objective.sampled_walk import ExpectedCounts, pool_expected, sampled_walk
from eagle_train.train.evaluate import evaluate_sampled, sampled_walks
from tests.decode.pairs import own_head, random_prompts
from tests.tiny import tiny_target

N = 3
TEMPERATURE = 0.7
PROMPTS = random_prompts(tuple(1 + index % 5 for index in range(300)), vocab_size=32)


@pytest.fixture(scope="module")
def pair() -> tuple[FrozenTarget, Eagle3DraftHead]:
    """A head that misses often, of which the target's vocabulary lies partly outside the draft's."""
    target = tiny_target(vocab_size=32)
    return target, own_head(target, PROMPTS[:30], draft_vocab_size=26, temperature=TEMPERATURE)


def decode_and_walk(
    pair: tuple[FrozenTarget, Eagle3DraftHead], proposal: str
) -> tuple[list[PromptResult], list[ExpectedCounts]]:
    target, head = pair
    results = measure_acceptance(
        target,
        head,
        PROMPTS,
        num_speculative_tokens=N,
        max_new_tokens=16,
        batch_size=len(PROMPTS),
        temperature=TEMPERATURE,
        proposal=proposal,
        progress=False,
    )
    walks = sampled_walks(
        head,
        target,
        BucketingCollator(64)(answer_samples(PROMPTS, results)),
        N,
        temperature=TEMPERATURE,
        samples_proposal=proposal == "sampled",
    )
    assert len(walks) == sum(len(result.token_ids) > 0 for result in results)
    return results, walks


def test_sampled_proposal_expected_and_measured_agree_within_the_interval(
    pair: tuple[FrozenTarget, Eagle3DraftHead],
) -> None:
    results, walks = decode_and_walk(pair, "sampled")
    pooled = pool_expected(walks, N)
    measured = acceptance_figures(results).emitted_per_step
    assert measured is not None
    assert measured.low is not None
    assert measured.high is not None
    assert pooled.acceptance_length is not None
    assert 1.2 < measured.value < 3, "acceptance and rejection"
    assert measured.low < pooled.acceptance_length < measured.high
    # Given its answer, a prompt's verify steps differ from their expectation by chance alone: a sharper test
    # than the interval, which also holds what answers differ by.
    surplus_P = np.array(
        [result.verify_steps - walk.steps for result, walk in zip(results, walks, strict=True)]
    )
    assert abs(surplus_P.sum()) < 3 * np.sqrt((surplus_P**2).sum())
    assert np.abs(surplus_P).max() > 0.5


def test_the_formula_matters(pair: tuple[FrozenTarget, Eagle3DraftHead]) -> None:
    """The walk for a drafter of arg-maxes, over the answers of one that samples, is off by far more."""
    target, head = pair
    results, walks = decode_and_walk(pair, "sampled")
    samples = answer_samples(PROMPTS, results)
    other = sampled_walks(
        head, target, BucketingCollator(64)(samples), N, temperature=TEMPERATURE, samples_proposal=False
    )
    surplus_P = np.array(
        [result.verify_steps - walk.steps for result, walk in zip(results, other, strict=True)]
    )
    assert abs(surplus_P.sum()) > 5 * np.sqrt((surplus_P**2).sum())
    # Batched by a plan it is the same sum.
    again = evaluate_sampled(
        head,
        target,
        samples,
        num_speculative_tokens=N,
        temperature=TEMPERATURE,
        samples_proposal=True,
        training_seq_len=256,
        bucket_granularity=64,
        progress=False,
    )
    pooled = pool_expected(walks, N)
    assert again.steps == pytest.approx(pooled.steps, rel=1e-5)
    np.testing.assert_allclose(again.accepted_per_position, pooled.accepted_per_position, rtol=1e-4)


def test_greedy_proposal_leaves_nothing_to_chance(pair: tuple[FrozenTarget, Eagle3DraftHead]) -> None:
    results, walks = decode_and_walk(pair, "greedy")
    for result, walk in zip(results, walks, strict=True):
        assert walk.steps == result.verify_steps
        assert walk.emitted == len(result.token_ids) - 1
    assert 0 < sum(result.stopped for result in results) < len(results)
    assert sum(sum(result.accepted_per_position) for result in results) > 0


def test_probabilities_0_and_1_are_the_chain_walk() -> None:
    generator = np.random.default_rng(0)
    remaining_T = np.array([0, 7, 6, 5, 4, 3, 2, 1, 0, 0, 1, 0, 5, 4, 3, 2, 1, 0], dtype=np.int32)
    for _ in range(20):
        hits_KT = generator.random((4, len(remaining_T))) < 0.6
        own = chain_walk(leading_hits(hits_KT), remaining_T, 3)
        other = sampled_walk(hits_KT.astype(float), remaining_T, 3)
        assert [walk.steps for walk in own] == [walk.steps for walk in other]
        assert [walk.emitted for walk in own] == [walk.emitted for walk in other]
        for a, b in zip(own, other, strict=True):
            assert a.accepted_per_position.tolist() == b.accepted_per_position.tolist()


def test_visits_are_propagated_by_hand() -> None:
    """Four tokens x1..x4 behind row 0, n = 2: rows 0, 1, 2 accept their first token with 1/2, row 0 its
    second with 1/4. From row 0: to row 1 with 1/2, to row 2 with 3/8, past row 2 with 1/8."""
    accept_KT = np.array([[0.5, 0.5, 0.5, 0, 0], [0.25, 0.0, 0.0, 0, 0]])
    (walk,) = sampled_walk(accept_KT, np.array([4, 3, 2, 1, 0], dtype=np.int32), 2)
    # Row 1, visited 1/2: a refusal leads to row 2 (1/4); so does nothing else. Row 2: 3/8 + 1/4.
    assert walk.steps == 1 + 1 / 2 + 5 / 8
    assert walk.emitted == 3
    assert walk.accepted_per_position.tolist() == [0.5 * (1 + 1 / 2 + 5 / 8), 1 / 8]
