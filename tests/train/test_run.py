"""A few steps of training, end to end: what a run writes, shows, repeats and goes on from."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from eagle_train.__main__ import COMMANDS
from eagle_train.config import TrainConfig
from eagle_train.data.collator import BucketingCollator
from eagle_train.data.samples import Sample
from eagle_train.flags import parse
from eagle_train.model.checkpoint import load_draft_head
from eagle_train.model.target import load_target
from eagle_train.train import loop, selection, start
from eagle_train.train.prepare import Prepared
from eagle_train.train.report import MetricsLog, format_sources
from eagle_train.train.schedule import Schedule
from tests.commands import (
    Outcome,
    conversation,
    read_events,
    run,
    write_conversations,
    write_jsonl,
)
from tests.data.templates import EMPTY, make_tokenizer, turns
from tests.tiny import write_target

SMALL = {
    "training_seq_len": 256,
    "bucket_granularity": 64,
    "ttt_steps": 3,
    "dtype": "float32",
    "num_threads": 1,
    "log_every": 1,
}
# Five packs an epoch: three steps of two micro-batches, the last of which holds one; the border is at step 3.
REFERENCE = SMALL | {"accumulation_steps": 2, "num_epochs": 2, "eval_every": 2, "save_every": 1}
NUM_CONVERSATIONS = 20
OF_THE_CLOCK = re.compile("seconds|per_second|data_wait|peak_memory")
STATE_FILES = ("weights.safetensors", "optimizer.safetensors")
TOKENIZER = make_tokenizer(None)


def words(options: dict[str, Any]) -> list[Any]:
    return [word for name, value in options.items() for word in (f"--{name}", value)]


class Workplace:
    """A directory with training data; `train` runs the command line on the tiny target."""

    def __init__(self, directory: Path, target_dir: Path) -> None:
        self.directory = directory
        self.target = target_dir
        self.data = write_conversations(directory / "data.jsonl", NUM_CONVERSATIONS)
        self.output = directory / "out"

    def train(self, *flags: object, **options: object) -> Outcome:
        named = {"target": self.target, "data": self.data, "output_dir": self.output} | SMALL | options
        return run(*words(named), *flags)

    def trained(self, *flags: object, **options: object) -> Outcome:
        outcome = self.train(*flags, **options)
        assert outcome.code == 0, outcome.err
        return outcome


@pytest.fixture
def place(tmp_path: Path, target_dir: Path) -> Workplace:
    return Workplace(tmp_path, target_dir)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> tuple[Workplace, Outcome]:
    """One uninterrupted run that several tests look at; nobody changes it."""
    place = Workplace(tmp_path_factory.mktemp("reference"), target_dir)
    return place, place.trained(**REFERENCE)


def head_bytes(output_dir: Path) -> bytes:
    return (output_dir / "model.safetensors").read_bytes()


def state_of(output_dir: Path) -> dict[str, Any]:
    return json.loads((output_dir / "state" / "state.json").read_text())


def timeless(output_dir: Path) -> list[dict[str, Any]]:
    """The train and validation events without what depends on the clock."""
    events = [values for values in read_events(output_dir) if values["event"] in ("train", "validation")]
    return [{key: value for key, value in e.items() if not OF_THE_CLOCK.search(key)} for e in events]


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(item)
    elif isinstance(value, int | float):
        yield float(value)


def assert_same_run(left: Path, right: Path) -> None:
    assert head_bytes(left) == head_bytes(right)
    for name in STATE_FILES:
        assert (left / "state" / name).read_bytes() == (right / "state" / name).read_bytes(), name
    assert timeless(left) == timeless(right)


def test_a_run_leaves_head_config_metrics_and_state(reference: tuple[Workplace, Outcome]) -> None:
    output = reference[0].output
    names = {path.name for path in output.iterdir() if path.name != "state"}
    assert names == {"model.safetensors", "config.json", "run_config.yaml", "metrics.jsonl", "README.md"}
    assert (output / "state").is_dir()
    assert {path.name for path in (output / "state").iterdir()} == {
        *STATE_FILES, "state.json", "config.json", "model.safetensors.index.json"
    }  # fmt: skip
    weights = load_file(output / "state" / STATE_FILES[0])
    stored = load_draft_head(output / "state").state_dict()
    assert all(torch.equal(stored[name], value) for name, value in weights.items())
    assert state_of(output)["step"] == 6


def test_metrics_have_the_design_s_names_and_no_nan(reference: tuple[Workplace, Outcome]) -> None:
    output = reference[0].output
    events = read_events(output)
    assert [e["event"] for e in events if e["event"] != "train"] == ["start", *["validation"] * 4, "end"]
    assert [e["step"] for e in read_events(output, "train")] == [1, 2, 3, 4, 5, 6]
    assert [e["step"] for e in read_events(output, "validation")] == [0, 2, 4, 6]
    assert all(math.isfinite(number) for values in events for number in numbers_in(values))
    for prefix, kind in (("", "train"), ("eval_", "validation")):
        for values in read_events(output, kind):
            assert len(values[f"{prefix}acceptance_rate"]) == SMALL["ttt_steps"]
            assert len(values[f"{prefix}top1_agreement"]) == SMALL["ttt_steps"]
            assert set(values[f"{prefix}acceptance_length"]) == {"3"}
            assert all(0 <= rate <= 1 for rate in values[f"{prefix}acceptance_rate"])
            assert 1 <= values[f"{prefix}acceptance_length"]["3"] <= 4
            assert values[f"{prefix}loss"] > 0
    assert all(key.startswith("eval_") for e in read_events(output, "validation") for key in list(e)[2:])
    speed = read_events(output, "train")[-1]
    assert {"learning_rate", "tokens", "tokens_per_second", "fill"} <= set(speed)


def test_the_loss_falls(reference: tuple[Workplace, Outcome]) -> None:
    losses = [values["eval_loss"] for values in read_events(reference[0].output, "validation")]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_a_person_sees_header_tables_bar_and_summary(reference: tuple[Workplace, Outcome]) -> None:
    place, outcome = reference
    out = outcome.out
    for text in (
        str(place.target),
        "19 samples",
        "1 samples, split off",
        "covers",
        "fill",
        "peak learning rate",
    ):
        assert text in out, text
    assert len(re.findall(r"^validation at step (\d+): loss", out, re.MULTILINE)) == 4
    for name in ("acceptance_rate", "top1_agreement", "acceptance_length (expected)", "bigram drafter"):
        assert len(re.findall(rf"^ +{re.escape(name)} ", out, re.MULTILINE)) == 4, name
    assert "of the held-out answer tokens are the target's own" in out
    summary = out[out.index("\ndone\n") :]
    assert str(place.output) in summary
    (served,) = re.findall(r"^  serve it +(vllm serve .*)$", summary, re.MULTILINE)
    assert served in (place.output / "README.md").read_text().splitlines()
    assert re.search(r"\d\.\d\d before, .* tokens, expected on held-out answers \(bigram", summary)
    assert re.search(r"6/6 .*loss \d+\.\d+, acceptance length \d\.\d\d, [\d,]+ tokens/s", outcome.err)


def test_the_best_head_is_kept_by_acceptance_length_and_not_by_loss(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, losses, heads = [1.0, 3.0, 2.0, 3.0], [9.0, 8.0, 1.0, 7.0], []
    measure = loop.evaluate

    def evaluate(head: Any, *args: Any, **options: Any) -> dict[str, Any]:
        heads.append(head.fc.weight.detach().clone())
        figures = {"loss": losses[len(heads) - 1], "acceptance_length": {"3": lengths[len(heads) - 1]}}
        return measure(head, *args, **options) | figures

    monkeypatch.setattr(loop, "evaluate", evaluate)
    outcome = place.trained(max_steps=3, eval_every=1)
    assert torch.equal(load_file(place.output / "model.safetensors")["fc.weight"], heads[1])
    assert not torch.equal(heads[1], heads[2])
    assert state_of(place.output)["best_step"] == 1
    assert "of step 1)" in outcome.out
    assert "3.00 after" in outcome.out


def test_paths_in_the_summary_can_be_pasted_into_a_shell(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.directory)
    outcome = place.trained(output_dir="my runs/one", max_steps=1)
    full = place.directory / "my runs" / "one"
    assert f"EAGLE_TRAIN_HEAD='{full}' jupyter" in outcome.out
    assert f'"model": "{full}"' in outcome.out


def interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["prepare", "validate", "save"])
def test_an_interrupt_before_the_first_saved_state_advises_what_works(
    place: Workplace, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    with monkeypatch.context() as patch:
        modules = {"prepare": start, "validate": loop, "save": selection}
        patch.setattr(modules[where], where, interrupt)
        interrupted = place.train(max_steps=1)
    line = interrupted.err.splitlines()[-1]
    assert (interrupted.code, "--resume" in line) == (130, False)
    if where == "prepare":
        assert line == "eagle_train: interrupted; the same command starts again"
        assert not place.output.exists()
        place.trained(max_steps=1)
        return
    assert line.endswith("nothing is lost: the same command starts anew")
    place.trained(max_steps=1)
    place.trained("--resume", max_steps=2)


@pytest.mark.parametrize("last_step", [0, 1, 2, 3, 4, 5])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_by_bit(
    place: Workplace,
    reference: tuple[Workplace, Outcome],
    monkeypatch: pytest.MonkeyPatch,
    last_step: int,
) -> None:
    options = REFERENCE | {"data": reference[0].data}
    train_step = loop.train_step

    def stop(run: loop.Run, window: Any) -> Any:
        if run.state.step == last_step:
            raise KeyboardInterrupt
        return train_step(run, window)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", stop)
        interrupted = place.train(**options)
    assert interrupted.code == 130
    assert "--resume" in interrupted.err.splitlines()[-1]
    assert state_of(place.output)["step"] == last_step
    place.trained("--resume", **options)
    assert_same_run(place.output, reference[0].output)


def test_steps_behind_the_saved_state_are_done_again(
    place: Workplace, reference: tuple[Workplace, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = REFERENCE | {"data": reference[0].data, "save_every": 6}
    train_step = loop.train_step

    def stop(run: loop.Run, window: Any) -> Any:
        if run.state.step == 3:
            raise KeyboardInterrupt
        return train_step(run, window)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", stop)
        place.train(**options)
    with (place.output / "metrics.jsonl").open("a") as file:
        file.write('{"event": "tra')  # as a crash may leave it
    place.trained("--resume", **options)
    assert_same_run(place.output, reference[0].output)


def test_an_interrupted_swap_of_states_is_mended(place: Workplace) -> None:
    place.trained(max_steps=2)
    (place.output / "state").rename(place.output / "state.old")
    place.trained("--resume", max_steps=3)
    assert state_of(place.output)["step"] == 3


def test_a_finished_run_can_be_prolonged(place: Workplace) -> None:
    place.trained(max_steps=1)
    place.trained("--resume", max_steps=2)
    assert [values["step"] for values in read_events(place.output, "train")] == [1, 2]


def test_resuming_under_other_options_is_refused_by_name(place: Workplace) -> None:
    place.trained(max_steps=1)
    other = write_conversations(place.directory / "other.jsonl", 8)
    assert "the data differ" in place.train("--resume", data=other).refusal()
    assert "--packing multipack -> none" in place.train("--resume", packing="none").refusal()
    assert "--seed 0 -> 1" in place.train("--resume", seed=1).refusal()


def test_resuming_on_changed_data_is_refused(place: Workplace) -> None:
    place.trained(max_steps=1)
    text = place.data.read_text()
    place.data.write_text(text.replace("today", "to day"))
    line = place.train("--resume", max_steps=2).refusal()
    assert "the data differ" in line
    assert "or an earlier package version, which did not keep copies together, split them" in line
    same_lengths = text.replace('"4"', '"5"')
    assert same_lengths != text
    place.data.write_text(same_lengths)
    assert "the data differ" in place.train("--resume", max_steps=2).refusal()


def test_a_state_of_another_head_is_refused(place: Workplace) -> None:
    place.trained(max_steps=1)
    path = place.output / "state" / "weights.safetensors"
    weights = load_file(path)
    save_file(weights | {"fc.weight": weights["fc.weight"][:5].clone()}, path)
    assert "fc.weight" in place.train("--resume", max_steps=2).refusal()
    path.write_bytes(b"nothing")
    assert "cannot be read" in place.train("--resume", max_steps=2).refusal()


def test_a_config_file_says_the_same_as_flags_and_flags_win(tmp_path: Path) -> None:
    options = {
        "target": "t",
        "data": "a.jsonl",
        "packing": "none",
        "padding_free": False,
        "learning_rate": 2e-4,
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(options | {"aux_layer_ids": [1, 2, 3]}))

    def parsed(*flags: object) -> TrainConfig:
        return parse(TrainConfig, [str(flag) for flag in flags], command="train", description="")

    by_file = parsed("--config", path)
    assert by_file == parsed(*words(options), "--aux_layer_ids", 1, 2, 3)
    assert by_file.data == ("a.jsonl",)
    assert by_file.aux_layer_ids == (1, 2, 3)
    assert parsed("--config", path, "--learning_rate", 2).learning_rate == 2
    assert parsed("--learning_rate", 2, "--config", path).learning_rate == 2
    path.write_text("learning_rate: 1e-4\ntarget: t\ndata: a.jsonl\n")  # for YAML, 1e-4 is text
    assert parsed("--config", path).learning_rate == 1e-4


def test_the_saved_options_repeat_the_run(place: Workplace, reference: tuple[Workplace, Outcome]) -> None:
    saved = reference[0].output / "run_config.yaml"
    outcome = run("--config", saved, "--output_dir", place.output)
    assert outcome.code == 0, outcome.err
    assert_same_run(place.output, reference[0].output)


def test_the_saved_options_of_a_resumed_run_start_a_new_one(place: Workplace) -> None:
    place.trained(max_steps=1)
    place.trained("--resume", max_steps=2)
    saved = yaml.safe_load((place.output / "run_config.yaml").read_text())
    assert (saved["resume"], saved["overwrite"], saved["max_steps"]) == (False, False, 2)


def test_template_options_are_saved_and_their_lack_is_shown(place: Workplace) -> None:
    target = write_target(place.directory / "thinking", template=EMPTY)
    outcome = place.trained(target=target, max_steps=1)
    assert f"{NUM_CONVERSATIONS} x answer opens with template text" in outcome.out
    assert re.search(r"^  note: .*data\.jsonl:1", outcome.out, re.MULTILINE)
    flags = ("--overwrite", "--template_options", "enable_thinking=false")
    assert "opens with template text" not in place.trained(*flags, target=target, max_steps=1).out
    saved = yaml.safe_load((place.output / "run_config.yaml").read_text())
    assert saved["template_options"] == ["enable_thinking=false"]


def poison(target_dir: Path, directory: Path, text: str) -> Path:
    """A copy of the target whose embedding of `text` is not a number."""
    shutil.copytree(target_dir, directory)
    weights = load_file(directory / "model.safetensors")
    (token,) = TOKENIZER.encode(text, add_special_tokens=False)
    weights["model.embed_tokens.weight"][token] = float("nan")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_a_loss_that_is_not_finite_stops_the_run_with_the_state_of_the_step_before(place: Workplace) -> None:
    target = poison(place.target, place.directory / "poisoned", "Z")
    rows = [conversation(index) for index in range(8)]
    data = write_jsonl(
        place.directory / "z.jsonl", [*rows[:5], {"messages": turns("Z", "four yes")}, *rows[5:]]
    )
    heldout = write_jsonl(place.directory / "heldout.jsonl", rows[:2])
    options = {"target": target, "data": data, "eval_data": heldout, "packing": "none", "batch_size": 1}
    line = place.train(**options, eval_every=20).refusal()
    match = re.search(
        r"not finite at step (\d+), on (\S+); the state of step (\d+) is saved in (\S+)\.", line
    )
    assert match, line
    failed, source, saved, folder = match.groups()
    assert source == f"{data}:6"
    assert int(failed) >= 2, "choose another seed: the fault should come behind a good step"
    assert int(saved) == int(failed) - 1 == state_of(place.output)["step"]
    assert folder == str(place.output / "state")
    assert all(bool(tensor.isfinite().all()) for tensor in load_file(Path(folder) / STATE_FILES[0]).values())
    assert "--dtype float32" in line
    again = place.train("--resume", **options, eval_every=20).refusal()
    assert f"not finite at step {failed}" in again


def test_a_validation_that_is_not_finite_names_its_samples_and_blocks_nothing(place: Workplace) -> None:
    target = poison(place.target, place.directory / "poisoned", "Z")
    heldout = write_jsonl(place.directory / "heldout.jsonl", [{"messages": turns("Z", "four yes")}])
    options = {"target": target, "max_steps": 1}
    line = place.train(**options, eval_data=heldout).refusal()
    assert "validation loss is not finite" in line
    assert f"{heldout}:1" in line
    good = write_jsonl(place.directory / "good.jsonl", [conversation(0)])
    place.trained(**options, eval_data=good)
    assert len(read_events(place.output, "start")) == 1
    place.train("--overwrite", **options, eval_data=heldout).refusal()
    assert {path.name for path in place.output.iterdir()} == {"run_config.yaml", "metrics.jsonl"}


def test_long_lists_of_sources_are_cut() -> None:
    assert format_sources(["a:1", "a:2"]) == "a:1, a:2"
    assert format_sources([f"a:{line}" for line in range(1, 9)]) == "a:1, a:2, a:3, a:4, a:5 and 3 more"


def test_steps_may_go_beyond_an_epoch(place: Workplace) -> None:
    data = write_conversations(place.directory / "few.jsonl", 6)
    place.trained(data=data, max_steps=5, eval_every=5, packing="none", batch_size=3)
    events = read_events(place.output, "train")
    assert [values["step"] for values in events] == [1, 2, 3, 4, 5]
    tokens = [values["total_tokens"] for values in events]
    assert tokens[3] == 2 * tokens[1], "an epoch is two steps and trains on every sample once"


def test_each_epoch_has_an_order_of_its_own(
    reference: tuple[Workplace, Outcome], place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    train_step = loop.train_step

    def watch(run: loop.Run, window: Any) -> Any:
        seen.append([source for batch in window for source in batch.sources])
        return train_step(run, window)

    monkeypatch.setattr(loop, "train_step", watch)
    place.trained(**REFERENCE | {"data": reference[0].data, "eval_every": 6, "save_every": 6})
    first, second = ([source for step in epoch for source in step] for epoch in (seen[:3], seen[3:]))
    assert first != second
    assert sorted(first) == sorted(second)
    assert len(set(first)) == len(first) == NUM_CONVERSATIONS - 1


def test_a_single_sample_trains_at_least_a_step(place: Workplace) -> None:
    data = write_conversations(place.directory / "one.jsonl", 1)
    outcome = place.trained(data=data)
    assert [values["step"] for values in read_events(place.output, "train")] == [1]
    assert read_events(place.output, "validation") == []
    assert read_events(place.output, "end")[0]["best_step"] is None
    assert "nothing is validated" in outcome.out
    assert (place.output / "model.safetensors").is_file()
    weights = load_file(place.output / "state" / STATE_FILES[0])
    assert torch.equal(load_file(place.output / "model.safetensors")["fc.weight"], weights["fc.weight"])


def test_a_figure_without_anything_to_measure_is_missing(place: Workplace) -> None:
    data = write_jsonl(
        place.directory / "short.jsonl", [{"messages": turns("yes " * (i + 1), "4")} for i in range(6)]
    )
    outcome = place.trained(data=data, max_steps=1)
    values = read_events(place.output, "validation")[0]
    assert values["eval_acceptance_rate"][0] is not None
    assert values["eval_acceptance_rate"][1:] == [None, None]
    assert re.search(r"^  acceptance_rate +\d\.\d+ +- +-$", outcome.out, re.MULTILINE)


FORMS = {
    "multipack": {},
    "flat": {"packing": "none", "batch_size": 8, "padding_free": True},
    "padded": {"packing": "none", "batch_size": 8, "padding_free": False},
}


def test_every_batch_form_trains_alike_on_the_same_samples(place: Workplace) -> None:
    data = write_conversations(place.directory / "few.jsonl", 8)
    heldout = write_conversations(place.directory / "heldout.jsonl", 5)
    options = {"data": data, "eval_data": heldout, "training_seq_len": 512, "max_steps": 2, "eval_every": 1}
    outputs = {name: place.directory / name for name in FORMS}
    outcomes = {name: place.trained(**options, **FORMS[name], output_dir=outputs[name]) for name in FORMS}
    assert all("1 micro-batches an epoch" in outcome.out for outcome in outcomes.values())
    assert "8x64 (x1)" in outcomes["padded"].out
    expected = timeless(outputs["multipack"])
    assert [values["step"] for values in expected] == [0, 1, 1, 2, 2]
    for name in ("flat", "padded"):
        for values, wanted in zip(timeless(outputs[name]), expected, strict=True):
            figures = [
                list(numbers_in(each | {"fill": 0, "slots": 0, "bucket_len": 0})) for each in (values, wanted)
            ]
            assert figures[0] == pytest.approx(figures[1], rel=1e-5, abs=1e-6), name


def test_packing_does_not_change_the_first_validation(
    place: Workplace, reference: tuple[Workplace, Outcome]
) -> None:
    wanted = read_events(reference[0].output, "validation")[0]
    for index, options in enumerate(({"training_seq_len": 128}, {"packing": "none", "padding_free": False})):
        output = place.directory / str(index)
        place.trained(**options, data=reference[0].data, max_steps=1, output_dir=output)
        values = read_events(output, "validation")[0]
        assert list(numbers_in(values)) == pytest.approx(list(numbers_in(wanted)), rel=1e-6)


def test_bfloat16_saves_a_bfloat16_head_over_float32_masters(place: Workplace) -> None:
    place.trained(dtype="bfloat16", max_steps=2)
    head = load_file(place.output / "model.safetensors")
    assert {tensor.dtype for tensor in head.values() if tensor.is_floating_point()} == {torch.bfloat16}
    assert json.loads((place.output / "config.json").read_text())["torch_dtype"] == "bfloat16"
    masters = load_file(place.output / "state" / STATE_FILES[0])
    assert {t.dtype for t in masters.values() if t.is_floating_point()} == {torch.float32}
    moved = masters["fc.weight"]
    assert not torch.equal(moved, moved.bfloat16().float()), "masters keep what bfloat16 would round away"


def test_the_seed_changes_the_weights(place: Workplace) -> None:
    outputs = [place.directory / str(seed) for seed in (0, 1)]
    for seed, output in enumerate(outputs):
        place.trained(max_steps=1, seed=seed, output_dir=output)
    assert head_bytes(outputs[0]) != head_bytes(outputs[1])


def test_only_the_draft_head_is_trained(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Prepared] = []
    prepare = start.prepare

    def remember(*arguments: Any) -> Prepared:
        kept.append(prepare(*arguments))
        return kept[-1]

    monkeypatch.setattr(start, "prepare", remember)
    place.trained(max_steps=2)
    (prepared,) = kept
    assert not any(parameter.requires_grad for parameter in prepared.target.model.parameters())
    fresh = load_target(str(place.target), dtype=torch.float32, device=torch.device("cpu")).model.state_dict()
    trained = prepared.target.model.state_dict()
    assert set(fresh) == set(trained)
    assert all(torch.equal(fresh[name], trained[name]) for name in fresh)
    fields_of = prepared.head.config
    size, width, vocabulary = fields_of.hidden_size, fields_of.intermediate_size, fields_of.draft_vocab_size
    heads = 2 * fields_of.num_attention_heads + 2 * fields_of.num_key_value_heads
    attention = (
        heads * fields_of.head_dim * 2 * size - fields_of.num_attention_heads * fields_of.head_dim * size
    )
    expected = 3 * size * size + attention + 3 * size * width + vocabulary * size + 4 * size
    assert sum(p.numel() for p in prepared.head.parameters() if p.requires_grad) == expected


def test_a_step_without_supervision_changes_nothing_and_is_counted(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.arange(10, dtype=np.int32)
    empty = BucketingCollator(64)([Sample(ids, np.zeros(10, dtype=np.int32), "empty:1")])
    windows, heads, steps = Schedule.windows, [], []
    train_step = loop.train_step

    def with_a_gap(*args: Any, **options: Any) -> Iterator[Any]:
        for index, window in enumerate(windows(*args, **options)):
            yield replace(window, batches=[empty]) if index == 1 else window

    def watch(run: loop.Run, window: Any) -> Any:
        result = train_step(run, window)
        heads.append(run.prepared.head.fc.weight.detach().clone())
        parameter = run.prepared.head.fc.weight
        steps.append(float(run.optimizer.state[parameter]["step"]))
        return result

    monkeypatch.setattr(Schedule, "windows", with_a_gap)
    monkeypatch.setattr(loop, "train_step", watch)
    outcome = place.trained(max_steps=3, eval_every=3)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[1], heads[2])
    assert steps == [1, 1, 2]
    values = read_events(place.output, "train")[1]
    assert (values["loss"], values["acceptance_rate"], values["empty_steps"]) == (None, [None] * 3, 1)
    assert re.search("empty steps +1 without a supervised row", outcome.out)


def test_a_missing_figure_is_null_and_nan_is_never_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write("train", 1, {"loss": None})
    with pytest.raises(ValueError, match="JSON"):
        log.write("train", 2, {"loss": float("nan")})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"event": "train", "step": 1, "loss": null}\n'


def command_line(*flags: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(
        [sys.executable, "-m", "eagle_train", *map(str, flags)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_help_lists_every_command_and_option_with_its_default(tmp_path: Path) -> None:
    shown = command_line("--help", cwd=tmp_path)
    assert shown.returncode == 0
    for name in COMMANDS:
        assert re.search(rf"^  {name} +\w", shown.stdout, re.MULTILINE), name
    entries = re.split(r"\n  (?=--)", shown.stdout)
    by_flag = {entry.split()[0]: " ".join(entry.split()) for entry in entries[1:]}
    for f in fields(TrainConfig):
        entry = by_flag[f"--{f.name}"]
        assert f.metadata["help"].split()[0] in entry
        if f.default not in (None, ()):
            assert f"[{f.default}]" in entry, entry
        else:
            assert (
                "none:" in entry
                or f.default == ()
                or f.name in ("target", "max_steps", "mock_target", "tokens_per_step", "effective_batch_size")
            ), entry
    for group in ("target:", "data:", "batches:", "draft head:", "optimizer:", "run:"):
        assert f"\n{group}\n" in shown.stdout


DEMO = Path(__file__).resolve().parents[2] / "eagle_train" / "demo" / "target"


@pytest.mark.skipif(not (DEMO / "model.safetensors").is_file(), reason="the demo target is not built here")
def test_without_target_and_data_the_demo_is_trained(tmp_path: Path) -> None:
    flags = {
        "max_steps": 2,
        "max_samples": 8,
        "max_eval_samples": 4,
        "training_seq_len": 1024,
        "dtype": "float32",
    }
    outcome = command_line(*words(flags), "--num_threads", 1, cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    assert "the bundled demo target" in outcome.stdout
    output = tmp_path / "runs" / "eagle3"
    assert (output / "model.safetensors").is_file()
    assert read_events(output, "validation")[0]["eval_acceptance_length"]["7"] < 1.5
