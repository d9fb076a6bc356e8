"""Plans as datasets and samplers of a plain PyTorch DataLoader."""

import os
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from eagle_train import BucketingCollator, InputError, MultipackSampler
from eagle_train.data.loader import PlannedBatches, planned_loader
from eagle_train.data.packing import plan_multipack

LENGTHS = [int(length) for length in np.random.default_rng(3).integers(2, 30, 60)]
ROWS = [
    {"input_ids": [i % 7] * n, "loss_mask": [0] + [1] * (n - 1), "source": str(i)}
    for i, n in enumerate(LENGTHS)
]


def sampler(rank: int = 0, world_size: int = 2, **changes: Any) -> MultipackSampler:
    return MultipackSampler(LENGTHS, 32, world_size=world_size, rank=rank, **changes)


def test_ranks_yield_equally_many_packs_that_hold_each_sample_once() -> None:
    per_rank = [list(sampler(rank, 3)) for rank in range(3)]
    assert {len(packs) for packs in per_rank} == {len(sampler(0, 3))}
    assert sorted(index for packs in per_rank for pack in packs for index in pack) == list(range(60))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_plain_data_loader_takes_sampler_and_collator(num_workers: int) -> None:
    batches = sampler(0, 1, granularity=16)
    loader: Any = DataLoader(
        ROWS,
        batch_sampler=batches,
        collate_fn=BucketingCollator(16),
        num_workers=num_workers,  # type: ignore
    )
    seen = []
    for batch, pack in zip(loader, batches, strict=True):
        assert [int(source) for source in batch.sources] == pack
        assert batch.num_tokens <= 32
        assert batch.num_slots in (16, 32)
        seen += pack
    assert sorted(seen) == list(range(60))


def test_epochs_differ_and_come_back() -> None:
    batches = sampler()
    first = list(batches)
    batches.set_epoch(1)
    second = list(batches)
    batches.set_epoch(0)
    assert list(batches) == first != second
    assert list(sampler(seed=1)) != first


def test_a_sampler_goes_on_where_it_was() -> None:
    batches = sampler()
    batches.set_epoch(2)
    expected = list(batches)
    fresh = sampler()
    fresh.load_state_dict(batches.state_dict(step=3))
    assert fresh.epoch == 2
    assert len(fresh) == len(expected) - 3
    assert list(fresh) == expected[3:]
    fresh.set_epoch(3)
    batches.set_epoch(3)
    assert list(fresh) == list(batches), "the next epoch starts at its beginning"


@pytest.mark.parametrize("changes", [{"seed": 1}, {"world_size": 3}, {"granularity": 8}])
def test_a_state_of_another_plan_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="saved plan differs"):
        sampler(**changes).load_state_dict(sampler().state_dict(step=1))


def test_rank_and_world_size_come_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    monkeypatch.setitem(os.environ, "RANK", "1")
    assert list(MultipackSampler(LENGTHS, 32)) == list(sampler(1))


def test_the_usual_loop_over_epochs_goes_on_in_the_middle_and_then_starts_anew() -> None:
    reference = sampler()
    packs = {}
    for epoch in (1, 2):
        reference.set_epoch(epoch)
        packs[epoch] = list(reference)
    reference.set_epoch(1)
    resumed = sampler()
    resumed.load_state_dict(reference.state_dict(step=4))
    seen = []
    for epoch in (1, 2):
        resumed.set_epoch(epoch)
        seen.append(list(resumed))
    assert seen == [packs[1][4:], packs[2]]
    assert list(resumed) == packs[2], "a second pass without set_epoch is whole too"


def test_batches_of_all_ranks_are_in_the_bucket_of_the_step() -> None:
    lengths = [7000] + [20] * 9
    rows = [{"input_ids": [1] * n, "loss_mask": [1] * n} for n in lengths]
    collator = BucketingCollator(1024)
    samplers = [
        MultipackSampler(lengths, 8192, world_size=4, rank=rank, granularity=1024) for rank in range(4)
    ]
    per_rank = [list(each.batches(rows, collator)) for each in samplers]
    for step in zip(*per_rank, strict=True):
        assert {batch.num_slots for batch in step} == {7168}
    assert sum(batch.num_tokens for batches in per_rank for batch in batches) == sum(lengths)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lengths": [5, 0]}, "sample 1 has 0 tokens"),
        ({"lengths": [5.9, 3.9]}, "float64"),
        ({"lengths": [[1, 2]]}, r"shape \(1, 2\)"),
        ({"capacity": 8.5}, "capacity is 8.5"),
        ({"seed": -1}, "seed is -1"),
        ({"granularity": 0}, "granularity is 0"),
        ({"world_size": 0}, "world_size is 0"),
        ({"world_size": 1, "rank": 1}, "give world_size"),
    ],
)
def test_arguments_that_make_no_sense_are_named(arguments: dict[str, Any], words: str) -> None:
    options = {"lengths": [5, 3], "capacity": 8, "world_size": 1, "rank": 0} | arguments
    with pytest.raises(InputError, match=words):
        MultipackSampler(**options)
    good = MultipackSampler([5, 3], 8, world_size=1, rank=0)
    for state in ({}, good.state_dict(99), good.state_dict(-2)):
        with pytest.raises(InputError):
            good.load_state_dict(state)
    with pytest.raises(InputError, match="epoch is -1"):
        good.set_epoch(-1)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(InputError, match=r"sample 1 has 29 tokens.* capacity of 16"):
        MultipackSampler([3, 29], 16, world_size=1, rank=0)
    with pytest.raises(InputError, match="rank is 2 of 2; it must lie between 0 and 1"):
        sampler(rank=2)


def test_all_ranks_of_a_step_compute_one_bucket_even_without_a_sample() -> None:
    lengths = [30, 4, 4, 4, 4]
    plan = plan_multipack(lengths, 32, world_size=4, granularity=16)
    rows = [{"input_ids": [1] * n, "loss_mask": [1] * n} for n in lengths]
    collator = BucketingCollator(16)
    per_rank = [PlannedBatches(rows, plan, collator, rank) for rank in range(4)]
    for step in range(plan.num_steps):
        slots = {batches[step].num_slots for batches in per_rank}
        assert slots == {int(plan.bucket_lens[step])}
    with pytest.raises(IndexError):
        per_rank[0][plan.num_steps]
    few = plan_multipack([5], 32, world_size=3, granularity=16)
    batches = [PlannedBatches(rows[1:2], few, collator, rank)[0] for rank in range(3)]
    assert sorted(batch.num_tokens for batch in batches) == [0, 0, 4]
    assert {batch.num_slots for batch in batches} == {16}


def test_a_loader_starts_anywhere_without_reading_what_lies_before() -> None:
    seen = []

    class Watched(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            seen.append(index)
            return super().__getitem__(index)

    plan = plan_multipack(LENGTHS, 32)
    last = plan.num_steps - 1
    (batch,) = planned_loader(PlannedBatches(Watched(ROWS), plan, BucketingCollator(8)), first_step=last)
    assert seen == plan.pack(last, 0) == [int(source) for source in batch.sources]
