"""Plans: every index exactly once, never above capacity, tight, and a pure function of their arguments."""

from collections.abc import Sequence

import numpy as np
import pytest

from eagle_train.data.packing import Plan, batch_shuffled, fill, pack_best_fit

CAPACITIES = {8192: 1502, 9216: 1474, 16384: 793, 17408: 740}  # packs of plain best-fit-decreasing (U18)


def long_tail() -> list[int]:
    lengths = np.random.default_rng(0).normal(4096, 512, 3000).round().clip(100, 8192)
    return [int(length) for length in lengths]


def assert_sound(plan: Plan, lengths: Sequence[int], capacity: int) -> None:
    assert sorted(index for pack in plan for index in pack) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in pack) <= capacity for pack in plan)


@pytest.mark.parametrize("capacity", [2, 3, 64, 100, 4096])
def test_u18_lengths_at_the_edge_of_the_capacity_fit_untouched(capacity: int) -> None:
    lengths = [capacity, capacity, capacity - 1, 1, 1]
    plan = pack_best_fit(lengths, capacity, seed=0, epoch=0)
    assert_sound(plan, lengths, capacity)
    assert len(plan) == 4
    assert sorted(sum(lengths[i] for i in pack) for pack in plan) == [1, capacity, capacity, capacity]


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_u18_packs_are_within_a_percent_of_best_fit_decreasing(capacity: int) -> None:
    lengths = long_tail()
    plan = pack_best_fit(lengths, capacity, seed=0, epoch=0)
    assert_sound(plan, lengths, capacity)
    assert -(-sum(lengths) // capacity) <= len(plan) <= 1.01 * CAPACITIES[capacity]


def test_a_sample_goes_where_it_leaves_the_least_room() -> None:
    """Longest first, capacity 10: 4 closes the pack of 6, so 3 and 2 close that of 5; two packs do."""
    lengths = [2, 6, 4, 3, 5]
    plan = pack_best_fit(lengths, 10, seed=0, epoch=0)
    assert sorted(sorted(lengths[index] for index in pack) for pack in plan) == [[2, 3, 5], [4, 6]]


def test_a_sample_above_the_capacity_is_the_callers_fault() -> None:
    with pytest.raises(AssertionError, match="sample 1 has 9 tokens, capacity is 8"):
        pack_best_fit([3, 9], 8, seed=0, epoch=0)


def test_a_plan_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    lengths = long_tail()[:200]
    plans = {
        (seed, epoch): pack_best_fit(lengths, 9216, seed=seed, epoch=epoch)
        for seed in (0, 1)
        for epoch in (0, 1, 2)
    }
    for (seed, epoch), plan in plans.items():
        assert plan == pack_best_fit(list(lengths), 9216, seed=seed, epoch=epoch)
    assert len({str(plan) for plan in plans.values()}) == len(plans) == 6


def test_samples_of_equal_length_meet_others_in_the_next_epoch() -> None:
    plans = [pack_best_fit([4] * 40, 16, seed=0, epoch=epoch) for epoch in range(2)]
    packs = [{frozenset(pack) for pack in plan} for plan in plans]
    assert [len(plan) for plan in plans] == [10, 10]
    assert packs[0] != packs[1]


def test_packs_do_not_come_in_order_of_length() -> None:
    lengths = list(range(51, 100))  # one a pack
    longest_first = sorted(lengths, reverse=True)
    order = [lengths[pack[0]] for pack in pack_best_fit(lengths, 100, seed=0, epoch=0)]
    assert sorted(order) == lengths
    assert order not in (longest_first, lengths)


def test_the_number_of_packs_does_not_depend_on_the_shuffle() -> None:
    lengths = [int(length) for length in np.random.default_rng(1).integers(1, 60, 300)]
    counts = {
        len(pack_best_fit(lengths, 64, seed=seed, epoch=epoch)) for seed in range(5) for epoch in range(4)
    }
    assert len(counts) == 1


@pytest.mark.parametrize("seed", range(5))
def test_random_lengths_give_sound_and_tight_plans(seed: int) -> None:
    lengths = [int(length) for length in np.random.default_rng(seed).integers(1, 200, 500)]
    plan = pack_best_fit(lengths, 256, seed=seed, epoch=0)
    assert_sound(plan, lengths, 256)
    assert len(plan) <= 11 / 9 * -(-sum(lengths) // 256) + 1
    loads = sorted(sum(lengths[index] for index in pack) for pack in plan)
    assert loads[0] + loads[1] > 256, "two packs that fit into one were left apart"


def test_one_sample_and_none() -> None:
    assert pack_best_fit([7], 8, seed=0, epoch=0) == [[0]]
    assert pack_best_fit([], 8, seed=0, epoch=0) == []
    assert batch_shuffled(1, 4, seed=0, epoch=0) == [[0]]
    assert batch_shuffled(0, 4, seed=0, epoch=0) == []


def test_unpacked_batches_hold_each_sample_once_in_a_fresh_order_each_epoch() -> None:
    plans = [batch_shuffled(23, 4, seed=0, epoch=epoch) for epoch in range(2)]
    for plan in plans:
        assert [len(batch) for batch in plan] == [4, 4, 4, 4, 4, 3]
        assert sorted(index for batch in plan for index in batch) == list(range(23))
    assert plans[0] == batch_shuffled(23, 4, seed=0, epoch=0)
    assert len({str(plan) for plan in (*plans, batch_shuffled(23, 4, seed=1, epoch=0))}) == 3


def test_fill_is_real_tokens_per_computed_slot() -> None:
    assert fill([6, 5, 16], [[0, 1], [2]], 8) == pytest.approx(27 / 32)
    assert fill([6, 5, 16], [[0, 1], [2]], 1) == 1.0
    assert fill([], [], 8) == 0.0
