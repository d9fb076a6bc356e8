"""Plans: every sample exactly once, full, even over the ranks, pure; the baselines; the figures of both."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations, product

import numpy as np
import numpy.typing as npt
import pytest

from eagle_train.data.packing import (
    Plan,
    assemble,
    choose_sizes,
    cost,
    plan_batches,
    plan_multipack,
    shuffled,
    supervised_buckets,
    supervised_counts,
)
from eagle_train.data.packing_baselines import (
    first_fit,
    least_loaded,
    plan_multipack_v1,
    plan_multipack_v2,
    plan_next_fit,
)
from eagle_train.data.plan_figures import PlanFigures, plan_figures, step_imbalance

Ints = npt.NDArray[np.int64]
Planner = Callable[..., Plan]

U18_PACKS = {8192: 1502, 9216: 1474, 16384: 793, 17408: 740}  # of plain best-fit-decreasing
WORLD_SIZES = (1, 2, 3, 7, 8, 64)
CAPACITY = 1000
MIXES: dict[str, Callable[[int], Ints]] = {
    "uniform": lambda count: np.random.default_rng(1).integers(1, CAPACITY + 1, count),
    "lognormal": lambda count: clipped_lognormal(100, 1.0, CAPACITY, count, seed=2),
    "equal": lambda count: np.full(count, 6 * CAPACITY // 10),
    "one_huge": lambda count: np.where(np.arange(count) == count // 2, CAPACITY, 2),
    "full": lambda count: np.full(count, CAPACITY),
}
# The length sets of the benchmark (scripts/bench_plan.py): median, sigma, longest, samples; then capacity.
SETS = {
    "A": ((399, 0.90, 4096, 200_000), 8192),
    "B": ((932, 0.90, 4096, 120_000), 8192),
    "C": ((715, 1.35, 50_000, 60_000), 52_224),
}
BASELINES: dict[str, Planner] = {"v1": plan_multipack_v1, "v2": plan_multipack_v2, "next_fit": plan_next_fit}


def clipped_lognormal(median: float, sigma: float, longest: int, count: int, seed: int = 0) -> Ints:
    normal = np.random.default_rng(seed).normal(np.log(median), sigma, count)
    return np.rint(np.exp(normal)).clip(1, longest).astype(np.int64)


@cache
def length_set(name: str) -> Ints:
    return clipped_lognormal(*SETS[name][0])


@cache
def set_plan(name: str, world_size: int) -> Plan:
    return plan_multipack(length_set(name), SETS[name][1], world_size=world_size, granularity=1024)


def set_figures(name: str, world_size: int) -> PlanFigures:
    return plan_figures(set_plan(name, world_size), length_set(name))


def packs_of(plan: Plan) -> list[list[list[int]]]:
    return [[plan.pack(step, rank) for rank in range(plan.world_size)] for step in range(plan.num_steps)]


def lengths_of(plan: Plan, lengths: Sequence[int] | Ints) -> list[list[list[int]]]:
    return [[[int(lengths[index]) for index in pack] for pack in step] for step in packs_of(plan)]


def to_be_shuffled(*in_order: int) -> Ints:
    """Lengths that the shuffle of seed 0, epoch 0 brings into this order."""
    lengths = np.zeros(len(in_order), dtype=np.int64)
    lengths[shuffled(len(in_order), 0, 0)] = in_order
    return lengths


def assert_sound(plan: Plan, lengths: Sequence[int] | Ints, capacity: int, granularity: int = 1) -> None:
    """All but completeness: samples at most once, room for them, one bucket a step, no gap before the end."""
    lengths = np.asarray(lengths, dtype=np.int64)
    assert len(np.unique(plan.samples)) == len(plan.samples) == plan.offsets[-1]
    assert plan.offsets[0] == 0
    assert len(plan.offsets) == plan.num_steps * plan.world_size + 1
    packs = packs_of(plan)
    tokens = np.array([[lengths[pack].sum() for pack in step] for step in packs]).reshape(-1, plan.world_size)
    assert tokens.max(initial=0) <= capacity
    room = plan.bucket_lens - tokens.max(axis=1, initial=1)
    assert ((room >= 0) & (room < granularity)).all()
    assert not (plan.bucket_lens % granularity).any()
    assert (tokens[:-1] > 0).all(), "an empty pack before the last step"
    assert tokens.sum(axis=1).all(), "an empty step"


def assert_complete(plan: Plan, lengths: Sequence[int] | Ints, capacity: int, granularity: int = 1) -> None:
    assert_sound(plan, lengths, capacity, granularity)
    assert np.array_equal(np.sort(plan.samples), np.arange(len(lengths)))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_sample_is_in_exactly_one_pack(world_size: int, mix: str) -> None:
    for count in (0, 1, 2, 3, 7, 200, 20_000):
        lengths = MIXES[mix](count)
        plan = plan_multipack(lengths, CAPACITY, world_size=world_size, granularity=64, seed=count, epoch=1)
        assert_complete(plan, lengths, CAPACITY, granularity=64)
        assert (plan.num_steps > 0) == (count > 0)
        assert plan.num_steps <= 2 * lengths.sum() / (world_size * CAPACITY) + 1


def test_u19_tiny_sets_are_spread_over_the_ranks() -> None:
    lengths = [2, 2, 2, 4000, 2, 2, 2]
    (step,) = lengths_of(plan_multipack(lengths, 4096, world_size=3), lengths)
    assert sorted(step) == [[2, 2, 2], [2, 2, 2], [4000]]
    few = plan_multipack([5, 6, 7], 8, world_size=4, granularity=8)
    assert_complete(few, [5, 6, 7], 8, granularity=8)
    assert few.bucket_lens.tolist() == [8]


@pytest.mark.parametrize("capacity", [2, 3, 64, 100, 4096])
def test_u18_lengths_at_the_edge_of_the_capacity_fit_untouched(capacity: int) -> None:
    lengths = [capacity, capacity, capacity - 1, 1, 1]
    plan = plan_multipack(lengths, capacity)
    assert_complete(plan, lengths, capacity)
    assert sorted(sum(pack) for (pack,) in lengths_of(plan, lengths)) == [1, capacity, capacity, capacity]


@pytest.mark.parametrize("capacity", U18_PACKS)
@pytest.mark.parametrize("epoch", range(3))
def test_u18_packs_are_within_a_percent_of_best_fit_decreasing(capacity: int, epoch: int) -> None:
    lengths = np.random.default_rng(0).normal(4096, 512, 3000).round().clip(100, 8192).astype(np.int64)
    plan = plan_multipack(lengths, capacity, epoch=epoch)
    assert_complete(plan, lengths, capacity)
    assert plan.num_steps <= 1.01 * U18_PACKS[capacity]


def test_a_sample_above_the_capacity_or_without_a_token_is_the_callers_fault() -> None:
    with pytest.raises(AssertionError, match="sample 1 has 9 tokens, capacity is 8"):
        plan_multipack([3, 9], 8)
    with pytest.raises(AssertionError, match="no token"):
        plan_multipack([3, 0], 8)
    for planner in BASELINES.values():
        with pytest.raises(AssertionError, match="9 tokens, capacity is 8"):
            planner([3, 9], 8)


def test_a_plan_depends_on_its_arguments_and_on_nothing_else() -> None:
    lengths = clipped_lognormal(100, 1.0, CAPACITY, 300, seed=3)
    digests = set()
    for seed, epoch in product((0, 1, 2**40), (0, 1, 2)):
        plan = plan_multipack(lengths, CAPACITY, world_size=2, seed=seed, epoch=epoch)
        again = plan_multipack(lengths.tolist(), CAPACITY, world_size=2, seed=seed, epoch=epoch)
        assert plan.digest() == again.digest()
        digests.add(plan.digest())
    assert len(digests) == 9


def test_samples_of_equal_length_meet_others_in_the_next_epoch() -> None:
    epochs = [packs_of(plan_multipack([4] * 40, 16, epoch=epoch)) for epoch in range(2)]
    assert [len(packs) for packs in epochs] == [10, 10]
    assert len({frozenset(pack) for packs in epochs for (pack,) in packs}) > 10


def test_packs_do_not_come_in_order_of_length() -> None:
    lengths = list(range(51, 100))  # one a pack
    order = [length for ((length,),) in lengths_of(plan_multipack(lengths, 100), lengths)]
    assert sorted(order) == lengths
    assert order not in (lengths, lengths[::-1])


def test_a_plan_is_the_same_on_every_machine() -> None:
    """Pinned: a resumed run makes its plan anew, perhaps under another numpy."""
    assert shuffled(10, 0, 0).tolist() == [4, 8, 0, 1, 7, 6, 2, 5, 3, 9]
    lengths = [1 + 37 * i % 101 for i in range(500)]
    plan = plan_multipack(lengths, 256, world_size=4, granularity=64, seed=5, epoch=2)
    assert plan.digest() == "41d0da08b0db947d"


@pytest.mark.parametrize("world_size", [1, 8, 64])
@pytest.mark.parametrize("name", SETS)
def test_plans_of_the_length_sets_are_full_even_and_of_few_shapes(name: str, world_size: int) -> None:
    figures = set_figures(name, world_size)
    capacity = SETS[name][1]
    fewest_steps = -(-figures.tokens // (world_size * capacity))
    in_slots, in_capacity = figures.fill, figures.tokens / (figures.num_steps * world_size * capacity)
    assert in_slots >= 0.995
    # On 64 ranks the last step of C cannot be full: whole steps are the bound.
    assert in_capacity >= min(0.995, figures.tokens / (fewest_steps * world_size * capacity) - 0.005)
    assert figures.utilisation >= (0.95 if name == "C" else 0.99)
    assert figures.imbalance_cost <= (1.03 if name == "C" else 1.01)
    assert len(figures.shapes) <= 3
    assert np.array_equal(np.sort(set_plan(name, world_size).samples), np.arange(SETS[name][0][3]))


@pytest.mark.parametrize("name", SETS)
def test_ours_beats_the_baselines_in_the_cost_model(name: str) -> None:
    for planner in BASELINES.values():
        plan = planner(length_set(name), SETS[name][1], world_size=8, granularity=1024)
        figures = plan_figures(plan, length_set(name))
        assert set_figures(name, 8).fill > figures.fill
        assert set_figures(name, 8).utilisation > figures.utilisation + 0.02


@pytest.mark.parametrize("name", SETS)
def test_no_rank_is_always_the_heaviest(name: str) -> None:
    plan, lengths = set_plan(name, 8), length_set(name)
    costs = np.array([[cost(lengths[pack]).sum() for pack in step] for step in packs_of(plan)])
    times_heaviest = np.bincount(costs.argmax(axis=1), minlength=8)
    assert times_heaviest.max() < 1.5 * plan.num_steps / 8
    assert costs.sum(axis=0).max() < 1.002 * costs.sum(axis=0).mean()


def test_unpacked_batches_are_shuffled_and_the_last_step_is_spread() -> None:
    lengths = np.arange(1, 24)
    plans = [plan_batches(lengths, 4, epoch=epoch) for epoch in range(2)]
    for plan in plans:
        assert [len(pack) for (pack,) in packs_of(plan)] == [4, 4, 4, 4, 4, 3]
        assert_complete(plan, lengths, capacity=4 * 23)
    assert plans[0].digest() == plan_batches(lengths, 4).digest() != plans[1].digest()
    for count, last in ((23, [4, 4, 3]), (17, [2, 2, 1]), (13, [1, 0, 0])):
        shared = packs_of(plan_batches(lengths[:count], 4, world_size=3))
        assert [[len(pack) for pack in step] for step in shared] == [[4, 4, 4], last]
    assert plan_batches([], 4, world_size=3).num_steps == 0


def test_unpacked_buckets_hold_the_fullest_rank_flat_or_its_longest_sample_padded() -> None:
    lengths = to_be_shuffled(3, 9, 20, 1, 5, 5, 4, 2, 17)
    flat = plan_batches(lengths, 2, world_size=2, granularity=8)
    assert lengths_of(flat, lengths) == [[[3, 9], [20, 1]], [[5, 5], [4, 2]], [[17], []]]
    assert flat.bucket_lens.tolist() == [24, 16, 24]
    padded = plan_batches(lengths, 2, world_size=2, granularity=8, padding_free=False)
    assert np.array_equal(padded.samples, flat.samples)
    assert padded.bucket_lens.tolist() == [24, 8, 24]


def test_v1_takes_what_first_fit_decreasing_places_and_v2_what_the_least_loaded_rank_holds() -> None:
    lengths = to_be_shuffled(6, 5, 4, 3, 2, 1)
    assert first_fit([6, 5, 4, 3, 2], 2, 10) == [0, 1, 0, 1, 1]
    assert least_loaded([6, 5, 4, 3], 2, 10) == [0, 1, 1, 0]
    assert first_fit([6, 5], 1, 10) is least_loaded([6, 5, 4, 3, 2], 2, 10) is None
    v1 = plan_multipack_v1(lengths, 10, world_size=2)
    assert lengths_of(v1, lengths) == [[[6, 4], [5, 3, 2]]]
    assert plan_figures(v1, lengths).dropped_tokens == 1
    v2 = plan_multipack_v2(lengths, 10, world_size=2)
    assert lengths_of(v2, lengths) == [[[6, 3], [5, 4]], [[2], [1]]]
    assert plan_figures(v2, lengths).dropped_samples == 0


def test_v1_drops_a_last_group_that_leaves_a_rank_empty_and_v2_only_fewer_samples_than_ranks() -> None:
    lengths = to_be_shuffled(9, 8, 3, 2, 1)
    assert lengths_of(plan_multipack_v1(lengths, 10, world_size=2), lengths) == [[[9], [8]]]
    v2 = plan_multipack_v2(lengths, 10, world_size=2)
    assert lengths_of(v2, lengths) == [[[9], [8]], [[3], [2, 1]]]
    assert plan_multipack_v2(lengths, 10, world_size=6).num_steps == 0


def test_next_fit_closes_a_pack_when_the_next_sample_does_not_fit() -> None:
    lengths = to_be_shuffled(6, 3, 2, 9, 1, 5)
    plan = plan_next_fit(lengths, 10, world_size=3)
    assert lengths_of(plan, lengths) == [[[6, 3], [2], [9, 1]], [[5], [], []]]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_plans_a_sample_once_or_drops_it(name: str, world_size: int) -> None:
    for mix, make in MIXES.items():
        for count in (0, 1, 7, 200, 2000):
            lengths = make(count)
            plan = BASELINES[name](lengths, CAPACITY, world_size=world_size, granularity=64)
            assert_sound(plan, lengths, CAPACITY, granularity=64)
            figures = plan_figures(plan, lengths)
            assert len(plan.samples) + figures.dropped_samples == count
            assert figures.tokens + figures.dropped_tokens == lengths.sum()
            assert figures.dropped_samples <= {"v1": count, "v2": world_size - 1, "next_fit": 0}[name], mix


def test_figures_of_flat_rows() -> None:
    lengths = np.array([6, 5, 16, 3, 9])
    plan = assemble(np.arange(4), [2, 1, 1, 0], lengths, world_size=2, granularity=8)
    figures = plan_figures(plan, lengths)
    costs = cost(lengths)
    assert (figures.num_steps, figures.num_packs, figures.tokens, figures.slots) == (2, 3, 30, 48)
    assert (figures.dropped_samples, figures.dropped_tokens) == (1, 9)
    assert figures.fill == 30 / 48
    assert figures.imbalance_tokens == pytest.approx((16 + 3) / (27 / 2 + 3 / 2))
    assert figures.imbalance_cost == pytest.approx((costs[2] + costs[3]) / (costs[:4].sum() / 2))
    assert figures.utilisation == pytest.approx(costs[:4].sum() / (2 * (costs[2] + costs[3] + 5)))
    assert figures.shapes == {"16": 1, "8": 1}
    assert step_imbalance(plan, lengths).tolist() == pytest.approx([16 / 13.5, 2.0])


def test_figures_of_padded_rows() -> None:
    lengths = np.array([6, 5, 16, 3])
    plan = assemble(np.arange(4), [2, 1, 1, 0], lengths, world_size=2, granularity=8, padding_free=False)
    figures = plan_figures(plan, lengths, padding_free=False)
    row_16, row_8 = cost(np.array([16, 8]))
    assert (figures.tokens, figures.slots) == (30, 3 * 16 + 2 * 8)
    assert figures.shapes == {"2x16": 1, "1x8": 1}
    assert figures.utilisation == pytest.approx(cost(lengths).sum() / (2 * (2 * row_16 + row_8)))


def test_figures_of_one_rank_and_of_no_sample() -> None:
    assert step_imbalance(plan_multipack([3, 5, 7], 8), [3, 5, 7]).tolist() == [1.0, 1.0]
    figures = plan_figures(plan_multipack([], 8, world_size=3), [])
    assert (figures.num_steps, figures.slots, figures.fill, figures.imbalance_tokens) == (0, 0, 0.0, 1.0)


@pytest.mark.parametrize("seed", range(4))
def test_sizes_hold_all_counts_at_the_least_sum(seed: int) -> None:
    """Against all choices of at most three sizes."""
    counts = np.random.default_rng(seed).integers(1, 600, 40)
    rounded = -(-counts // 64) * 64

    def rows(sizes: Sequence[int]) -> int:
        return sum(min(size for size in sizes if size >= count) for count in counts)

    sizes = choose_sizes(counts)
    values = sorted(set(rounded.tolist()))
    choices = [c for n in (1, 2, 3) for c in combinations(values, n) if c[-1] == values[-1]]
    assert rows(sizes) == min(rows(choice) for choice in choices)
    assert len(sizes) <= 3
    assert choose_sizes(np.array([5, 7])) == [64]
    assert choose_sizes(np.array([], dtype=np.int64)) == []


def test_supervised_rows_are_rounded_up_to_a_size_or_to_the_row_on_all_ranks() -> None:
    plan = plan_batches([10, 20, 30, 40, 50], 1, world_size=2, granularity=64)
    rows = np.array([9, 19, 29, 39, 49])
    most = supervised_counts(plan, rows)
    assert most.tolist() == [max(int(rows[pack].sum()) for pack in step) for step in packs_of(plan)]
    assert supervised_buckets(plan, rows, [49]).tolist() == [49] * 3
    assert supervised_buckets(plan, rows, [20]).tolist() == [20 if count <= 20 else 64 for count in most]
    assert supervised_buckets(plan, rows, [500]).tolist() == [64] * 3
