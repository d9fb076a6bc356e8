"""Which samples share a batch. Numpy and the standard library only; a plan is a pure function of its
arguments.

A plan is a list of packs, a pack a list of sample indices; every index stands in exactly one pack.
"""

import bisect
from collections.abc import Sequence

import numpy as np

Plan = list[list[int]]


def pack_best_fit(lengths: Sequence[int], capacity: int, *, seed: int, epoch: int) -> Plan:
    """Best-fit-decreasing packs of at most `capacity` tokens, in an order shuffled by (seed, epoch).

    Longest first, each into the fullest open pack that still holds it (Johnson 1974: at most 11/9 of the
    optimum plus a constant; in practice within a percent). Samples of equal length are shuffled first, so
    that packs differ from epoch to epoch. Lengths above `capacity` are the caller's to truncate or drop.
    """
    rng = np.random.default_rng([seed, epoch])
    shuffled = rng.permutation(len(lengths))
    longest_first = shuffled[np.argsort(-np.asarray(lengths, dtype=np.int64)[shuffled], kind="stable")]
    packs: Plan = []
    open_packs: list[
        tuple[int, int]
    ] = []  # (free tokens, pack), sorted: the best fit is the first that suffices
    for index in longest_first.tolist():
        length = lengths[index]
        assert length <= capacity, f"sample {index} has {length} tokens, capacity is {capacity}"
        place = bisect.bisect_left(open_packs, (length, -1))
        if place < len(open_packs):
            free, pack = open_packs.pop(place)
        else:
            free, pack = capacity, len(packs)
            packs.append([])
        packs[pack].append(index)
        if free > length:
            bisect.insort(open_packs, (free - length, pack))
    return [packs[pack] for pack in rng.permutation(len(packs))]


def batch_shuffled(num_samples: int, batch_size: int, *, seed: int, epoch: int) -> Plan:
    """Batches of `batch_size` samples in an order shuffled by (seed, epoch); the last one may be short."""
    order = np.random.default_rng([seed, epoch]).permutation(num_samples).tolist()
    return [order[start : start + batch_size] for start in range(0, num_samples, batch_size)]


def fill(lengths: Sequence[int], plan: Plan, granularity: int) -> float:
    """Real tokens per computed slot of a flat plan whose packs are rounded up to `granularity`, 0..1."""
    tokens = [sum(lengths[index] for index in pack) for pack in plan]
    slots = sum(-(-num_tokens // granularity) * granularity for num_tokens in tokens)
    return sum(tokens) / slots if slots else 0.0
