"""Mock samples: lengths as asked for, tokens from seed and index alone, exactly the asked-for loss share."""

import itertools
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from eagle_train.data.collator import BucketingCollator
from eagle_train.data.mock import DEFAULT_MOCK_SAMPLES, MockSamples, answer_length, mock_lengths, read_lengths
from eagle_train.data.samples import Sample
from eagle_train.errors import InputError


def mock(lengths: list[int], loss_share: float = 0.5, seed: int = 0, vocab_size: int = 100) -> MockSamples:
    return MockSamples(np.array(lengths), vocab_size, loss_share, seed)


def same(one: Sample, other: Sample) -> bool:
    return np.array_equal(one.input_ids, other.input_ids) and np.array_equal(
        one.answer_remaining, other.answer_remaining
    )


def test_a_number_makes_all_samples_alike() -> None:
    assert mock_lengths("2600", 5, seed=0).tolist() == [2600] * 5
    assert len(mock_lengths("2600", None, seed=0)) == DEFAULT_MOCK_SAMPLES


def test_uniform_lengths_reach_both_ends() -> None:
    lengths = mock_lengths("uniform:3:12", 20_000, seed=0)
    assert set(lengths.tolist()) == set(range(3, 13))
    assert lengths.mean() == pytest.approx(7.5, rel=0.02)
    assert lengths.dtype == np.int64
    assert mock_lengths("uniform:7:7", 2, seed=0).tolist() == [7, 7]


def test_lognormal_lengths_have_the_mean_before_clipping_and_sigma_one() -> None:
    lengths = mock_lengths("lognormal:1200:1000000", 100_000, seed=0)
    assert lengths.mean() == pytest.approx(1200, rel=0.03)
    assert np.log(lengths).std() == pytest.approx(1.0, rel=0.02)
    clipped = mock_lengths("lognormal:1200:4096", 100_000, seed=0)
    assert np.array_equal(clipped, np.minimum(lengths, 4096))
    assert mock_lengths("lognormal:1:4096", 10_000, seed=0).min() == 1


@pytest.mark.parametrize("spec", ["uniform:1:4000", "lognormal:500:4000"])
def test_lengths_follow_the_seed(spec: str) -> None:
    assert np.array_equal(mock_lengths(spec, 50, seed=3), mock_lengths(spec, 50, seed=3))
    assert not np.array_equal(mock_lengths(spec, 50, seed=3), mock_lengths(spec, 50, seed=4))


@pytest.mark.parametrize("name", ["lengths.npy", "lengths.txt"])
def test_a_file_of_lengths_is_repeated_as_often_as_asked(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if path.suffix == ".npy":
        np.save(path, np.array([5, 2, 9], dtype=np.uint16))
    else:
        path.write_text("5\n 2\n9\n")
    assert mock_lengths(str(path), None, seed=0).tolist() == [5, 2, 9]
    assert mock_lengths(str(path), 7, seed=0).tolist() == [5, 2, 9, 5, 2, 9, 5]
    assert mock_lengths(str(path), 2, seed=0).tolist() == [5, 2]
    assert mock_lengths(str(path), 2, seed=0).dtype == np.int64


def test_blank_lines_and_a_byte_order_mark_are_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text("\ufeff5\n\n7\n\n", encoding="utf-8")
    assert read_lengths(str(path), "--lengths").tolist() == [5, 7]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("", "is '', which is no file"),
        ("many", "is 'many', which is no file"),
        ("2.5", "is '2.5', which is no file"),
        ("x" * 5000, "which is no file"),
        ("0", "is '0'; lengths must lie between 1 and 2147483647"),
        ("-4", "is '-4'; lengths must lie between 1 and"),
        ("9" * 5000, "lengths must lie between 1 and"),
        ("uniform:3", "is 'uniform:3'; give a number"),
        ("uniform:1:2:3", "is 'uniform:1:2:3'; give a number"),
        ("uniform:9:3", "9 is above 3"),
        ("uniform:0:3", "is 'uniform:0:3'; lengths must lie between 1"),
        ("uniform:a:3", "'a' is no whole number"),
        ("lognormal:1e3:4096", "'1e3' is no whole number"),
        ("lognormal:5000:4096", "5000 is above 4096"),
        ("lognormal:5:-1", "lengths must lie between 1"),
    ],
)
def test_a_bad_spec_is_refused_by_name(spec: str, words: str) -> None:
    with pytest.raises(InputError, match="--mock_len") as error:
        mock_lengths(spec, 3, seed=0)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_count_below_one_is_refused() -> None:
    with pytest.raises(InputError, match="--mock_num_samples is 0; it must be at least 1"):
        mock_lengths("5", 0, seed=0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no length"),
        ("5\nsix\n7\n", ":2 is 'six'; each line must be one whole number"),
        ("5\n6.0\n", ":2 is '6.0'; each line"),
        ("5\n0\n", "has the length 0 as entry 2"),
        ("5\n7\n-3\n", "has the length -3 as entry 3"),
        ("9999999999\n", "has the length 9999999999 as entry 1"),
    ],
)
def test_a_bad_text_file_of_lengths_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    with pytest.raises(InputError, match="--mock_len") as error:
        mock_lengths(str(path), None, seed=0)
    assert f"{path}{words}" in str(error.value) or f"{path} {words}" in str(error.value)


