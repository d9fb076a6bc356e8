"""Samples to a PackedBatch whose length is one of few, known values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from eagle_train.batch import PackedBatch
from eagle_train.data.samples import Sample, answer_remaining_from_spans, spans_from_mask
from eagle_train.errors import InputError

# The collator takes its own Sample or the plain mapping that users of a PyTorch DataLoader have at hand.
Feature = Sample | Mapping[str, Any]


def round_up(length: int, granularity: int) -> int:
    """The smallest multiple of `granularity` that holds `length` tokens, and at least one granule."""
    return max(-(-length // granularity), 1) * granularity


@dataclass(frozen=True, slots=True)
class BucketingCollator:
    """Lay samples end to end, or row by row, and round the length up to `bucket_granularity`.

    bucket_granularity: tokens; every batch length is a multiple of it, so that torch.compile meets few
    shapes;
    padding_free: True lays the documents on one flat row and rounds up their sum; False gives each sample a
    row and rounds up the longest (the form for models without document-isolating attention);
    pad_token_id: any valid id; padding is known by position alone and is never supervised.

    Works in a plain PyTorch DataLoader:

    >>> from torch.utils.data import DataLoader
    >>> from eagle_train import BucketingCollator
    >>> rows = [
    ...     {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 1, 1]},
    ...     {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
    ... ]
    >>> loader = DataLoader(rows, batch_size=2, collate_fn=BucketingCollator(bucket_granularity=16))
    >>> batch = next(iter(loader))
    >>> batch.num_slots, batch.num_tokens, batch.offsets
    (16, 8, (0, 5, 8, 16))

    Raises InputError for a feature without `input_ids` and a 0/1 `loss_mask` of equal length.
    """

    bucket_granularity: int = 1024
    padding_free: bool = True
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        if self.bucket_granularity < 1:
            raise InputError(f"bucket_granularity is {self.bucket_granularity}; it must be at least 1 token")

    def __call__(
        self, features: Sequence[Feature], bucket_len: int = 0, supervised_len: int = 0
    ) -> PackedBatch:
        """bucket_len: slots that a row has at least; supervised_len: see `PackedBatch`. With both, ranks with
        unlike packs compute one shape.
        """
        samples = [as_sample(feature, position) for position, feature in enumerate(features)]
        lengths = [len(sample) for sample in samples]
        longest = max(lengths, default=0)
        if self.padding_free:
            num_rows, row_len = 1, round_up(max(sum(lengths), bucket_len), self.bucket_granularity)
            starts = np.cumsum([0, *lengths[:-1]]) if lengths else np.zeros(0, dtype=np.int64)
        else:
            num_rows = max(len(samples), 1)
            row_len = round_up(max(longest, bucket_len), self.bucket_granularity)
            starts = np.arange(len(samples)) * row_len
        batch = self._lay_out(samples, [int(start) for start in starts], num_rows, row_len)
        return replace(batch, supervised_len=supervised_len)

    def _lay_out(self, samples: list[Sample], starts: list[int], num_rows: int, row_len: int) -> PackedBatch:
        num_slots = num_rows * row_len
        input_ids = np.full(num_slots, self.pad_token_id, dtype=np.int64)
        # Zero on padding: its length may exceed the positions that a target knows.
        position_ids = np.zeros(num_slots, dtype=np.int64)
        answer_remaining = np.zeros(num_slots, dtype=np.int32)
        borders = {0, num_slots, *starts}
        for sample, start in zip(samples, starts, strict=True):
            stop = start + len(sample)
            input_ids[start:stop] = sample.input_ids
            position_ids[start:stop] = np.arange(len(sample))
            answer_remaining[start:stop] = sample.answer_remaining
            borders.add(stop)
        offsets = np.array(sorted(borders), dtype=np.int32)
        document_lens = np.diff(offsets)
        return PackedBatch(
            input_ids=torch.from_numpy(input_ids),
            position_ids=torch.from_numpy(position_ids),
            answer_remaining=torch.from_numpy(answer_remaining),
            cu_seqlens=torch.from_numpy(offsets),
            offsets=tuple(int(offset) for offset in offsets),
            max_seqlen=int(document_lens.max()),
            num_tokens=sum(len(sample) for sample in samples),
            num_rows=num_rows,
            sources=tuple(sample.source for sample in samples),
        )


def as_sample(feature: Feature, position: int) -> Sample:
    """A mapping with `input_ids` and a 0/1 `loss_mask` as a Sample; a Sample as it is."""
    if isinstance(feature, Sample):
        return feature
    if not {"input_ids", "loss_mask"} <= set(feature):
        raise InputError(
            f"feature {position} has the keys {sorted(feature)}; a row needs `input_ids` and `loss_mask`, "
            "or use eagle_train.load_samples to make them from conversations"
        )
    try:
        input_ids, loss_mask = np.asarray(feature["input_ids"]), np.asarray(feature["loss_mask"])
    except ValueError as error:
        raise InputError(
            f"feature {position} has ragged input_ids or loss_mask; both must be flat"
        ) from error
    if input_ids.ndim != 1 or input_ids.shape != loss_mask.shape or len(input_ids) == 0:
        raise InputError(
            f"feature {position} has input_ids of shape {input_ids.shape} and loss_mask of shape "
            f"{loss_mask.shape}; both must be one-dimensional, equally long and not empty"
        )
    if input_ids.dtype.kind not in "iu" or input_ids.min() < 0 or input_ids.max() >= 2**31:
        raise InputError(f"feature {position} has input_ids that are no whole numbers from 0 to 2^31 - 1")
    if not np.isin(loss_mask, (0, 1)).all():
        raise InputError(f"feature {position} has a loss_mask that holds something else than 0 and 1")
    return Sample(
        input_ids=input_ids.astype(np.int32),
        answer_remaining=answer_remaining_from_spans(len(input_ids), spans_from_mask(loss_mask)),
        source=str(feature.get("source", f"row {position}")),
    )
