"""Which samples share a row, and which rows share a step. Numpy and the standard library only; a plan is a
pure function of its arguments, so every rank makes it alone and all make the same.

The multipack planner works on windows of many packs at once. Longest first, each sample goes to the least
loaded pack of the window (LPT, Graham 1969), which gives packs of equal tokens and a like mix of documents;
where that leaves room, the shorter samples go by best fit instead (Johnson 1974). What fits nowhere opens the
next window. The window's packs, by then of nearly equal tokens, are sorted by what attention costs and dealt
to steps, so that the ranks of a step carry equal cost. Nothing is dropped or repeated.
"""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

WINDOW_STEPS = 16  # steps planned at once; more balances better and starts later
WINDOW_PACKS = 512  # but never fewer packs than this: on few ranks 16 steps have too little to choose from
# How a window is filled, tried in turn: the share of its tokens that is spread (the rest is fitted in), and
# the fill that is good enough to stop at. Fitting makes fuller packs, but packs of like documents.
ATTEMPTS = ((1.0, 0.997), (0.85, 0.99), (0.6, 0.99), (0.3, 0.97), (0.0, 0.0))
# Tokens at which a document's attention costs as much as its products, in `cost`. 24,576 is what verl counts
# for a 7B model; a draft layer alone has about 100k by arithmetic, and attention kernels run below a matrix
# product's speed. The plan itself does not depend on it.
BALANCE_LENGTH = 24_576


@dataclass(frozen=True, slots=True)
class Plan:
    """The batches of one epoch: `num_steps` steps of `world_size` packs each.

    samples int64 `[N]`: sample indices, pack after pack, a step's ranks side by side;
    offsets int64 `[num_steps * world_size + 1]`: where each pack begins in `samples`. An empty pack is a
    placeholder: a rank that has nothing left in an epoch's last step;
    bucket_lens int64 `[num_steps]`: length of a row in slots, one for all ranks of a step.
    """

    world_size: int
    samples: Ints
    offsets: Ints
    bucket_lens: Ints

    @property
    def num_steps(self) -> int:
        return len(self.bucket_lens)

    def pack(self, step: int, rank: int) -> list[int]:
        """The samples of one rank's batch."""
        place = step * self.world_size + rank
        return self.samples[self.offsets[place] : self.offsets[place + 1]].tolist()

    def sum_by_pack(self, values: Ints | Floats) -> Floats:
        """A value of each planned sample, in plan order, summed to float64 `[num_steps, world_size]`."""
        num_packs = len(self.offsets) - 1
        pack_of = np.repeat(np.arange(num_packs), np.diff(self.offsets))
        sums = np.bincount(pack_of, weights=values, minlength=num_packs)
        return sums.astype(np.float64).reshape(-1, self.world_size)

    def digest(self) -> str:
        """Equal plans have equal digests, on every machine and numpy version."""
        digest = hashlib.sha256(str(self.world_size).encode())
        for array in (self.samples, self.offsets, self.bucket_lens):
            digest.update(array.astype("<i8").tobytes())
        return digest.hexdigest()[:16]


