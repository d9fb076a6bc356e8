"""What is held out: whole conversations with all their copies, and a note where both splits share samples."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_train.config import TrainConfig
from eagle_train.data import holdout
from eagle_train.data.holdout import content_key, split_off
from eagle_train.data.samples import Sample, answer_remaining_from_spans
from eagle_train.train.splits import PreparedData, prepare_data
from tests.commands import conversation, run, write_conversations, write_jsonl
from tests.data.templates import OWN, make_tokenizer


def sample(token: int, source: str, start: int = 1) -> Sample:
    ids = np.arange(token, token + 4, dtype=np.int32)
    return Sample(ids, answer_remaining_from_spans(4, [(start, 4)]), source)


def sides(samples: list[Sample], fraction: float, seed: int, most: int | None = None) -> tuple[int, int]:
    """Sizes of the splits, which must share nothing and lose nothing."""
    split = split_off(samples, fraction, seed, most)
    train, heldout = split.train, split.heldout
    assert {s.source for s in train}.isdisjoint(s.source for s in heldout)
    assert {content_key(s) for s in train}.isdisjoint(content_key(s) for s in heldout)
    assert most is not None or len(train) + len(heldout) == len(samples)
    return len(train), len(heldout)


def test_the_samples_of_a_conversation_stay_together() -> None:
    samples = [sample(index, f"file:{index // 2}") for index in range(40)]
    for seed in range(5):
        assert sides(samples, 0.2, seed) == (32, 8)
    assert split_off(samples, 0.0, 0).heldout == []
    assert len(split_off(samples, 0.001, 0).heldout) == 2, "at least one conversation is held out"
    assert len(split_off(samples, 1.0, 0).train) == 2, "at least one conversation is trained on"
    assert split_off(samples, 0.2, 0).heldout[0].source != split_off(samples, 0.2, 1).heldout[0].source


def test_copies_of_a_conversation_land_on_one_side() -> None:
    copies = [sample(index % 20, f"file:{index}") for index in range(200)]
    for seed in range(5):
        assert sides(copies, 0.2, seed) == (160, 40)
        assert sides(copies, 0.01, seed) == (190, 10), "at least one conversation, with all its copies"
        assert sides(copies, 0.2, seed, most=25) == (180, 20)


def test_one_conversation_that_is_most_of_the_data_is_not_held_out() -> None:
    samples = [sample(0 if index < 90 else index, f"file:{index}") for index in range(100)]
    for seed in range(5):
        assert sides(samples, 0.1, seed) == (90, 10)
    assert sides([sample(0, f"file:{index}") for index in range(5)], 0.2, 0) == (5, 0)


def test_without_copies_the_split_is_the_seed_s_permutation_of_conversations() -> None:
    """As runs of earlier versions have it, which go on only with the same split."""
    samples = [sample(index, f"file:{index // 2}") for index in range(100)]
    for seed in range(3):
        order = np.random.default_rng([seed, 1]).permutation(50)
        for fraction, most, count in ((0.2, None, 10), (0.2, 3, 3), (0.001, None, 1)):
            chosen = {f"file:{index}" for index in order[:count]}
            split = split_off(samples, fraction, seed, most)
            assert split.heldout == [s for s in samples if s.source in chosen]
            assert split.train == [s for s in samples if s.source not in chosen]
            assert split.notes == ()


def test_no_more_than_the_limit_is_held_out_even_of_copies() -> None:
    doubled = [sample(index // 2, f"file:{index}") for index in range(40)]
    for seed in range(3):
        assert sides(doubled, 0.05, seed, most=1) == (38, 1)
    (note,) = split_off(doubled, 0.05, 0, most=1).notes
    assert "1 samples are left out of training, because they are copies of held-out ones" in note
    assert "--max_eval_samples 1" in note
    assert split_off(doubled, 0.05, 0, most=2).notes == ()


def test_a_share_that_copies_make_impossible_is_noted() -> None:
    halves = [sample(0 if index < 30 else 1, f"file:{index}") for index in range(61)]
    for seed in range(3):
        assert sides(halves, 0.05, seed) == (31, 30)
        assert sides(halves, 0.05, seed, most=3) == (31, 3)
    (note,) = split_off(halves, 0.05, 0).notes
    assert "30 of 61 conversations (49.2%) are held out, and not the 3 that --eval_fraction 0.05" in note
    mostly_one = [sample(0 if index < 90 else index, f"file:{index}") for index in range(100)]
    assert "10 of 100 conversations" in split_off(mostly_one, 0.5, 0).notes[0], "too few are told as well"
    (note,) = split_off(mostly_one, 0.5, 0, most=30).notes
    assert "(10.0%) are held out, and not the 30 that --max_eval_samples 30 allows" in note
    assert split_off(mostly_one, 0.1, 0).notes == ()


def test_conversations_that_share_one_of_their_samples_stay_together() -> None:
    chained = [
        s for index in range(6) for s in (sample(index, f"file:{index}"), sample(index + 1, f"file:{index}"))
    ]
    others = [sample(100 + index, f"other:{index}") for index in range(6)]
    for seed in range(5):
        heldout = split_off(chained + others, 0.5, seed).heldout
        assert len({s.source.split(":")[0] for s in heldout}) == 1
        sides(chained + others, 0.5, seed)


def test_other_supervision_is_another_sample() -> None:
    assert content_key(sample(1, "a:1")) == content_key(sample(1, "b:7"))
    assert content_key(sample(1, "a:1")) != content_key(sample(1, "a:1", start=2))


def test_each_sample_is_keyed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million samples take seconds, so they are read once, behind a bar."""
    keyed, bars = list[str](), list[dict[str, Any]]()

    def key(one: Sample) -> bytes:
        keyed.append(one.source)
        return content_key(one)

    def bar(samples: Any, **options: Any) -> Any:
        bars.append(options)
        return samples

    monkeypatch.setattr(holdout, "content_key", key)
    monkeypatch.setattr(holdout, "tqdm", bar)
    samples = [sample(index % 7, f"file:{index}") for index in range(20)]
    split_off(samples, 0.3, 0)
    assert keyed == [one.source for one in samples]
    assert [options["desc"] for options in bars] == ["find copies"]


