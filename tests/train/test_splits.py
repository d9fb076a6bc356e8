"""What is held out: whole conversations with all their copies, and a note where both splits share samples."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from eagle_train.config import TrainConfig
from eagle_train.data.samples import Sample, answer_remaining_from_spans
from eagle_train.train.splits import PreparedData, content_key, prepare_data, split_off
from tests.commands import conversation, run, write_conversations, write_jsonl
from tests.data.templates import OWN, make_tokenizer


def sample(token: int, source: str, start: int = 1) -> Sample:
    ids = np.arange(token, token + 4, dtype=np.int32)
    return Sample(ids, answer_remaining_from_spans(4, [(start, 4)]), source)


def sides(samples: list[Sample], fraction: float, seed: int, most: int | None = None) -> tuple[int, int]:
    """Sizes of the splits, which must share nothing and lose nothing."""
    train, heldout = split_off(samples, fraction, seed, most)
    assert {s.source for s in train}.isdisjoint(s.source for s in heldout)
    assert {content_key(s) for s in train}.isdisjoint(content_key(s) for s in heldout)
    assert len(train) + len(heldout) == len(samples)
    return len(train), len(heldout)


def test_the_samples_of_a_conversation_stay_together() -> None:
    samples = [sample(index, f"file:{index // 2}") for index in range(40)]
    for seed in range(5):
        assert sides(samples, 0.2, seed) == (32, 8)
    assert split_off(samples, 0.0, 0)[1] == []
    assert len(split_off(samples, 0.001, 0)[1]) == 2, "at least one conversation is held out"
    assert len(split_off(samples, 1.0, 0)[0]) == 2, "at least one conversation is trained on"
    assert split_off(samples, 0.2, 0)[1][0].source != split_off(samples, 0.2, 1)[1][0].source


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


def test_conversations_that_share_one_of_their_samples_stay_together() -> None:
    chained = [
        s for index in range(6) for s in (sample(index, f"file:{index}"), sample(index + 1, f"file:{index}"))
    ]
    others = [sample(100 + index, f"other:{index}") for index in range(6)]
    for seed in range(5):
        _, heldout = split_off(chained + others, 0.5, seed)
        assert len({s.source.split(":")[0] for s in heldout}) == 1
        sides(chained + others, 0.5, seed)


def test_other_supervision_is_another_sample() -> None:
    assert content_key(sample(1, "a:1")) == content_key(sample(1, "b:7"))
    assert content_key(sample(1, "a:1")) != content_key(sample(1, "a:1", start=2))


def prepared(data: Path, **options: Any) -> PreparedData:
    config = TrainConfig(target="t", data=(str(data),), training_seq_len=512, **options)
    return prepare_data(config, make_tokenizer(OWN), 10_000, None)


def notes(data: PreparedData) -> str:
    assert data.train_report.data is not None
    return " ".join(data.train_report.data.messages)


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
