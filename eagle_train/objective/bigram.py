"""The least that a draft head must beat: a drafter that knows only the previous token."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from eagle_train.objective.acceptance import WalkCounts, chain_walk, leading_hits, pool

IntArray = npt.NDArray[np.int32]
TokensAndRemaining = tuple[IntArray, IntArray]  # input_ids `[L]`, answer_remaining `[L]` of one document


def fit_bigram(documents: Iterable[TokensAndRemaining], vocab_size: int) -> npt.NDArray[np.int64]:
    """The most frequent answer token after each token, `[V]`; after an unseen token, the most frequent of
    all.
    """
    pairs = []
    for input_ids, remaining in documents:
        rows = np.flatnonzero(remaining >= 1)
        pairs.append(input_ids[rows].astype(np.int64) * vocab_size + input_ids[rows + 1])
    codes, counts = np.unique(np.concatenate(pairs), return_counts=True)
    previous, following = codes // vocab_size, codes % vocab_size
    most_frequent = np.bincount(following, weights=counts, minlength=vocab_size).argmax()
    table = np.full(vocab_size, most_frequent, dtype=np.int64)
    rising = np.argsort(counts, kind="stable")
    table[previous[rising]] = following[rising]  # the largest count of each previous token is written last
    return table


def bigram_walk(
    table_V: npt.NDArray[np.int64], documents: Sequence[TokensAndRemaining], num_speculative_tokens: int
) -> WalkCounts:
    """The bigram drafter's chain walk over the data's own tokens, pooled."""
    return pool(
        (
            walk
            for input_ids, remaining in documents
            for walk in chain_walk(
                leading_hits(_bigram_hits(table_V, input_ids, remaining, num_speculative_tokens)),
                remaining,
                num_speculative_tokens,
            )
        ),
        num_speculative_tokens,
    )


def _bigram_hits(
    table_V: npt.NDArray[np.int64], input_ids: IntArray, remaining: IntArray, num_steps: int
) -> npt.NDArray[np.bool_]:
    """Row t at step k drafts from x_{t+1}, following the table k + 1 times, against x_{t+2+k}."""
    length = len(input_ids)
    hits = np.zeros((num_steps, length), dtype=np.bool_)
    rows = np.flatnonzero(remaining >= 2)
    drafted = input_ids[rows + 1].astype(np.int64)
    for step in range(num_steps):
        drafted = table_V[drafted]
        inside = remaining[rows] >= step + 2
        hits[step, rows[inside]] = drafted[inside] == input_ids[rows[inside] + 2 + step]
    return hits
