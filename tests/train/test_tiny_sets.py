"""U19: fewer samples than ranks, and samples of very unlike lengths, as every rank plans them by itself."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from eagle_train.config import TrainConfig
from eagle_train.data.collator import BucketingCollator
from eagle_train.data.loader import PlannedBatches
from eagle_train.data.samples import Sample, answer_remaining_from_spans
from eagle_train.train.compile import shape_of
from eagle_train.train.evaluate import validation_plan
from eagle_train.train.schedule import Position, Schedule

EPOCHS = 3


def samples_of(lengths: list[int], answer: int = 2) -> list[Sample]:
    return [
        Sample(
            np.full(length, 5, np.int32),
            answer_remaining_from_spans(length, [(max(length - answer, 0), length)]),
            str(number),
        )
        for number, length in enumerate(lengths)
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulation_steps": 3},
        {"tokens_per_step": 100_000},
        {"packing": "none"},
        {"packing": "none", "batch_size": 1, "accumulation_steps": 2},
        {"packing": "none", "padding_free": False, "batch_size": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("lengths", "world_size"), [([9], 2), ([9, 30, 4], 4), ([4000, *[2] * 6], 3), ([4000, *[2] * 6], 8)]
)
def test_u19_every_rank_takes_equal_steps_and_each_sample_comes_once(
    lengths: list[int], world_size: int, changes: dict[str, Any]
) -> None:
    samples = samples_of(lengths)
    supervised = np.array([sample.num_supervised_rows for sample in samples])
    config = TrainConfig(training_seq_len=4096, bucket_granularity=32, num_epochs=EPOCHS, **changes)
    per_rank, totals, planned = [], set(), []
    for rank in range(world_size):
        schedule = Schedule(lengths, config, world_size, supervised)
        schedule.choose_supervised_sizes()
        totals.add(steps := schedule.total_steps(0, Position()))
        per_rank.append(list(schedule.windows(samples, rank, Position(), steps)))
        planned.append(schedule.shapes(Position(), 0, steps))
    assert len(totals) == 1
    assert len(per_rank[0]) == totals.pop() >= EPOCHS
    seen = Counter(
        (window.position.epoch, source)
        for windows in per_rank
        for window in windows
        for batch in window.batches
        for source in batch.sources
    )
    assert seen == {(epoch, str(number)): 1 for epoch in range(EPOCHS) for number in range(len(lengths))}
    for step in zip(*per_rank, strict=True):
        assert len({window.position for window in step}) == 1
        for batches in zip(*(window.batches for window in step), strict=True):
            assert len({(batch.bucket_len, batch.supervised_len) for batch in batches}) == 1
            assert any(batch.num_tokens for batch in batches), "a step of placeholders alone"
            assert {shape_of(batch) for batch in batches} <= planned[0], "a shape that no warm-up knows"


@pytest.mark.parametrize("padding_free", [True, False])
def test_u19_four_validation_rows_on_three_ranks(padding_free: bool) -> None:
    samples = samples_of([50, 3, 20, 61], answer=3)
    options: dict[str, Any] = {
        "training_seq_len": 64, "bucket_granularity": 32, "padding_free": padding_free, "batch_size": 1
    }  # fmt: skip
    plan = validation_plan(samples, world_size=3, **options)
    collator = BucketingCollator(32, padding_free)
    of_ranks = [
        [batches[step] for step in range(len(batches))]
        for batches in (PlannedBatches(samples, plan, collator, rank) for rank in range(3))
    ]
    assert len({len(batches) for batches in of_ranks}) == 1
    assert sorted(s for batches in of_ranks for b in batches for s in b.sources) == ["0", "1", "2", "3"]
    for step in zip(*of_ranks, strict=True):
        assert len({batch.bucket_len for batch in step}) == 1
