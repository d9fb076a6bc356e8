"""Which options go together: packing, padding, the target's attention, spellings of the global batch."""

import json
import math
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import eagle_train.model.target
from eagle_train.batch import PackedBatch
from eagle_train.config import TrainConfig
from eagle_train.data.collator import BucketingCollator
from eagle_train.errors import InputError
from eagle_train.model.target import load_target
from eagle_train.train.output import header
from eagle_train.train.prepare import prepare
from eagle_train.train.schedule import Schedule
from tests.commands import Outcome, read_events, run, write_conversations
from tests.tiny import write_target

SMALL = {
    "training_seq_len": 512,
    "bucket_granularity": 64,
    "ttt_steps": 3,
    "dtype": "float32",
    "num_threads": 1,
    "log_every": 1,
}
PADDED = {"packing": "none", "padding_free": "false"}


class Workplace:
    """A directory with eight samples, which make one batch in every form, and held-out ones."""

    def __init__(self, directory: Path, target_dir: Path) -> None:
        self.target = target_dir
        self.data = write_conversations(directory / "data.jsonl", 8)
        self.heldout = write_conversations(directory / "heldout.jsonl", 5)
        self.directory = directory

    def train(self, output: str = "out", **options: object) -> Outcome:
        named = {
            "target": self.target,
            "data": self.data,
            "eval_data": self.heldout,
            "output_dir": self.directory / output,
        }
        named |= SMALL | options
        return run(*(word for name, value in named.items() for word in (f"--{name}", value)))

    def events(self, output: str = "out", **options: object) -> list[dict[str, Any]]:
        """The events of a run that must succeed."""
        outcome = self.train(output, **options)
        assert outcome.code == 0, outcome.err
        return read_events(self.directory / output)

    def refusal(self, **options: object) -> str:
        """The line of a run that is refused before it writes anything."""
        line = self.train(**options).refusal()
        assert not (self.directory / "out").exists()
        return line


@pytest.fixture
def place(tmp_path: Path, target_dir: Path) -> Workplace:
    return Workplace(tmp_path, target_dir)


def assert_names(line: str, *parts: str) -> None:
    for part in parts:
        assert part in line, line


@pytest.mark.parametrize("packing", ["multipack", "multipack_v1", "multipack_v2", "next_fit"])
def test_packing_without_padding_free_is_refused(place: Workplace, packing: str) -> None:
    line = place.refusal(packing=packing, padding_free="false")
    assert_names(line, f"--packing {packing}", "--padding_free false", "drop", "use --packing none")


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flash_attention_2"])
@pytest.mark.parametrize(
    "form", [{}, {"packing": "multipack"}, {"packing": "none"}, {"packing": "none", "padding_free": "true"}]
)
def test_flat_batches_under_an_attention_that_reads_across_documents_are_refused(
    place: Workplace, attention: str, form: dict[str, str]
) -> None:
    line = place.refusal(attn_implementation=attention, **form)
    assert_names(line, f"--attn_implementation {attention}", "drop it", "--packing none --padding_free false")


def test_the_rules_hold_for_a_config_file_too(place: Workplace) -> None:
    path = place.directory / "config.yaml"
    path.write_text("attn_implementation: sdpa\n")
    assert_names(place.refusal(config=path), "--attn_implementation sdpa", "--packing none")
    path.write_text("padding_free: false\n")
    assert_names(place.refusal(config=path), "--packing multipack", "--padding_free false")


def test_an_attention_that_is_none_is_refused(place: Workplace) -> None:
    line = place.refusal(attn_implementation="quick", **PADDED)
    assert_names(line, str(place.target), "--attn_implementation quick cannot be used", "use eager")


def figures(events: list[dict[str, Any]]) -> Iterator[float]:
    """Losses and acceptance of training and validation, flat; how batches are shaped is left out."""
    for values in events:
        if values["event"] not in ("train", "validation"):
            continue
        for key in sorted(values):
            if re.search("loss|acceptance|agreement|supervised_rows|own_token", key):
                yield from numbers_in(values[key])


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(item)
    else:
        yield math.nan if value is None else float(value)


