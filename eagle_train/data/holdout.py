"""Validation samples split off the training data: whole conversations with all their copies."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from eagle_train.data.packing import Ints
from eagle_train.data.samples import Sample

CLEARLY_OFF = 1.5  # times more, or fewer, conversations than asked for


@dataclass(frozen=True, slots=True)
class Holdout:
    """Samples by the side on which they are. notes: where that is not what was asked for, and why."""

    train: list[Sample]
    heldout: list[Sample]
    notes: tuple[str, ...] = ()


def split_off(samples: Sequence[Sample], fraction: float, seed: int, most: int | None = None) -> Holdout:
    """Hold out about `fraction` of the conversations, at most `most`; at least one where they are not all
    copies of each other.

    Samples of one conversation stay together, and so do conversations that have an equal sample, so none is
    trained on and validated with. Copies above `most` are on neither side.
    """
    conversations, groups = conversations_apart(samples)
    wanted = min(max(round(fraction * len(groups)), int(fraction > 0)), len(groups) - 1)
    asked_by = f"--eval_fraction {fraction:g} asks for"
    if most is not None and most < wanted:
        wanted, asked_by = most, f"--max_eval_samples {most} allows"
    is_apart = choose_groups(np.bincount(groups), wanted, seed)[groups]
    is_heldout = is_apart if most is None else is_apart & (np.cumsum(is_apart) <= most)
    train = [sample for sample, here in zip(samples, ~is_apart[conversations], strict=True) if here]
    heldout = [sample for sample, here in zip(samples, is_heldout[conversations], strict=True) if here]
    num_heldout = int(is_heldout.sum())
    notes = []
    if fraction and not heldout and len(groups) > 1:
        notes.append(
            f"nothing is held out, because all {len(samples):,} samples are copies of each other, or share "
            "parts; name --eval_data to validate"
        )
    elif not wanted / CLEARLY_OFF <= num_heldout <= wanted * CLEARLY_OFF:
        notes.append(
            f"{num_heldout:,} of {len(groups):,} conversations ({num_heldout / len(groups):.1%}) are held "
            f"out, and not the {wanted:,} that {asked_by}, because copies of a conversation stay together; "
            "drop copies, or name --eval_data"
        )
    if left_out := len(samples) - len(train) - len(heldout):
        notes.append(
            f"{left_out:,} samples are left out of training, because they are copies of held-out ones and "
            f"--max_eval_samples {most} holds out no more of them; drop copies, or name --eval_data"
        )
    return Holdout(train, heldout, tuple(notes))


def choose_groups(sizes: Ints, wanted: int, seed: int) -> npt.NDArray[np.bool_]:
    """Which groups to hold out, bool `[G]`: in the seed's order those that fit into `wanted` conversations;
    where none does, the smallest. sizes: conversations of each group, int64 `[G]`.
    """
    is_chosen = np.zeros(len(sizes), dtype=bool)
    if wanted < 1 or len(sizes) < 2:
        return is_chosen
    order = np.random.default_rng([seed, 1]).permutation(len(sizes))
    left = wanted
    for index, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        if size <= left:
            is_chosen[index] = True
            left -= size
        if not left:
            break
    if left == wanted:
        is_chosen[order[sizes[order].argmin()]] = True
    return is_chosen


def conversations_apart(samples: Sequence[Sample]) -> tuple[Ints, Ints]:
    """The conversation of each sample, int64 `[N]`, and the group of each conversation, int64 `[C]`: groups
    share no sample. Both are numbered by the first sample.
    """
    conversations = np.empty(len(samples), dtype=np.int64)
    number_of: dict[str, int] = {}
    first_of: dict[bytes, int] = {}  # the first conversation with a content
    earlier: list[int] = []  # of each conversation another one of its group; its own number: the first
    for index, (sample, key) in enumerate(zip(samples, content_keys(samples), strict=True)):
        number = number_of.setdefault(sample.source, len(earlier))
        if number == len(earlier):
            earlier.append(number)
        conversations[index] = number
        other = first_of.setdefault(key, number)
        if other != number:
            low, high = sorted((_first(earlier, number), _first(earlier, other)))
            earlier[high] = low
    firsts = np.array([_first(earlier, number) for number in range(len(earlier))], dtype=np.int64)
    return conversations, np.unique(firsts, return_inverse=True)[1].astype(np.int64)


def _first(earlier: list[int], number: int) -> int:
    while earlier[number] != number:
        earlier[number] = number = earlier[earlier[number]]
    return number


def content_keys(samples: Sequence[Sample]) -> Iterator[bytes]:
    """The key of each sample, behind a progress bar."""
    for sample in tqdm(samples, desc="find copies", unit=" samples", delay=3, leave=False):
        yield content_key(sample)


def content_key(sample: Sample) -> bytes:
    """Equal for samples of equal token ids and supervision."""
    digest = hashlib.blake2b(sample.input_ids.tobytes(), digest_size=16)
    digest.update(sample.answer_remaining.tobytes())
    return digest.digest()