def plan_multipack(
    lengths: Sequence[int] | Ints,
    capacity: int,
    *,
    world_size: int = 1,
    granularity: int = 1,
    seed: int = 0,
    epoch: int = 0,
) -> Plan:
    """Full packs of at most `capacity` tokens, each sample in exactly one, a step's ranks of equal cost.

    capacity, granularity: tokens; a capacity that is no multiple of granularity lies inside the last bucket.
    The last steps of an epoch may be less full, and its very last may hold empty packs.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    check_fits(lengths, capacity)
    order = shuffled(len(lengths), seed, epoch)
    window_steps = max(WINDOW_STEPS, -(-WINDOW_PACKS // world_size))
    ends = np.cumsum(lengths[order])
    taken, taken_tokens = 0, 0  # how far into `order`
    carried = np.zeros(0, dtype=np.int64)
    pieces: list[tuple[Ints, Ints]] = []  # per window: samples in plan order, number of samples a pack
    num_steps = 0
    while len(carried) or taken < len(order):
        carried_tokens = int(lengths[carried].sum())
        left = carried_tokens + int(ends[-1]) - taken_tokens
        steps = max(left // (world_size * capacity), 1)
        until = len(order)
        if steps >= 2 * window_steps:
            steps = window_steps
            wanted = steps * world_size * capacity - carried_tokens
            until = max(int(np.searchsorted(ends, taken_tokens + wanted, side="left")) + 1, taken)
        fresh = order[taken:until]
        if len(fresh):
            taken, taken_tokens = taken + len(fresh), int(ends[taken + len(fresh) - 1])
        window = np.concatenate([_longest_first(carried, lengths), _longest_first(fresh, lengths)])
        packs = _fill(lengths[window], steps * world_size, capacity)
        carried = window[packs < 0]
        pieces.append(_deal(window, packs, lengths, world_size, steps, num_steps, seed, epoch))
        num_steps += steps
    samples = np.concatenate([np.zeros(0, dtype=np.int64), *(samples for samples, _ in pieces)])
    counts = np.concatenate([np.zeros(0, dtype=np.int64), *(counts for _, counts in pieces)])
    return assemble(samples, counts, lengths, world_size=world_size, granularity=granularity)


def plan_batches(
    lengths: Sequence[int] | Ints,
    batch_size: int,
    *,
    world_size: int = 1,
    granularity: int = 1,
    padding_free: bool = True,
    seed: int = 0,
    epoch: int = 0,
) -> Plan:
    """Shuffled batches of `batch_size` samples; in the last step ranks may hold fewer, or none.

    A row is a batch laid flat, or without `padding_free` as long as the step's longest sample.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    order = shuffled(len(lengths), seed, epoch)
    whole, rest = divmod(len(order), world_size * batch_size)
    counts = [batch_size] * (whole * world_size)
    if rest:
        counts += [rest // world_size + (rank < rest % world_size) for rank in range(world_size)]
    return assemble(
        order, counts, lengths, world_size=world_size, granularity=granularity, padding_free=padding_free
    )


def assemble(
    samples: Ints,
    counts: Sequence[int] | Ints,
    lengths: Ints,
    *,
    world_size: int,
    granularity: int,
    padding_free: bool = True,
) -> Plan:
    """Samples in plan order and the size of each pack as a Plan, with buckets that hold all ranks of a step.

    counts: samples of each pack, `world_size` packs a step.
    """
    counts = np.asarray(counts, dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    pack_of = np.repeat(np.arange(len(counts)), counts)
    rows = np.zeros(len(counts), dtype=np.int64)
    (np.add if padding_free else np.maximum).at(rows, pack_of, lengths[samples])
    longest = rows.reshape(-1, world_size).max(axis=1, initial=1)
    return Plan(world_size, samples, offsets, -(-longest // granularity) * granularity)


class Shape(NamedTuple):
    """What the compiler sees of a batch, in slots: rows x length of a row, and rows of later TTT steps."""

    num_rows: int
    bucket_len: int
    supervised_len: int

    @property
    def num_slots(self) -> int:
        return self.num_rows * self.bucket_len

    def __str__(self) -> str:
        row = f"{self.num_rows}x{self.bucket_len}" if self.num_rows > 1 else str(self.bucket_len)
        return f"{row}/{self.supervised_len}"


def supervised_counts(plan: Plan, supervised_rows: Ints) -> Ints:
    """The most rows supervised at TTT step 0 that a rank holds in each plan step, int64 `[num_steps]`.

    supervised_rows: of each sample.
    """
    per_rank = plan.sum_by_pack(supervised_rows[plan.samples])
    return per_rank.max(axis=1, initial=1).astype(np.int64)


def choose_sizes(counts: Ints, num_sizes: int = 3, multiple: int = 64) -> list[int]:
    """At most `num_sizes` multiples of `multiple` to which all counts are rounded up at the least sum.

    Exact, by dynamic programming over the distinct counts: the best cover of the first i by k sizes ends in
    one size for the counts j..i.
    """
    values, times = np.unique(-(-counts // multiple) * multiple, return_counts=True)
    ends = np.concatenate([[0], np.cumsum(times)])
    best = np.where(np.arange(len(values) + 1) == 0, 0.0, np.inf)
    ways: list[Ints] = []
    for _ in range(min(num_sizes, len(values))):
        # cost[j, i]: the first j values as before, values j..i-1 all rounded up to the last of them
        spans = (ends[None, :] - ends[:, None]) * np.concatenate([[0], values])[None, :]
        cost = best[:, None] + np.where(np.triu(np.ones_like(spans), 1) > 0, spans, np.inf)
        ways.append(cost.argmin(axis=0))
        best = cost.min(axis=0)
    sizes, until = [], len(values)
    for way in reversed(ways):
        if until:
            sizes.append(int(values[until - 1]))
            until = int(way[until])
    return sorted(sizes)


def supervised_buckets(
    plan: Plan, supervised_rows: Ints, sizes: Sequence[int], *, padding_free: bool = True
) -> Ints:
    """Rows that later TTT steps compute in each plan step, int64 `[num_steps]`: the smallest of `sizes` that
    holds the step's, or all slots of the batch where none does or where these are fewer.
    """
    ladder = np.array([*sizes, np.iinfo(np.int64).max], dtype=np.int64)
    fitting = ladder[np.searchsorted(ladder, supervised_counts(plan, supervised_rows))]
    most_rows = np.diff(plan.offsets).reshape(-1, plan.world_size).max(axis=1, initial=1)
    return np.minimum(fitting, plan.bucket_lens * (1 if padding_free else most_rows))


def plan_shapes(
    plan: Plan, supervised_rows: Ints, sizes: Sequence[int], *, padding_free: bool = True
) -> set[Shape]:
    """The shapes of all ranks' batches in a plan."""
    supervised = supervised_buckets(plan, supervised_rows, sizes, padding_free=padding_free)
    pack_sizes = np.diff(plan.offsets).reshape(-1, plan.world_size)
    num_rows = np.ones_like(pack_sizes) if padding_free else np.maximum(pack_sizes, 1)
    of_steps = np.stack([plan.bucket_lens, supervised], axis=1).repeat(plan.world_size, axis=0)
    distinct = np.unique(np.concatenate([num_rows.reshape(-1, 1), of_steps], axis=1), axis=0)
    return {Shape(*shape) for shape in distinct.tolist()}


def cost(lengths: Ints) -> Floats:
    """Modelled cost of documents, in tokens: linear for the products, quadratic for attention."""
    return lengths + lengths.astype(np.float64) ** 2 / BALANCE_LENGTH


def shuffled(count: int, seed: int, epoch: int) -> Ints:
    """0..count - 1 in an order of (seed, epoch). A hash of our own: numpy does not promise that its
    permutations stay the same across versions, and a resumed run needs that.
    """
    keys = _mix(np.arange(count, dtype=np.uint64) + _mix(_mix(_word(seed)) + _word(epoch)))
    return np.argsort(keys, kind="stable").astype(np.int64)


def _word(value: int) -> npt.NDArray[np.uint64]:
    return np.array([value], dtype=np.uint64)  # an array: numpy warns when a scalar wraps


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser (Steele, Lea and Flood 2014), a bijection of 64 bits."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def check_fits(lengths: Ints, capacity: int) -> None:
    """Lengths above the capacity or below one token are the caller's to cut or leave out."""
    over = np.flatnonzero(lengths > capacity)
    assert not len(over), f"sample {over[0]} has {lengths[over[0]]} tokens, capacity is {capacity}"
    assert len(lengths) == 0 or lengths.min() > 0, "a sample has no token"


def _longest_first(samples: Ints, lengths: Ints) -> Ints:
    return samples[np.argsort(-lengths[samples], kind="stable")]


def _fill(lengths: Ints, num_packs: int, capacity: int) -> Ints:
    """The pack of each sample, -1 where it fits nowhere; lengths in the order in which they are placed."""
    best, most_tokens, stuck = np.zeros(0, dtype=np.int64), -1, False
    for share, enough in ATTEMPTS:
        if stuck and share:
            continue  # nothing was gained by fitting a little, as with samples that cannot share a pack
        num_spread = int(np.searchsorted(np.cumsum(lengths), share * lengths.sum(), side="right"))
        packs = _place(lengths, num_packs, capacity, num_spread)
        tokens = int(lengths[packs >= 0].sum())
        stuck = tokens == most_tokens
        if tokens > most_tokens:
            best, most_tokens = packs, tokens
        if most_tokens >= enough * num_packs * capacity or (best >= 0).all():
            break
    return best


def _place(lengths: Ints, num_packs: int, capacity: int, num_spread: int) -> Ints:
    """The first `num_spread` samples onto the least loaded pack, the others by best fit; -1: no room.

    A pack and its load are one integer, load * num_packs + pack, so that comparing and adding stay cheap.
    """
    places: list[int] = []
    weights = (lengths * num_packs).tolist()
    loads, full = list(range(num_packs)), (capacity + 1) * num_packs
    for weight in weights[:num_spread]:
        least = loads[0]
        if least + weight < full:
            heapreplace(loads, least + weight)
            places.append(least)
        else:
            places.append(-1)
    rooms = sorted(capacity * num_packs - load + 2 * (load % num_packs) for load in loads)
    for weight in weights[num_spread:]:
        best = bisect_left(rooms, weight)
        if best < len(rooms):
            room = rooms.pop(best)
            insort(rooms, room - weight)
            places.append(room)
        else:
            places.append(-1)
    packs = np.array(places, dtype=np.int64)
    return np.where(packs < 0, -1, packs % num_packs)


def _deal(
    window: Ints,
    packs: Ints,
    lengths: Ints,
    world_size: int,
    steps: int,
    first_step: int,
    seed: int,
    epoch: int,
) -> tuple[Ints, Ints]:
    """Neighbours by attention's cost share a step; steps shuffled; ranks rotated, so that no rank always gets
    the most. Tokens do not count here: the ranks of a step compute one bucket, so only squares differ.

    Returns the placed samples in plan order and the number of samples of each pack.
    """
    placed = packs >= 0
    window, packs = window[placed], packs[placed]
    costs = np.bincount(packs, weights=lengths[window] ** 2, minlength=steps * world_size)
    by_cost = np.argsort(costs, kind="stable").reshape(steps, world_size)
    by_cost = by_cost[shuffled(steps, seed, epoch + first_step)]
    ranks = (np.arange(world_size) + first_step + np.arange(steps)[:, None]) % world_size
    place_of = np.empty(steps * world_size, dtype=np.int64)
    place_of[np.take_along_axis(by_cost, ranks, axis=1).ravel()] = np.arange(steps * world_size)
    places = place_of[packs]
    counts = np.bincount(places, minlength=steps * world_size)
    return window[np.argsort(places, kind="stable")], counts