def test_padded_rows_train_alike_under_any_attention_and_as_packed_ones_do(place: Workplace) -> None:
    same = {"max_steps": 2, "eval_every": 1}
    wanted = list(figures(place.events("multipack", **same)))
    assert len(wanted) > 60
    assert all(math.isfinite(value) for value in wanted)
    for attention in ("isolated", "eager", "sdpa"):
        events = place.events(attention, **same, **PADDED, attn_implementation=attention)
        assert list(figures(events)) == pytest.approx(wanted, rel=1e-4, abs=1e-6), attention


def test_a_resumed_run_keeps_to_its_attention(place: Workplace) -> None:
    place.events(max_steps=1, attn_implementation="eager", **PADDED)
    line = place.train(max_steps=2, resume="true", **PADDED, attn_implementation="sdpa").refusal()
    assert_names(line, "--attn_implementation eager -> sdpa")


def two_documents(padding_free: bool) -> PackedBatch:
    rows = [
        {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 1, 1]},
        {"input_ids": [9, 8, 7, 5], "loss_mask": [0, 1, 1, 1]},
    ]
    return BucketingCollator(8, padding_free)(rows)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_target_that_reads_across_documents_takes_no_packed_row(target_dir: Path, attention: str) -> None:
    where = {"dtype": torch.float32, "device": torch.device("cpu")}
    target = load_target(str(target_dir), attn_implementation=attention, **where)
    with pytest.raises(InputError, match=r"LlamaForCausalLM .* across documents .*padding_free=False"):
        target.features(two_documents(padding_free=True))
    padded = target.features(two_documents(padding_free=False)).final_hidden
    flat = load_target(str(target_dir), **where).features(two_documents(padding_free=True)).final_hidden
    ours = torch.cat([padded[:5], padded[8:12]])
    assert torch.allclose(ours, flat[:9], rtol=1e-4, atol=1e-5)


def test_a_target_whose_documents_read_each_other_is_refused_by_name_before_training(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle_train.model.target, "document_layout", nullcontext)
    line = place.refusal(max_steps=1)
    assert_names(line, "LlamaForCausalLM reads across the documents", "use another --target")
    events = place.events(max_steps=1, attn_implementation="eager", **PADDED)
    assert events[-1]["event"] == "end", "a padded row holds one document, so nothing leaks"


