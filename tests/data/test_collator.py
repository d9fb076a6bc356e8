"""Samples laid flat or in rows, lengths rounded up, and nothing supervised that is not an answer."""

import doctest
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

import eagle_train.data.collator
from eagle_train import BucketingCollator
from eagle_train.batch import PackedBatch
from eagle_train.data.collator import as_sample, round_up
from eagle_train.data.samples import Sample
from eagle_train.errors import InputError
from tests.documents import Spans, documents_of, supervised_pairs

A = {"input_ids": [11, 12, 13, 14, 15, 16], "loss_mask": [0, 1, 1, 1, 0, 0]}
B = {"input_ids": [21, 22, 23, 24, 25], "loss_mask": [1, 1, 1, 1, 0], "source": "b.jsonl:7"}
SHAPES: list[tuple[int, Spans]] = [
    (23, [(4, 9), (12, 20)]),
    (1, []),
    (37, [(3, 4), (8, 10), (10, 22), (30, 37)]),
    (1, [(0, 1)]),
    (19, [(0, 6), (9, 19)]),
]


def test_the_docstring_example_runs() -> None:
    results = doctest.testmod(eagle_train.data.collator)
    assert (results.attempted, results.failed) == (6, 0)


def test_the_flat_layout_is_the_one_drawn_in_batch_py() -> None:
    batch = BucketingCollator(8, pad_token_id=9)([A, B])
    assert batch.input_ids.tolist() == [11, 12, 13, 14, 15, 16, 21, 22, 23, 24, 25, 9, 9, 9, 9, 9]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 0, 0, 0, 0, 0]
    assert batch.answer_remaining.tolist() == [3, 2, 1, 0, 0, 0, 3, 2, 1, 0, 0, 0, 0, 0, 0, 0]
    assert batch.cu_seqlens.tolist() == [0, 6, 11, 16]
    assert batch.offsets == (0, 6, 11, 16)
    assert (batch.max_seqlen, batch.num_tokens, batch.num_rows) == (6, 11, 1)
    assert (batch.num_slots, batch.bucket_len) == (16, 16)
    assert batch.sources == ("row 0", "b.jsonl:7")


def test_the_padded_layout_gives_each_sample_a_row_and_its_own_padding() -> None:
    batch = BucketingCollator(4, padding_free=False, pad_token_id=9)([A, B])
    assert batch.input_ids.tolist() == [11, 12, 13, 14, 15, 16, 9, 9, 21, 22, 23, 24, 25, 9, 9, 9]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 0, 1, 2, 3, 4, 0, 0, 0]
    assert batch.answer_remaining.tolist() == [3, 2, 1, 0, 0, 0, 0, 0, 3, 2, 1, 0, 0, 0, 0, 0]
    assert batch.offsets == (0, 6, 8, 13, 16)
    assert (batch.max_seqlen, batch.num_tokens, batch.num_rows, batch.bucket_len) == (6, 11, 2, 8)


def test_a_sample_that_fills_its_bucket_has_no_padding() -> None:
    flat, padded = (BucketingCollator(11, padding_free)([A, B]) for padding_free in (True, False))
    assert flat.offsets == (0, 6, 11)
    assert padded.offsets == (0, 6, 11, 16, 22)
    exact = BucketingCollator(6, padding_free=False)([A, A])
    assert exact.offsets == (0, 6, 12)


@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize("granularity", [1, 5, 16, 64])
def test_lengths_are_the_smallest_multiples_and_documents_tile_the_slots(
    granularity: int, padding_free: bool
) -> None:
    samples = documents_of(*SHAPES)
    batch = BucketingCollator(granularity, padding_free)(samples)
    real = sum(map(len, samples)) if padding_free else max(map(len, samples))
    assert batch.bucket_len % granularity == 0
    assert real <= batch.bucket_len < real + granularity
    assert batch.num_rows == (1 if padding_free else len(samples))
    lengths = np.diff(batch.offsets)
    assert (lengths > 0).all()
    assert (batch.offsets[0], batch.offsets[-1]) == (0, batch.num_slots)
    assert batch.max_seqlen == max(lengths)
    assert batch.cu_seqlens.tolist() == list(batch.offsets)
    expected, start = np.zeros(batch.num_slots, dtype=np.int64), 0
    for index, sample in enumerate(samples):
        start = start if padding_free else index * batch.bucket_len
        expected[start : start + len(sample)] = np.arange(len(sample))
        start += len(sample)
    assert batch.position_ids.tolist() == expected.tolist(), "restarting, and 0 on padding"
    assert batch.num_tokens == sum(map(len, samples))