def prepared(data: Path, **options: Any) -> PreparedData:
    config = TrainConfig(target="t", data=(str(data),), training_seq_len=512, **options)
    return prepare_data(config, make_tokenizer(OWN), 10_000, None)


def notes(data: PreparedData) -> str:
    return " ".join(data.notes)


def test_samples_in_both_files_are_noted_and_counted(tmp_path: Path) -> None:
    train = write_conversations(tmp_path / "train.jsonl", 6)
    heldout = write_jsonl(tmp_path / "heldout.jsonl", map(conversation, (4, 5, 5, 6)))
    both = prepared(train, eval_data=(str(heldout),))
    assert both.heldout_report is not None
    assert (both.train_report.shared_samples, both.heldout_report.shared_samples) == (2, 3)
    assert "3 of 4 held-out samples are also in training" in notes(both)
    apart = prepared(train, eval_fraction=0.5)
    assert (apart.train_report.shared_samples, notes(apart)) == (0, "")


def test_that_nothing_can_be_held_out_is_noted(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "same.jsonl", [conversation(1)] * 5)
    assert "nothing is held out, because all 5 samples are copies" in notes(prepared(data))
    assert notes(prepared(data, eval_fraction=0)) == ""


def test_a_run_says_and_records_what_both_splits_share(tmp_path: Path, target_dir: Path) -> None:
    data = write_conversations(tmp_path / "data.jsonl", 6)
    paths = ("--target", target_dir, "--data", data, "--eval_data", data, "--output_dir", tmp_path / "run")
    shape = ("--training_seq_len", 512, "--bucket_granularity", 64, "--ttt_steps", 2, "--max_steps", 1)
    outcome = run(*paths, *shape, "--dtype", "float32", "--num_threads", 1)
    assert outcome.code == 0, outcome.err
    assert "note: 6 of 6 held-out samples are also in training" in outcome.out
    start = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert start["heldout_data"]["shared_samples"] == 6