# Bloom's attention cannot be replaced; LFM2's short convolutions run on into the next document.
LEAKING = {
    "bloom": ({"n_layer": 8, "n_head": 4}, "BloomForCausalLM uses attention outside"),
    "lfm2": ({"layer_types": ["conv", "full_attention"] * 4}, "Lfm2ForCausalLM reads across the documents"),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", LEAKING)
def test_a_family_that_cannot_be_packed_is_refused_by_name_and_trains_in_padded_rows(
    place: Workplace, family: str, dtype: str
) -> None:
    """In bfloat16 too, where rounding alone differs as much as a weak leak does."""
    changes, words = LEAKING[family]
    target = write_target(place.directory / family, family, **changes)
    refusal = place.refusal(target=target, max_steps=1, dtype=dtype)
    assert_names(refusal, words, "--padding_free false --attn_implementation eager")
    events = place.events(target=target, max_steps=1, dtype=dtype, attn_implementation="eager", **PADDED)
    assert events[-1]["event"] == "end"


GLOBAL_BATCH = {"accumulation_steps": 2, "tokens_per_step": 1024, "effective_batch_size": 8}


@pytest.mark.parametrize(
    "names",
    [
        ("accumulation_steps", "tokens_per_step"),
        ("accumulation_steps", "effective_batch_size"),
        ("tokens_per_step", "effective_batch_size"),
        tuple(GLOBAL_BATCH),
    ],
)
def test_only_one_spelling_of_the_global_batch_is_taken(place: Workplace, names: tuple[str, ...]) -> None:
    line = place.refusal(**{name: GLOBAL_BATCH[name] for name in names})
    assert_names(line, " and ".join(f"--{name}" for name in names), "keep one")


@pytest.mark.parametrize("name", GLOBAL_BATCH)
def test_a_global_batch_of_nothing_is_refused(place: Workplace, name: str) -> None:
    assert_names(place.refusal(**{name: 0}), f"--{name} is 0", "at least 1")


def header_line(out: str, name: str) -> str | None:
    match = re.search(rf"^  {name} +(.+)$", out, re.MULTILINE)
    return match[1] if match else None


def test_the_header_translates_the_global_batch(place: Workplace) -> None:
    outcome = place.train(max_steps=1, training_seq_len=128, tokens_per_step=400)
    assert outcome.code == 0, outcome.err
    (start,) = read_events(place.directory / "out", "start")
    tokens, mean = start["train_tokens"], start["train_mean_length"]
    assert mean == pytest.approx(tokens / 8)
    translation = header_line(outcome.out, "global batch")
    assert translation == (
        "--tokens_per_step 400 -> 128 slots x 1 ranks x 3 micro-batches = 384 slots, "
        f"about {384 / mean:.0f} samples, a step"
    )
    assert "micro-batches a step: 3" in (header_line(outcome.out, "optimizer") or "")


def test_samples_and_tokens_are_two_spellings_of_one_global_batch(place: Workplace) -> None:
    """Eight samples of the mean length are just the tokens of the data."""
    planned = run("plan", "--data", place.data, "--target", place.target, "--eval_fraction", 0, "--json")
    tokens = json.loads(planned.out)["tokens"]
    same = {"training_seq_len": 128, "max_steps": 1}
    shown = []
    for name, value in (("effective_batch_size", 8), ("tokens_per_step", tokens)):
        outcome = place.train(name, **same, **{name: value})
        assert outcome.code == 0, outcome.err
        translation = header_line(outcome.out, "global batch") or ""
        assert translation.startswith(f"--{name} ")
        shown.append(translation.split(" -> ")[1])
    assert shown[0] == shown[1]
    outputs = [place.directory / name for name in ("effective_batch_size", "tokens_per_step")]
    heads = [(output / "model.safetensors").read_bytes() for output in outputs]
    assert heads[0] == heads[1]


def test_an_unpacked_global_batch_is_translated_into_samples(place: Workplace) -> None:
    outcome = place.train(max_steps=1, packing="none", batch_size=2, effective_batch_size=6)
    assert outcome.code == 0, outcome.err
    translation = header_line(outcome.out, "global batch") or ""
    assert "2 samples x 1 ranks x 3 micro-batches = 6 samples" in translation
    (values,) = read_events(place.directory / "out", "train")
    assert values["samples"] == 6


def test_without_a_global_batch_nothing_is_translated(place: Workplace) -> None:
    outcome = place.train(max_steps=1)
    assert header_line(outcome.out, "global batch") is None
    assert header_line(outcome.out, "batches") is not None


def test_a_row_limit_without_rows_is_refused(place: Workplace) -> None:
    assert_names(place.refusal(packing="none", tokens_per_row=64), "--tokens_per_row is 64", "--packing none")


@pytest.mark.parametrize("packing", ["multipack_v1", "multipack_v2", "next_fit"])
def test_the_packings_for_comparison_train(place: Workplace, packing: str) -> None:
    outcome = place.train(packing=packing, training_seq_len=128, eval_every=100)
    assert outcome.code == 0, outcome.err
    batches = header_line(outcome.out, "batches") or ""
    assert batches.startswith(f"{packing}, ")
    assert "drops" not in batches, "on one rank nothing is"
    trained = read_events(place.directory / "out", "train")
    assert sum(values["samples"] for values in trained) == 8
    assert all(values["loss"] > 0 for values in trained)


def test_the_header_says_what_a_packing_drops(place: Workplace) -> None:
    """One rank never leaves a group short, so the header is asked for three."""
    config = TrainConfig(
        target=str(place.target),
        data=(str(place.data),),
        eval_data=(str(place.heldout),),
        packing="multipack_v2",
        training_seq_len=128,
        bucket_granularity=64,
        dtype="float32",
    )
    prepared = prepare(config)
    lengths = prepared.data.train_lengths
    schedule = Schedule(lengths, config, world_size=3)
    left_out = np.setdiff1d(np.arange(len(lengths)), schedule.plan().samples)
    assert len(left_out), "choose other lengths: something must be left over"
    batches = header_line(header(prepared, schedule, 3, 1e-4), "batches") or ""
    assert batches.endswith(f"drops {len(left_out)} samples ({lengths[left_out].sum():,} tokens)")
