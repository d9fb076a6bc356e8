"""U28: the draft vocabulary from counted tokens, and the maps of a head that uses it."""

import numpy as np
import pytest
import torch

from eagle_train.errors import InputError
from eagle_train.model.eagle3 import Eagle3Config, Eagle3DraftHead
from eagle_train.model.vocab import DEFAULT_DRAFT_VOCAB_SIZE, choose_draft_vocabulary

V = 200
SEEN = [3 * index + 1 for index in range(60)]  # 1, 4, ..., 178: 60 distinct supervised tokens


def counts() -> np.ndarray:
    """The later a seen token, the more often it is supervised: 1 .. 60 times."""
    counted = np.zeros(V, dtype=np.int64)
    counted[SEEN] = np.arange(1, 61)
    return counted


def head_with(ids: torch.Tensor) -> Eagle3DraftHead:
    head = Eagle3DraftHead(Eagle3Config(8, 8, 2, 1, 4, V, len(ids), 1e-5, 1e4, 64, None))
    head.set_vocabulary(ids)
    return head


def test_more_than_were_seen_adds_unseen_ids_in_id_order() -> None:
    ids, coverage = choose_draft_vocabulary(counts(), 80, [])
    unseen = [token for token in range(V) if token not in SEEN]
    assert ids.tolist() == sorted(SEEN + unseen[:20])
    assert ids.dtype == torch.int64
    assert coverage == 1.0


def test_fewer_than_were_seen_keeps_the_most_frequent_and_says_their_share() -> None:
    ids, coverage = choose_draft_vocabulary(counts(), 10, [])
    assert ids.tolist() == SEEN[-10:]
    assert coverage == pytest.approx(sum(range(51, 61)) / sum(range(1, 61)))


@pytest.mark.parametrize("size", [0, -1, V + 1])
def test_sizes_without_meaning_are_refused_with_value_and_limit(size: int) -> None:
    with pytest.raises(InputError, match=f"--draft_vocab_size is {size};.* between 1 .* {V}"):
        choose_draft_vocabulary(counts(), size, [])


def test_the_whole_vocabulary_is_the_identity() -> None:
    ids, coverage = choose_draft_vocabulary(counts(), V, [0, 199])
    assert ids.tolist() == list(range(V))
    assert coverage == 1.0
    head = head_with(ids)
    assert head.d2t.tolist() == [0] * V
    assert bool(head.t2d.all())


def test_no_size_means_the_smaller_of_32000_and_the_vocabulary() -> None:
    assert len(choose_draft_vocabulary(counts(), None, [])[0]) == V
    large = np.zeros(DEFAULT_DRAFT_VOCAB_SIZE + 5, dtype=np.int64)
    assert len(choose_draft_vocabulary(large, None, [])[0]) == DEFAULT_DRAFT_VOCAB_SIZE == 32_000


def test_special_and_end_of_turn_tokens_are_always_in() -> None:
    always = [0, 2, 199, SEEN[0]]
    ids, coverage = choose_draft_vocabulary(counts(), 10, always)
    assert ids.tolist() == sorted([*always, *SEEN[-6:]])
    assert coverage == pytest.approx((sum(range(55, 61)) + 1) / sum(range(1, 61)))
    assert choose_draft_vocabulary(counts(), 4, always)[0].tolist() == sorted(always)


def test_ids_outside_the_vocabulary_are_not_required() -> None:
    ids, _ = choose_draft_vocabulary(counts(), 10, [0, V, V + 7, -1])
    assert ids.tolist() == sorted([0, *SEEN[-9:]])


def test_too_small_for_the_required_tokens_is_refused_with_the_number_needed() -> None:
    with pytest.raises(InputError, match=r"is 3, but 4 special .* at least 4"):
        choose_draft_vocabulary(counts(), 3, [0, 2, 199, 5, 5])


def test_nothing_counted_still_gives_a_vocabulary() -> None:
    ids, coverage = choose_draft_vocabulary(np.zeros(V, dtype=np.int64), 5, [7])
    assert ids.tolist() == [0, 1, 2, 3, 7]
    assert coverage == 1.0


@pytest.mark.parametrize("size", [1, 10, 80, V])
def test_the_heads_maps_say_the_same_in_both_directions(size: int) -> None:
    ids, _ = choose_draft_vocabulary(counts(), size, [])
    head = head_with(ids)
    assert (head.d2t.dtype, head.t2d.dtype) == (torch.int64, torch.bool)
    assert torch.equal(head.t2d.nonzero().squeeze(1), head.d2t + torch.arange(size))
    assert torch.equal(head.draft_token_ids, ids)
    assert int(head.t2d.sum()) == size


def test_a_second_vocabulary_leaves_nothing_of_the_first() -> None:
    head = head_with(torch.arange(0, 40, 4))
    head.set_vocabulary(torch.arange(100, 110))
    assert head.t2d.nonzero().squeeze(1).tolist() == head.draft_token_ids.tolist() == list(range(100, 110))
