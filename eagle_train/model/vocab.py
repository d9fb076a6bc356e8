"""The draft vocabulary: the target ids that the draft head can propose."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eagle_train.errors import InputError

DEFAULT_DRAFT_VOCAB_SIZE = 32_000


def choose_draft_vocabulary(
    token_counts_V: npt.NDArray[np.int64], size: int | None, always: Iterable[int]
) -> tuple[Tensor, float]:
    """The sorted target ids `[V_d]` of the draft vocabulary, and the share of counted tokens that it covers
    (0..1).

    token_counts_V: how often each id is supervised. `always` (special and end-of-turn tokens) come first,
    then the most frequent ids; where fewer were seen than asked for, unseen ids follow in id order. None
    asks for min(32,000, V).

    Raises InputError when size is below 1 or the number of `always` ids, or above the vocabulary.
    """
    vocab_size = len(token_counts_V)
    size = min(DEFAULT_DRAFT_VOCAB_SIZE, vocab_size) if size is None else size
    required = sorted({token_id for token_id in always if 0 <= token_id < vocab_size})
    if not 1 <= size <= vocab_size:
        raise InputError(
            f"--draft_vocab_size is {size}; it must lie between 1 and the target's vocabulary of {vocab_size}"
        )
    if size < len(required):
        raise InputError(
            f"--draft_vocab_size is {size}, but {len(required)} special and end-of-turn tokens are always "
            f"in; raise it to at least {len(required)}"
        )
    by_frequency = np.argsort(-token_counts_V, kind="stable")
    required_first = np.concatenate(
        [np.array(required, dtype=np.int64), by_frequency[~np.isin(by_frequency, required)]]
    )
    chosen = np.sort(required_first[:size])
    return torch.from_numpy(chosen), vocabulary_coverage(token_counts_V, chosen)


def vocabulary_coverage(token_counts_V: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]) -> float:
    """Share of the counted tokens that are of these ids (0..1); 1 where none was counted."""
    total = int(token_counts_V.sum())
    return float(token_counts_V[token_ids].sum() / total) if total else 1.0
