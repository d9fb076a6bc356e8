"""What a run sees when: geometry of the global batch, windows, resumption under any number of ranks."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from eagle_train.config import TrainConfig
from eagle_train.data.samples import Sample, answer_remaining_from_spans
from eagle_train.errors import InputError
from eagle_train.train.schedule import Position, Schedule, Segment, Window, batch_geometry

RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(3, 60, 300)


def config(**changes: Any) -> TrainConfig:
    return TrainConfig(**({"training_seq_len": 128, "bucket_granularity": 32} | changes))


def sample(index: int, length: int) -> Sample:
    return Sample(
        np.full(length, 5, np.int32), answer_remaining_from_spans(length, [(1, length)]), str(index)
    )


SAMPLES = [sample(index, int(length)) for index, length in enumerate(LENGTHS)]


def windows(schedule: Schedule, rank: int, position: Position, num_steps: int) -> list[Window]:
    return list(schedule.windows(SAMPLES, rank, position, num_steps))


def ids(window: Window) -> list[int]:
    return [int(source) for batch in window.batches for source in batch.sources]


def test_every_rank_and_window_together_hold_each_sample_once() -> None:
    for world_size in (1, 3):
        for accumulation in (1, 4):
            schedule = Schedule(LENGTHS, config(accumulation_steps=accumulation), world_size)
            steps = schedule.total_steps(0, Position())
            per_rank = [windows(schedule, rank, Position(), steps) for rank in range(world_size)]
            assert sorted(i for ws in per_rank for w in ws for i in ids(w)) == list(range(len(LENGTHS)))
            for step in zip(*per_rank, strict=True):
                assert len({tuple(batch.num_slots for batch in w.batches) for w in step}) == 1, "one shape"
            assert all(len(w.batches) == accumulation for w in per_rank[0][:-1])


def test_a_resumed_schedule_gives_the_very_batches_of_the_uninterrupted_one() -> None:
    options = config(accumulation_steps=3)
    whole = Schedule(LENGTHS, options, 2)
    per_epoch = whole.optimizer_steps(whole.plan().num_steps)
    total = 2 * per_epoch + 3
    expected = windows(whole, 1, Position(), total)
    for stop in (1, per_epoch - 1, per_epoch, per_epoch + 2):
        fresh = Schedule(LENGTHS, options, 2)
        rest = windows(fresh, 1, expected[stop - 1].position, total - stop)
        assert [ids(w) for w in rest] == [ids(w) for w in expected[stop:]]
        assert [w.position for w in rest] == [w.position for w in expected[stop:]]


def test_resuming_reads_no_sample_of_the_steps_that_are_done() -> None:
    class Watched(list[Sample]):
        def __getitem__(self, index: Any) -> Any:
            seen[int(index)] += 1
            return super().__getitem__(index)

    seen: Counter[int] = Counter()
    schedule = Schedule(LENGTHS, config(), 1)
    position = windows(schedule, 0, Position(), 20)[-1].position
    list(schedule.windows(Watched(SAMPLES), 0, position, 2))
    plan = schedule.plan()
    assert set(seen) == {index for step in (20, 21) for index in plan.pack(step, 0)}


def run_epoch(sizes: list[tuple[int, int | None]], **changes: Any) -> tuple[list[int], Position]:
    """One epoch under several numbers of ranks in turn: (ranks, optimizer steps; None: to its end)."""
    position, seen = Position(), []
    for world_size, steps in sizes:
        schedule = Schedule(LENGTHS, config(num_epochs=1, **changes), world_size)
        count = schedule.total_steps(0, position) if steps is None else steps
        per_rank = [windows(schedule, rank, position, count) for rank in range(world_size)]
        seen += [i for ws in per_rank for w in ws for i in ids(w)]
        position = per_rank[0][-1].position
    return seen, position


@pytest.mark.parametrize("changes", [{}, {"accumulation_steps": 2}, {"packing": "none", "batch_size": 3}])
def test_another_number_of_ranks_replans_what_is_left_and_keeps_exactly_once(changes: dict[str, Any]) -> None:
    seen, position = run_epoch([(2, 5), (3, 4), (1, 6), (2, None)], **changes)
    assert sorted(seen) == list(range(len(LENGTHS)))
    assert position.epoch == 0
    assert [segment.world_size for segment in position.segments] == [2, 3, 1, 2]


def test_going_back_to_the_same_ranks_continues_their_segment() -> None:
    _, position = run_epoch([(2, 5), (2, 3)])
    assert position == Position(0, (Segment(2, 128, 8),))


def test_the_digest_of_a_position_changes_with_data_seed_and_ranks() -> None:
    position = Position(0, (Segment(2, 128, 4),))
    digest = Schedule(LENGTHS, config(), 2).digest(position)
    assert digest == Schedule(LENGTHS, config(), 1).digest(position), "of the segment's ranks, not of today's"
    others = [
        Schedule(LENGTHS, config(seed=1), 2).digest(position),
        Schedule(LENGTHS[:-1], config(), 2).digest(position),
        Schedule(LENGTHS, config(), 2).digest(Position(1, position.segments)),
        Schedule(LENGTHS, config(), 2).digest(Position(0, (Segment(3, 128, 4),))),
    ]
    assert len({digest, *others}) == 5


@pytest.mark.parametrize(
    ("changes", "world_size", "capacity", "accumulation"),
    [
        ({}, 1, 128, 1),
        ({"accumulation_steps": 3}, 2, 128, 3),
        ({"tokens_per_step": 512}, 1, 128, 4),
        ({"tokens_per_step": 512}, 2, 128, 2),
        ({"tokens_per_step": 512}, 8, 64, 1),
        ({"tokens_per_step": 192}, 1, 96, 2),
        ({"tokens_per_step": 40}, 1, 64, 1),  # no less than the longest sample
        ({"tokens_per_step": 500}, 1, 128, 4),
        ({"tokens_per_row": 64, "tokens_per_step": 512}, 1, 64, 8),
        ({"effective_batch_size": 16}, 1, 128, 4),  # 16 samples of mean 31 are about 500 tokens
    ],
)
def test_the_global_batch_in_rows_and_micro_batches(
    changes: dict[str, Any], world_size: int, capacity: int, accumulation: int
) -> None:
    geometry = batch_geometry(LENGTHS, config(**changes), world_size)
    assert (geometry.capacity, geometry.accumulation_steps) == (capacity, accumulation)
    named = [name for name in ("tokens_per_step", "effective_batch_size") if name in changes]
    for name in named:
        slots = capacity * world_size * accumulation
        assert geometry.translation.startswith(f"--{name} {changes[name]:,} -> ")
        assert f"= {slots:,} slots" in geometry.translation
    assert bool(geometry.translation) == bool(named)


def test_an_unpacked_global_batch_is_a_number_of_samples() -> None:
    geometry = batch_geometry(
        LENGTHS, config(packing="none", batch_size=4, effective_batch_size=48), world_size=2
    )
    assert geometry.accumulation_steps == 6
    assert "= 48 samples" in geometry.translation
    tokens = batch_geometry(LENGTHS, config(packing="none", batch_size=4, tokens_per_step=1000), 1)
    assert tokens.accumulation_steps == round(1000 / LENGTHS.mean() / 4)


def test_a_planner_that_drops_everything_is_an_error_and_no_endless_epoch() -> None:
    schedule = Schedule(LENGTHS[:3], config(packing="multipack_v2"), 8)
    with pytest.raises(InputError, match=r"drops all 3 samples.*--packing multipack"):
        schedule.plan()
    assert Schedule(LENGTHS[:3], config(), 8).total_steps(0, Position()) == 1


def test_whole_epochs_are_counted_one_by_one() -> None:
    schedule = Schedule(LENGTHS, config(num_epochs=3), 1)
    expected = sum(schedule.plan(epoch).num_steps for epoch in range(3))
    assert schedule.total_steps(0, Position()) == expected
    behind = windows(schedule, 0, Position(), expected)[-1].position
    assert behind.epoch == 2
    assert schedule.total_steps(expected, behind) == expected