@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize("ttt_steps", [1, 3, 7, 20])
def test_supervised_counts_equal_brute_force(ttt_steps: int, padding_free: bool) -> None:
    pairs = [step for length, spans in SHAPES for _, step in supervised_pairs(length, spans, ttt_steps)]
    batch = BucketingCollator(16, padding_free)(documents_of(*SHAPES))
    counts = batch.supervised_counts(ttt_steps)
    assert counts == [pairs.count(step) for step in range(ttt_steps)]
    assert counts[0] > 20
    assert (counts[-1] == 0) == (ttt_steps == 20)


@pytest.mark.parametrize("padding_free", [True, False])
def test_no_feature_gives_one_unsupervised_bucket(padding_free: bool) -> None:
    batch = BucketingCollator(8, padding_free)([])
    assert (batch.num_slots, batch.num_tokens, batch.num_rows) == (8, 0, 1)
    assert batch.offsets == (0, 8)
    assert batch.sources == ()
    assert batch.supervised_counts(3) == [0, 0, 0]


def test_a_plain_dataloader_yields_packed_batches_that_hold_every_row() -> None:
    rows = [A, B] * 5
    loader: DataLoader[Any] = DataLoader(
        rows, batch_size=3, collate_fn=BucketingCollator(bucket_granularity=16)
    )  # type: ignore[arg-type]
    batches = list(loader)
    assert all(isinstance(batch, PackedBatch) for batch in batches)
    assert [len(batch.sources) for batch in batches] == [3, 3, 3, 1]
    assert sum(batch.num_tokens for batch in batches) == 55
    assert [batch.num_slots for batch in batches] == [32, 16, 32, 16]


def test_worker_processes_can_carry_the_collator() -> None:
    loader: DataLoader[Any] = DataLoader(
        [A, B], batch_size=2, collate_fn=BucketingCollator(16), num_workers=1
    )  # type: ignore[arg-type]
    (batch,) = list(loader)
    assert batch.offsets == (0, 6, 11, 16)


@pytest.mark.parametrize(
    ("feature", "words"),
    [
        ({"input_ids": [1, 2]}, r"feature 1 has the keys \['input_ids'\].*loss_mask"),
        ({"messages": []}, r"feature 1 has the keys \['messages'\].*load_samples"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, r"feature 1 .*\(2,\).*\(1,\)"),
        ({"input_ids": [], "loss_mask": []}, "feature 1 .*not empty"),
        ({"input_ids": [[1, 2]], "loss_mask": [[0, 1]]}, "feature 1 .*one-dimensional"),
    ],
)
def test_a_faulty_feature_is_named_with_its_place_and_the_remedy(feature: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        BucketingCollator(8)([A, feature])


def test_a_granularity_below_one_is_refused() -> None:
    with pytest.raises(InputError, match="bucket_granularity is 0"):
        BucketingCollator(0)


def test_a_sample_passes_untouched_and_a_mapping_may_hold_arrays() -> None:
    (sample,) = documents_of((9, [(3, 7)]))
    assert as_sample(sample, 0) is sample
    made = as_sample({"input_ids": np.arange(4), "loss_mask": np.array([False, True, True, True])}, 5)
    assert isinstance(made, Sample)
    assert made.answer_remaining.tolist() == [3, 2, 1, 0]
    assert made.source == "row 5"


def test_rounding_up_gives_at_least_one_granule() -> None:
    assert [round_up(length, 8) for length in (0, 1, 8, 9, 16)] == [8, 8, 8, 16, 16]
