"""Planners of other trainers, for comparison: multipack v1 and v2 and next-fit. Same arguments and Plan as
`plan_multipack`, numpy and the standard library only.

v1 and v2 are imoneoi's multipack_sampler (2023, MIT), written from the description of the algorithms: each
step takes as many of the next shuffled samples as a binary search finds to fit on the ranks. v1 checks with
first-fit-decreasing, v2 with longest first onto the least loaded rank; the names are those of instructlab's
training library. Like theirs, both drop samples at the end of an epoch and neither rotates ranks. Unlike
theirs, a step's ranks have one bucket.
"""

from collections.abc import Callable, Sequence
from heapq import heapreplace

import numpy as np

from eagle_train.data.packing import Ints, Plan, assemble, check_fits, shuffled

# (lengths longest first, number of packs, capacity) -> pack of each sample, or None where they do not fit
Placement = Callable[[list[int], int, int], list[int] | None]


def plan_multipack_v1(
    lengths: Sequence[int] | Ints,
    capacity: int,
    *,
    world_size: int = 1,
    granularity: int = 1,
    seed: int = 0,
    epoch: int = 0,
) -> Plan:
    """Step by step, the most samples that first-fit-decreasing (Johnson 1974) places on the ranks.

    capacity, granularity: tokens. Drops the last group if some rank gets nothing of it.
    """
    return _plan_by_search(lengths, capacity, world_size, granularity, seed, epoch, first_fit)


def plan_multipack_v2(
    lengths: Sequence[int] | Ints,
    capacity: int,
    *,
    world_size: int = 1,
    granularity: int = 1,
    seed: int = 0,
    epoch: int = 0,
) -> Plan:
    """Step by step, the most samples that longest first onto the least loaded rank (Graham 1969) places.

    capacity, granularity: tokens. Drops the last samples if they are fewer than the ranks.
    """
    return _plan_by_search(lengths, capacity, world_size, granularity, seed, epoch, least_loaded)


def plan_next_fit(
    lengths: Sequence[int] | Ints,
    capacity: int,
    *,
    world_size: int = 1,
    granularity: int = 1,
    seed: int = 0,
    epoch: int = 0,
) -> Plan:
    """Shuffled samples in a row; one that does not fit closes the pack. Packs are dealt to the ranks in turn.

    capacity, granularity: tokens. Nothing is dropped; the last step may hold empty packs.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    check_fits(lengths, capacity)
    order = shuffled(len(lengths), seed, epoch)
    counts: list[int] = []
    room = 0
    for length in lengths[order].tolist():
        if not counts or length > room:
            counts.append(0)
            room = capacity
        counts[-1] += 1
        room -= length
    counts += [0] * (-len(counts) % world_size)
    return assemble(order, counts, lengths, world_size=world_size, granularity=granularity)


def first_fit(longest_first: list[int], num_packs: int, capacity: int) -> list[int] | None:
    """The pack of each sample: the first with room for it."""
    rooms = [capacity] * num_packs
    places = []
    for length in longest_first:
        for pack, room in enumerate(rooms):
            if length <= room:
                rooms[pack] = room - length
                places.append(pack)
                break
        else:
            return None
    return places


def least_loaded(longest_first: list[int], num_packs: int, capacity: int) -> list[int] | None:
    """The pack of each sample: the one with the fewest tokens, of equal ones the first.

    A pack and its load are one integer on the heap, load * num_packs + pack.
    """
    loads, full = list(range(num_packs)), (capacity + 1) * num_packs
    places = []
    for length in longest_first:
        load = loads[0] + length * num_packs
        if load >= full:
            return None
        places.append(loads[0] % num_packs)
        heapreplace(loads, load)
    return places


def _plan_by_search(
    lengths: Sequence[int] | Ints,
    capacity: int,
    world_size: int,
    granularity: int,
    seed: int,
    epoch: int,
    place: Placement,
) -> Plan:
    """Group by group, each a step; ends at the first group that leaves a rank empty."""
    lengths = np.asarray(lengths, dtype=np.int64)
    check_fits(lengths, capacity)
    order = shuffled(len(lengths), seed, epoch)
    in_order, ends = lengths[order].tolist(), np.cumsum(lengths[order])
    samples: list[Ints] = [np.zeros(0, dtype=np.int64)]
    counts: list[int] = []
    start = taken_tokens = 0
    while start < len(order):
        until = int(np.searchsorted(ends, taken_tokens + world_size * capacity, side="right"))
        num_taken = _most_that_fit(in_order[start:until], world_size, capacity, place)
        group = order[start : start + num_taken]
        group = group[np.argsort(-lengths[group], kind="stable")]
        ranks = place(lengths[group].tolist(), world_size, capacity)
        sizes = np.bincount(ranks or [], minlength=world_size)
        if not sizes.all():
            break
        samples.append(group[np.argsort(ranks or [], kind="stable")])
        counts += sizes.tolist()
        start += num_taken
        taken_tokens = int(ends[start - 1])
    placed = np.concatenate(samples)
    return assemble(placed, counts, lengths, world_size=world_size, granularity=granularity)


def _most_that_fit(in_order: list[int], num_packs: int, capacity: int, place: Placement) -> int:
    """The longest prefix that fits. The search takes it that a prefix of one that fits does too, which
    first-fit-decreasing does not quite keep.
    """
    fits, too_many = 1, len(in_order) + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if place(sorted(in_order[:middle], reverse=True), num_packs, capacity) is None:
            too_many = middle
        else:
            fits = middle
    return fits
