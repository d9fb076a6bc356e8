"""Samples of random tokens with chosen lengths, so that throughput can be measured without data."""

import hashlib
import math
import operator
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt

from eagle_train.data.samples import Sample, answer_remaining_from_spans
from eagle_train.errors import InputError

Ints = npt.NDArray[np.int64]

DEFAULT_MOCK_SAMPLES = 1_000
MAX_LENGTH = 2**31 - 1  # offsets of documents are int32
LOGNORMAL_SIGMA = 1.0  # of the logarithm of the length
SPELLINGS = (
    "a number, uniform:a:b, lognormal:mean:max, or a file of lengths (.npy, or one whole number a line)"
)
# First words of the seeds, so that lengths and tokens of one --seed have nothing in common.
LENGTH_STREAM, TOKEN_STREAM = 1, 2


def mock_lengths(spec: str, count: int | None, seed: int) -> Ints:
    """Lengths in tokens of `count` mock samples, int64 `[N]`, each at least 1.

    spec: "2600": all alike; "uniform:a:b": whole numbers from a to b, both included; "lognormal:mean:max":
    sigma 1.0, rounded and clipped to 1..max, with `mean` the mean before clipping; anything else is a path
    of lengths, of which sample i gets entry i modulo their count.
    count: None takes every length of a file, else 1,000.

    Samples below 3 tokens have no supervised row. Raises InputError for a spec or count that makes no sense.
    """
    if count is not None and count < 1:
        raise InputError(f"--mock_num_samples is {count}; it must be at least 1")
    num_samples = DEFAULT_MOCK_SAMPLES if count is None else count
    rng = np.random.default_rng([LENGTH_STREAM, seed])
    kind, *values = spec.split(":")
    if re.fullmatch(r"[+-]?[0-9]+", spec):
        lengths = np.full(num_samples, _length(spec, spec), dtype=np.int64)
    elif kind == "uniform":
        low, high = _two_lengths(spec, values)
        lengths = rng.integers(low, high, num_samples, endpoint=True)
    elif kind == "lognormal":
        mean, most = _two_lengths(spec, values)
        mu = math.log(mean) - LOGNORMAL_SIGMA**2 / 2
        lengths = rng.lognormal(mu, LOGNORMAL_SIGMA, num_samples).clip(1, most).round().astype(np.int64)
    else:
        entries = read_lengths(spec, "--mock_len")
        lengths = np.resize(entries, len(entries) if count is None else count)
    return lengths


def read_lengths(name: str, flag: str) -> Ints:
    """The lengths in a file, int64 `[N]`: .npy, or text with one whole number a line.

    Raises InputError naming the flag and the file, and the line where there is one.
    """
    path = Path(name)
    if not os.path.isfile(name):  # unlike Path.is_file, false for names that no file can have
        spellings = SPELLINGS if flag == "--mock_len" else "a file of lengths (.npy, or one number a line)"
        raise InputError(f"{flag} is {name!r}, which is no file; give {spellings}")
    lengths = _read_npy(path, flag) if path.suffix == ".npy" else _read_text(path, flag)
    if len(lengths) == 0:
        raise InputError(f"{flag} {path} holds no length; it needs at least one")
    wrong = np.flatnonzero((lengths < 1) | (lengths > MAX_LENGTH))
    if len(wrong):
        raise InputError(
            f"{flag} {path} has the length {lengths[wrong[0]]} as entry {wrong[0] + 1}; lengths must lie "
            f"between 1 and {MAX_LENGTH} tokens"
        )
    return lengths.astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class MockSamples(Sequence[Sample]):
    """Samples of random tokens, each made from (seed, index) when it is asked for; nothing else is stored.

    lengths: int64 `[N]`, tokens; vocab_size: ids lie in [0, vocab_size); loss_share: how much of a sample,
    0..1, its one answer covers. The answer is round(loss_share x length) tokens at the end: at least 2, so
    that a row is supervised, and at most length - 1, because token 0 is the prompt. None where loss_share
    is 0.

    Raises InputError for a loss_share outside 0..1.
    """

    lengths: Ints
    vocab_size: int
    loss_share: float
    seed: int

    def __post_init__(self) -> None:
        if not 0 <= self.loss_share <= 1:
            raise InputError(f"--mock_loss_share is {self.loss_share}; it must lie between 0 and 1")

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        """One sample, or a list of them. IndexError outside 0..N-1: indices do not count from the end."""
        if isinstance(index, slice):
            return [self._make(position) for position in range(*index.indices(len(self)))]
        return self._make(operator.index(index))

    def _make(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"mock sample {index} of {len(self)}")
        length = int(self.lengths[index])
        rng = np.random.Generator(np.random.PCG64([TOKEN_STREAM, self.seed, index]))
        answer = answer_length(length, self.loss_share)
        return Sample(
            input_ids=rng.integers(0, self.vocab_size, length, dtype=np.int32),
            answer_remaining=answer_remaining_from_spans(
                length, [(length - answer, length)] if answer else []
            ),
            source=f"mock sample {index}",
        )

    @property
    def supervised_rows(self) -> Ints:
        """Rows supervised at TTT step 0 of each sample, int64 `[N]`: one fewer than its answer has tokens."""
        answers = np.minimum(np.maximum(np.rint(self.loss_share * self.lengths), 2), self.lengths - 1)
        return np.maximum(answers.astype(np.int64) - 1, 0) * (self.loss_share > 0)

    @property
    def digest(self) -> str:
        """16 hex digits of what the samples are made from: the same digest, the same tokens."""
        header = f"{self.vocab_size} {float(self.loss_share)!r} {self.seed} ".encode()
        lengths = np.ascontiguousarray(self.lengths, dtype="<i8")
        return hashlib.sha256(header + lengths.tobytes()).hexdigest()[:16]


def answer_length(length: int, loss_share: float) -> int:
    """Tokens of the answer in a mock sample of `length` tokens."""
    if loss_share == 0:
        return 0
    return min(max(round(loss_share * length), 2), length - 1)


def _two_lengths(spec: str, values: list[str]) -> tuple[int, int]:
    if len(values) != 2:
        raise InputError(f"--mock_len is {spec!r}; give {SPELLINGS}")
    low, high = (_length(value, spec) for value in values)
    if low > high:
        raise InputError(f"--mock_len is {spec!r}, but {low} is above {high}; put the smaller one first")
    return low, high


def _length(text: str, spec: str) -> int:
    """One length of a spec in tokens."""
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise InputError(f"--mock_len is {spec!r}, but {text!r} is no whole number; give {SPELLINGS}")
    if len(text) > 20 or not 1 <= int(text) <= MAX_LENGTH:
        raise InputError(f"--mock_len is {spec!r}; lengths must lie between 1 and {MAX_LENGTH} tokens")
    return int(text)


def _read_npy(path: Path, flag: str) -> np.ndarray:
    try:
        with path.open("rb") as file:
            lengths = np.lib.format.read_array(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(f"{flag} {path} is not a sound .npy file: {error}") from error
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise InputError(f"{flag} {path} is no flat array of whole numbers; save lengths as int64 [N]")
    return lengths


def _read_text(path: Path, flag: str) -> np.ndarray:
    lengths = []
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                if not re.fullmatch(r"[+-]?[0-9]{1,18}", line.strip()):
                    raise InputError(
                        f"{flag} {path}:{number} is {line.strip()[:40]!r}; each line must be one whole number"
                    )
                lengths.append(int(line))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{flag} {path} is neither .npy nor text: {error}") from error
    return np.array(lengths, dtype=np.int64)
