"""Acceptance as serving sees it: the chain walk over teacher-forced hits, pooled counts, and a bigram
baseline.

Numpy on the host; sums over batches and ranks come before any division, and an empty denominator gives None.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_train.objective.unroll import UnrolledSums

# The per-step sums of `UnrolledSums` that figures are made of.
STEP_SUMS = ("loss_sum", "supervised_rows", "loss_rows", "acceptance_sum", "top1_hits", "prefix_hits")

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]


@dataclass(slots=True)
class WalkCounts:
    """Verify steps of the chain walk at n drafted tokens: steps, emitted tokens and accepted tokens a
    position `[n]`.
    """

    steps: int
    emitted: int
    accepted_per_position: IntArray

    def add(self, other: "WalkCounts") -> None:
        self.steps += other.steps
        self.emitted += other.emitted
        self.accepted_per_position += other.accepted_per_position

    @property
    def acceptance_length(self) -> float | None:
        """Tokens emitted per verify step, with the bonus token: 1..n+1."""
        return self.emitted / self.steps if self.steps else None


def leading_hits(hits_KT: BoolArray) -> IntArray:
    """How many of a row's steps 0, 1, ... hit before the first miss, `[T]`."""
    return hits_KT.astype(np.int64).cumprod(axis=0).sum(axis=0)


def answer_starts(answer_remaining_T: npt.NDArray[np.int32]) -> IntArray:
    """The row from which serving drafts first in each answer: a-1 for an answer a..b (a itself where a is
    row 0).
    """
    remaining = answer_remaining_T.astype(np.int64)
    previous = np.concatenate([[0], remaining[:-1]])
    return np.flatnonzero((remaining >= 1) & (previous != remaining + 1))


def chain_walk(
    leading_hits_T: IntArray, answer_remaining_T: npt.NDArray[np.int32], num_speculative_tokens: int
) -> list[WalkCounts]:
    """Walk each answer as a decoder does: m accepted tokens and the target's own take it m + 1 rows on.

    A decoder does not visit rows uniformly, so this differs from a mean over rows (DESIGN section 3). The
    prefill's token x_{t+1} at the answer's first row is not counted, and the last step emits no bonus where
    the answer ends. One WalkCounts an answer, in order; answers of a single token have no step.
    """
    walks = []
    for start in answer_starts(answer_remaining_T).tolist():
        counts = WalkCounts(0, 0, np.zeros(num_speculative_tokens, dtype=np.int64))
        row, remaining = start, int(answer_remaining_T[start])
        while remaining >= 2:
            accepted = min(int(leading_hits_T[row]), num_speculative_tokens, remaining - 1)
            counts.steps += 1
            counts.emitted += min(accepted + 1, remaining - 1)
            counts.accepted_per_position[:accepted] += 1
            row += accepted + 1
            remaining -= accepted + 1
        walks.append(counts)
    return walks


def pool(walks: Iterable[WalkCounts], num_speculative_tokens: int) -> WalkCounts:
    """Counts added up before any division: long answers weigh as much as their steps."""
    total = WalkCounts(0, 0, np.zeros(num_speculative_tokens, dtype=np.int64))
    for walk in walks:
        total.add(walk)
    return total


@dataclass(slots=True)
class AcceptanceTotals:
    """Sums over a whole split; `metrics` divides once. walk_lengths: the n of each acceptance length."""

    ttt_steps: int
    walk_lengths: tuple[int, ...]
    sums: dict[str, npt.NDArray[np.float64]] = field(init=False)
    walks: dict[int, WalkCounts] = field(init=False)
    own_tokens: float = 0.0
    own_token_rows: int = 0

    def __post_init__(self) -> None:
        self.sums = {name: np.zeros(self.ttt_steps) for name in STEP_SUMS}
        self.walks = {n: pool([], n) for n in self.walk_lengths}

    def add(self, batch_sums: UnrolledSums, answer_remaining_T: npt.NDArray[np.int32]) -> None:
        """Add one batch. Reads the device once a field."""
        for name in STEP_SUMS:
            self.sums[name] += getattr(batch_sums, name).cpu().numpy()
        self.own_tokens += float(batch_sums.own_tokens)
        self.own_token_rows += batch_sums.own_token_rows
        leading = leading_hits(batch_sums.hits_KT.cpu().numpy())
        for n in self.walk_lengths:
            self.walks[n].add(pool(chain_walk(leading, answer_remaining_T, n), n))

    def as_list(self) -> list[float]:
        """Everything in a fixed order, so that ranks can add up element by element; `from_list` undoes it."""
        walks = [x for w in self.walks.values() for x in (w.steps, w.emitted, *w.accepted_per_position)]
        sums = [float(x) for values in self.sums.values() for x in values]
        return [*sums, *map(float, walks), self.own_tokens, float(self.own_token_rows)]

    def from_list(self, values: Sequence[float]) -> "AcceptanceTotals":
        """Totals of the same steps and walk lengths with these values."""
        totals = AcceptanceTotals(self.ttt_steps, self.walk_lengths)
        rest = iter(values)
        totals.sums = {name: np.array(list(islice(rest, self.ttt_steps))) for name in STEP_SUMS}
        for n in self.walk_lengths:
            steps, emitted, *accepted = (round(x) for x in islice(rest, n + 2))
            totals.walks[n] = WalkCounts(steps, emitted, np.array(accepted, dtype=np.int64))
        totals.own_tokens, own_token_rows = rest
        totals.own_token_rows = round(own_token_rows)
        return totals

    def metrics(self, step_decay: float) -> dict[str, Any]:
        """Loss and acceptance figures under DESIGN's names; lists are indexed by step k."""
        rows = self.sums["supervised_rows"]
        loss_per_step = _ratios(self.sums["loss_sum"], rows)
        weights = step_decay ** np.arange(self.ttt_steps)
        measured = [w * loss for w, loss in zip(weights, loss_per_step, strict=True) if loss is not None]
        prefix_share = [
            share or 0.0 for share in _ratios(self.sums["prefix_hits"], np.full_like(rows, rows[0]))
        ]
        return {
            "loss": float(sum(measured)) if measured else None,
            "loss_per_step": loss_per_step,
            "acceptance_rate": _ratios(self.sums["acceptance_sum"], rows),
            "top1_agreement": _ratios(self.sums["top1_hits"], rows),
            "acceptance_length": {str(n): self.walks[n].acceptance_length for n in sorted(self.walks)},
            "acceptance_length_row_mean": 1.0 + sum(prefix_share) if rows[0] else None,
            "verify_steps": {str(n): self.walks[n].steps for n in sorted(self.walks)},
            "accepted_per_position": {
                str(n): self.walks[n].accepted_per_position.tolist() for n in sorted(self.walks)
            },
            "supervised_rows": int(rows[0]),
            "draft_vocab_coverage": _ratios(self.sums["loss_rows"], rows)[0],
            "target_own_token_share": self.own_tokens / self.own_token_rows if self.own_token_rows else None,
        }


def _ratios(numerators: npt.NDArray[np.float64], denominators: npt.NDArray[np.float64]) -> list[float | None]:
    return [float(a / b) if b else None for a, b in zip(numerators, denominators, strict=True)]
