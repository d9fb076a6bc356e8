"""One tokenised training sample, and what "supervised" means for it.

For an answer that covers tokens a..b (both included) serving drafts from rows a-1..b-2. `answer_remaining`
counts, at every row t, the assistant tokens from t+1 on within that turn, so that row t is supervised at
training-time-test step k exactly when `answer_remaining[t] >= k + 2`:

    token              u  u  u  A  A  A  A  e        (an answer of 4 tokens at 3..6, then something else)
    row t              0  1  2  3  4  5  6  7
    answer_remaining   0  0  4  3  2  1  0  0
    supervised at k=0        x  x  x
    supervised at k=1        x  x
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids of one document with its supervision.

    input_ids: int32 `[L]`; answer_remaining: int32 `[L]`; source: "file:line", for messages;
    num_cut_tokens: tokens that truncation removed.
    """

    input_ids: IntArray
    answer_remaining: IntArray
    source: str
    num_cut_tokens: int = 0

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_supervised_rows(self) -> int:
        """Rows supervised at step 0."""
        return int((self.answer_remaining >= 2).sum())


def answer_remaining_from_spans(length: int, spans: list[tuple[int, int]]) -> IntArray:
    """Count the assistant tokens after each row, turn by turn.

    spans: half-open token ranges `[start, stop)`, one a turn, in order and without overlap.
    """
    remaining = np.zeros(length, dtype=np.int32)
    for start, stop in spans:
        first_row = max(start - 1, 0)
        remaining[first_row:stop] = np.arange(stop - 1 - first_row, -1, -1, dtype=np.int32)
    return remaining


def spans_from_mask(loss_mask: npt.ArrayLike) -> list[tuple[int, int]]:
    """The runs of ones of a 0/1 mask as half-open ranges. Adjacent turns cannot be told apart in a mask."""
    padded = np.concatenate([[0], np.asarray(loss_mask, dtype=np.int8), [0]])
    edges = np.flatnonzero(np.diff(padded))
    return [(int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def supervised_rows(samples: Sequence[Sample]) -> npt.NDArray[np.int64]:
    """Rows supervised at TTT step 0 of each sample, int64 `[N]`."""
    return np.array([sample.num_supervised_rows for sample in samples], dtype=np.int64)


def truncate(sample: Sample, max_tokens: int) -> Sample:
    """Keep the first `max_tokens` tokens. The cut is no end of turn: rows near it just have fewer supervised
    steps.
    """
    if len(sample) <= max_tokens:
        return sample
    rows_to_the_cut = np.arange(max_tokens - 1, -1, -1, dtype=np.int32)
    return replace(
        sample,
        input_ids=sample.input_ids[:max_tokens],
        answer_remaining=np.minimum(sample.answer_remaining[:max_tokens], rows_to_the_cut),
        num_cut_tokens=sample.num_cut_tokens + len(sample) - max_tokens,
    )
