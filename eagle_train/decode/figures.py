"""Acceptance figures from a decoder's counts: pooled, with intervals, by category, looping answers apart.

Counts are added up before any division, so that a prompt weighs as much as it has verify steps. Shapes:
P prompts, N drafted tokens a step, C counts, R resamples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eagle_train.decode.results import PromptResult

NUM_RESAMPLES = 2000
INTERVAL_PERCENTILES = (2.5, 97.5)
ALL = "all"  # the group of every prompt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95 % interval, which is None where fewer than two prompts were drafted for."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class AcceptanceFigures:
    """Figures of some prompts.

    tokens: generated; verify_steps, drafted, accepted: sums over prompts (steps, tokens, tokens);
    acceptance_length: 1 + accepted / verify_steps, pooled, with the bonus token, 1..N+1;
    acceptance_length_prompt_mean: the mean of the prompts' own, for comparison with tools that report it;
    emitted_per_step: tokens behind each answer's first, which the prefill gives, per verify step. The chain
    walk expects this; acceptance_length exceeds it by what an answer's last step brings beyond its end;
    acceptance_per_position: N shares of the verify steps in which that drafted token was accepted, 0..1.
    The figures are None, or have no position, where there is no verify step.
    """

    prompts: int
    tokens: int
    verify_steps: int
    drafted: int
    accepted: int
    acceptance_length: Estimate | None
    acceptance_length_prompt_mean: float | None
    emitted_per_step: Estimate | None
    acceptance_per_position: tuple[Estimate, ...]


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """Every prompt of a group, and the same apart: answers that loop are easily drafted and flatter
    acceptance.
    """

    every: AcceptanceFigures
    without_looping: AcceptanceFigures
    looping: AcceptanceFigures


def acceptance_figures(results: Sequence[PromptResult], *, seed: int = 0) -> AcceptanceFigures:
    """Pooled figures with 95 % intervals: percentiles of `NUM_RESAMPLES` bootstrap resamples of the prompts
    (Efron and Tibshirani 1993, section 13.3). The results must come from one number of drafted tokens.
    """
    # A prompt whose answer is a single token has no verify step: it says nothing, and is not resampled.
    drafted_for = [result for result in results if result.verify_steps]
    accepted_PN = np.array([result.accepted_per_position for result in drafted_for], dtype=np.float64)
    steps_P = np.array([result.verify_steps for result in drafted_for], dtype=np.float64)
    length, prompt_mean, emitted_per_step = None, None, None
    positions: tuple[Estimate, ...] = ()
    if drafted_for:
        emitted_P = np.array([len(result.token_ids) - 1.0 for result in drafted_for])
        counts = np.column_stack([steps_P + accepted_PN.sum(axis=1), emitted_P, accepted_PN])
        length, emitted_per_step, *of_positions = _estimates(steps_P, counts, seed)
        positions = tuple(of_positions)
        prompt_mean = float((1 + accepted_PN.sum(axis=1) / steps_P).mean())
    return AcceptanceFigures(
        prompts=len(results),
        tokens=sum(len(result.token_ids) for result in results),
        verify_steps=int(steps_P.sum()),
        drafted=sum(result.drafted for result in results),
        accepted=int(accepted_PN.sum()),
        acceptance_length=length,
        acceptance_length_prompt_mean=prompt_mean,
        emitted_per_step=emitted_per_step,
        acceptance_per_position=positions,
    )


def group_figures(results: Sequence[PromptResult], *, seed: int = 0) -> dict[str, GroupFigures]:
    """Figures of all prompts under `ALL`, then of each category in the order of its first prompt; prompts
    without a category are in `ALL` alone.
    """
    groups: dict[str, list[PromptResult]] = {ALL: list(results)}
    for result in results:
        if result.category:
            groups.setdefault(result.category, []).append(result)
    return {
        name: GroupFigures(
            every=acceptance_figures(members, seed=seed),
            without_looping=acceptance_figures([r for r in members if not r.is_looping], seed=seed),
            looping=acceptance_figures([r for r in members if r.is_looping], seed=seed),
        )
        for name, members in groups.items()
    }


def count_different(results: Sequence[PromptResult], plain: Sequence[PromptResult]) -> int:
    """Prompts to which drafting gave other tokens than decoding without a draft."""
    return sum(a.token_ids != b.token_ids for a, b in zip(results, plain, strict=True))


def _estimates(steps_P: FloatArray, counts_PC: FloatArray, seed: int) -> list[Estimate]:
    """Each of C counts per verify step, pooled, from prompts that have verify steps."""
    ratios_C = counts_PC.sum(axis=0) / steps_P.sum()
    if len(steps_P) < 2:
        return [Estimate(float(ratio)) for ratio in ratios_C]
    # How often each prompt is drawn: the sums of a resample are one matrix product.
    draws_RP = np.random.default_rng(seed).multinomial(
        len(steps_P), np.full(len(steps_P), 1 / len(steps_P)), size=NUM_RESAMPLES
    )
    ratios_RC = (draws_RP @ counts_PC) / (draws_RP @ steps_P)[:, None]
    low_C, high_C = np.percentile(ratios_RC, INTERVAL_PERCENTILES, axis=0)
    return [Estimate(*map(float, values)) for values in zip(ratios_C, low_C, high_C, strict=True)]