def test_a_text_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_bytes(b"\xff\xfe\x80")
    with pytest.raises(InputError, match=r"--mock_len .*lengths is neither .npy nor text"):
        mock_lengths(str(tmp_path / "lengths"), None, seed=0)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array([1.5, 2.0]), "no flat array of whole numbers"),
        (np.array([[1, 2]]), "no flat array of whole numbers"),
        (np.array([True]), "no flat array of whole numbers"),
        (np.array([1, "a"], dtype=object), "not a sound .npy file"),
        (np.array([], dtype=np.int64), "holds no length"),
        (np.array([4, 0]), "has the length 0 as entry 2"),
        (np.array([2**63], dtype=np.uint64), "has the length 9223372036854775808 as entry 1"),
    ],
)
def test_a_bad_npy_file_of_lengths_is_refused(tmp_path: Path, array: np.ndarray, words: str) -> None:
    path = tmp_path / "lengths.npy"
    np.save(path, array)
    with pytest.raises(InputError, match=r"--mock_len .*lengths\.npy") as error:
        mock_lengths(str(path), None, seed=0)
    assert words in str(error.value)


def test_a_damaged_npy_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lengths.npy"
    np.save(path, np.arange(1, 1000))
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(InputError, match=r"--mock_len .* is not a sound \.npy file"):
        mock_lengths(str(path), None, seed=0)
    path.write_bytes(b"")
    with pytest.raises(InputError, match=r"--mock_len .* is not a sound \.npy file"):
        mock_lengths(str(path), None, seed=0)


def test_ten_million_samples_store_no_token() -> None:
    lengths = np.full(10_000_000, 40)
    tracemalloc.start()
    started = time.perf_counter()
    samples = MockSamples(lengths, 32_000, 0.5, seed=0)
    sample = samples[9_999_999]
    seconds = time.perf_counter() - started
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (len(sample), sample.source) == (40, "mock sample 9999999")
    assert peak_bytes < 100_000
    assert seconds < 1


def test_a_sample_is_a_function_of_seed_and_index() -> None:
    first, second = mock([30, 40, 50]), mock([30, 40, 50])
    assert same(first[2], second[2])  # whatever was asked for before
    assert all(same(one, other) for one, other in zip(first, second, strict=True))
    assert not np.array_equal(mock([40] * 2)[0].input_ids, mock([40] * 2)[1].input_ids)
    assert not np.array_equal(mock([40])[0].input_ids, mock([40], seed=1)[0].input_ids)


def test_tokens_are_spread_over_the_vocabulary() -> None:
    ids = mock([50_000], vocab_size=7)[0].input_ids
    assert ids.dtype == np.int32
    assert np.bincount(ids, minlength=7) / 50_000 == pytest.approx(np.full(7, 1 / 7), rel=0.05)


@pytest.mark.parametrize(
    ("length", "loss_share", "answer"),
    [
        *itertools.product((1, 2, 3, 1000), [0.0], [0]),
        (1, 1.0, 0),
        (2, 1.0, 1),
        (3, 1.0, 2),
        (1000, 1.0, 999),
        (1, 0.01, 0),
        (2, 0.01, 1),
        (3, 0.01, 2),
        (1000, 0.001, 2),
        (1000, 0.25, 250),
        (1000, 0.9996, 999),
        (2600, 0.333, 866),
    ],
)
def test_the_answer_is_the_asked_for_share(length: int, loss_share: float, answer: int) -> None:
    assert answer_length(length, loss_share) == answer
    sample = mock([length], loss_share)[0]
    assert len(sample) == len(sample.answer_remaining) == length
    assert sample.answer_remaining.max() == answer
    assert int((sample.answer_remaining >= 1).sum()) == answer
    assert sample.num_supervised_rows == max(answer - 1, 0)
    if answer:
        assert sample.answer_remaining.argmax() == length - answer - 1


@pytest.mark.parametrize("loss_share", [-0.1, 1.1, float("nan")])
def test_a_loss_share_outside_0_to_1_is_refused(loss_share: float) -> None:
    with pytest.raises(InputError, match=r"--mock_loss_share is .*; it must lie between 0 and 1"):
        mock([5], loss_share)


def test_samples_are_a_sequence() -> None:
    samples = mock([4, 5, 6])
    assert [len(sample) for sample in samples] == [4, 5, 6]
    assert [len(sample) for sample in samples[1:]] == [5, 6]
    assert len(samples[np.int64(1)]) == 5
    for index in (3, -1):
        with pytest.raises(IndexError, match=f"mock sample {index} of 3"):
            samples[index]


def test_the_digest_tells_every_setting_apart() -> None:
    samples = [
        mock([4, 5, 6]),
        mock([4, 5, 7]),
        mock([4, 5]),
        mock([4, 5, 6], loss_share=0.25),
        mock([4, 5, 6], seed=1),
        mock([4, 5, 6], vocab_size=101),
    ]
    assert len({one.digest for one in samples}) == len(samples)
    assert mock([4, 5, 6]).digest == samples[0].digest
    assert MockSamples(np.array([4, 5, 6], dtype=np.int32), 100, 0.5, 0).digest == samples[0].digest


def test_samples_pass_through_the_collator() -> None:
    samples = mock([10, 1, 7], loss_share=0.6)
    batch = BucketingCollator(16)(samples[:])
    assert (batch.num_slots, batch.num_tokens, batch.offsets) == (32, 18, (0, 10, 11, 18, 32))
    assert batch.supervised_counts(2) == [5 + 3, 4 + 2]
    assert batch.sources == ("mock sample 0", "mock sample 1", "mock sample 2")
    for sample, start in zip(samples, batch.offsets, strict=False):
        rows = slice(start, start + len(sample))
        assert np.array_equal(batch.input_ids[rows].numpy(), sample.input_ids)
        assert np.array_equal(batch.answer_remaining[rows].numpy(), sample.answer_remaining)
