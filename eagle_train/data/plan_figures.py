"""What a plan is worth: fill, balance of the ranks, shapes to compile, samples left out."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eagle_train.data.packing import Floats, Ints, Plan, cost


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """Figures of one epoch, over all ranks.

    num_packs: packs that hold a sample;
    tokens: real tokens planned; slots: tokens computed, padding and placeholders included;
    fill: tokens / slots, 0.0 for an empty plan;
    imbalance_tokens, imbalance_cost: sum over steps of the heaviest rank / of the mean rank, in real tokens
    and in `cost` of their documents; 1.0 is even;
    utilisation: cost of the documents / what the ranks are busy or waiting for, each step lasting as long as
    its slowest rank. Padding behind a flat row costs its tokens; a padded row costs a document of its length;
    shapes: steps of each shape, "8192" flat or "8x2048" (most rows of a rank x row length), most steps first;
    dropped_samples, dropped_tokens: what the plan leaves out.
    """

    num_steps: int
    num_packs: int
    tokens: int
    slots: int
    fill: float
    imbalance_tokens: float
    imbalance_cost: float
    utilisation: float
    shapes: dict[str, int]
    dropped_samples: int
    dropped_tokens: int


def plan_figures(plan: Plan, lengths: Sequence[int] | Ints, *, padding_free: bool = True) -> PlanFigures:
    """The figures of a plan. lengths: tokens of all samples, those that it leaves out too."""
    lengths = np.asarray(lengths, dtype=np.int64)
    sizes = np.diff(plan.offsets).reshape(-1, plan.world_size)
    rows = np.ones_like(sizes) if padding_free else np.maximum(sizes, 1)
    documents = lengths[plan.samples]
    tokens, costs = plan.sum_by_pack(documents), plan.sum_by_pack(cost(documents))
    row_lens = plan.bucket_lens[:, None]
    busy = costs + row_lens - tokens if padding_free else rows * cost(row_lens)
    slots = int((rows * row_lens).sum())
    dropped = np.bincount(plan.samples, minlength=len(lengths)) == 0
    return PlanFigures(
        num_steps=plan.num_steps,
        num_packs=int(np.count_nonzero(sizes)),
        tokens=int(documents.sum()),
        slots=slots,
        fill=int(documents.sum()) / slots if slots else 0.0,
        imbalance_tokens=_imbalance(tokens),
        imbalance_cost=_imbalance(costs),
        utilisation=float(costs.sum() / (plan.world_size * busy.max(axis=1).sum())) if slots else 0.0,
        shapes=_shapes(rows.max(axis=1), plan.bucket_lens, padding_free),
        dropped_samples=int(np.count_nonzero(dropped)),
        dropped_tokens=int(lengths[dropped].sum()),
    )


def step_imbalance(plan: Plan, lengths: Sequence[int] | Ints) -> Floats:
    """Real tokens of each step's heaviest rank / of its mean rank, float64 `[num_steps]`."""
    tokens = plan.sum_by_pack(np.asarray(lengths, dtype=np.int64)[plan.samples])
    return tokens.max(axis=1) / tokens.mean(axis=1)


def _imbalance(loads: Floats) -> float:
    return float(loads.max(axis=1).sum() / loads.mean(axis=1).sum()) if loads.size else 1.0


def _shapes(rows: Ints, row_lens: Ints, padding_free: bool) -> dict[str, int]:
    pairs = zip(rows.tolist(), row_lens.tolist(), strict=True)
    names = (str(row_len) if padding_free else f"{num_rows}x{row_len}" for num_rows, row_len in pairs)
    return dict(Counter(names).most_common())
