"""Acceptance figures from counts: pooled, with intervals, by category, looping answers apart."""

import numpy as np
import pytest

from eagle_train.decode.figures import ALL, Estimate, acceptance_figures, count_different, group_figures
from eagle_train.decode.results import PromptResult


def result(
    steps: int, accepted: tuple[int, ...], *, category: str = "", looping: bool = False, tokens: int = 8
) -> PromptResult:
    return PromptResult(
        source="a.jsonl:1",
        category=category,
        token_ids=tuple(range(tokens)),
        verify_steps=steps,
        drafted=steps * len(accepted),
        accepted_per_position=accepted,
        is_looping=looping,
        stopped=True,
    )


def random_results(count: int, seed: int = 0) -> list[PromptResult]:
    """Prompts of 20 verify steps that accept each of three tokens with probability 0.6, one after another."""
    hits = np.random.default_rng(seed).random((count, 20, 3)) < 0.6
    accepted = hits.cumprod(axis=2).sum(axis=1)
    return [result(20, tuple(map(int, row))) for row in accepted]


def test_u30_counts_are_pooled_and_the_mean_of_means_has_another_name() -> None:
    figures = acceptance_figures([result(10, (10, 10, 10)), result(90, (9, 0, 0))])
    assert figures.acceptance_length is not None
    assert figures.acceptance_length.value == pytest.approx(1.39)
    assert figures.acceptance_length_prompt_mean == pytest.approx((4.0 + 1.1) / 2)
    assert (figures.verify_steps, figures.accepted, figures.drafted) == (100, 39, 300)


def test_a_position_counts_the_verify_steps_that_accepted_it() -> None:
    figures = acceptance_figures([result(10, (10, 5, 0)), result(30, (10, 5, 2))])
    assert [estimate.value for estimate in figures.acceptance_per_position] == [0.5, 0.25, 0.05]
    length = figures.acceptance_length
    assert length is not None
    assert length.value == pytest.approx(1 + sum(e.value for e in figures.acceptance_per_position))


def test_emitted_tokens_leave_out_the_one_that_the_prefill_gives() -> None:
    figures = acceptance_figures([result(4, (4, 3), tokens=11)] * 2)
    assert figures.emitted_per_step == Estimate(2.5, 2.5, 2.5)


def test_the_interval_is_that_of_resampled_prompts() -> None:
    results = random_results(200)
    length = acceptance_figures(results).acceptance_length
    assert length is not None
    assert length.low is not None
    assert length.high is not None
    own = np.array([1 + sum(r.accepted_per_position) / r.verify_steps for r in results])
    half_width = 1.96 * own.std(ddof=1) / np.sqrt(len(own))  # all prompts have the same number of steps
    assert length.value - length.low == pytest.approx(half_width, rel=0.15)
    assert length.high - length.value == pytest.approx(half_width, rel=0.15)
    assert acceptance_figures(results) == acceptance_figures(results)
    assert acceptance_figures(results, seed=1).acceptance_length != length


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    truth = 1 + 0.6 + 0.36 + 0.216
    held = 0
    for seed in range(100):
        length = acceptance_figures(random_results(40, seed)).acceptance_length
        assert length is not None
        held += length.low <= truth <= length.high  # type: ignore[operator]
    assert 88 <= held <= 99


def test_prompts_that_say_nothing_give_no_figure_and_no_interval() -> None:
    silent = result(0, (0, 0), tokens=1)
    empty = acceptance_figures([silent])
    assert (empty.prompts, empty.tokens, empty.acceptance_length) == (1, 1, None)
    assert (empty.acceptance_length_prompt_mean, empty.emitted_per_step) == (None, None)
    assert empty.acceptance_per_position == ()
    alone = acceptance_figures([silent, result(2, (1, 0))]).acceptance_length
    assert alone is not None
    assert (alone.value, alone.low, alone.high) == (1.5, None, None)


def test_categories_are_groups_and_looping_answers_stand_apart() -> None:
    results = [
        result(10, (1, 0), category="qa"),
        result(10, (10, 10), category="qa", looping=True),
        result(20, (5, 5), category="code"),
        result(20, (2, 2)),
    ]
    groups = group_figures(results)
    assert list(groups) == [ALL, "qa", "code"]
    assert [group.every.prompts for group in groups.values()] == [4, 2, 1]

    def length(figures: object) -> float:
        return figures.acceptance_length.value  # type: ignore[attr-defined]

    assert length(groups["qa"].every) == pytest.approx(1 + 21 / 20)
    assert length(groups["qa"].without_looping) == pytest.approx(1.1)
    assert length(groups["qa"].looping) == 3.0
    assert groups["code"].looping.acceptance_length is None
    assert groups[ALL].every.verify_steps == 60


def test_answers_that_differ_are_counted() -> None:
    a, b = result(1, (0,), tokens=3), result(1, (0,), tokens=4)
    assert count_different([a, b], [a, a]) == 1
