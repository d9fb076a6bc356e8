"""Training on mock data and mock targets, and the speed figures of a run."""

import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_train.config import TrainConfig
from eagle_train.train import loop
from eagle_train.train.schedule import Schedule
from eagle_train.train.splits import prepare_data
from tests.commands import Outcome, read_events, run, write_conversations

MOCK_TARGET = "64,8,512"
SMALL = {
    "training_seq_len": 256,
    "bucket_granularity": 64,
    "mock_num_samples": 24,
    "mock_len": "uniform:8:120",
    "ttt_steps": 2,
    "dtype": "float32",
    "num_threads": 1,
    "log_every": 1,
    "max_steps": 4,
    "eval_every": 2,
}
RATES = ("samples_per_second", "tokens_per_second", "supervised_tokens_per_second", "slots_per_second")
COUNTS = ("samples", "tokens", "supervised_tokens", "slots")
SPEED = (*RATES, "fill", "bucket_len", "imbalance", "data_wait_share", "peak_memory_gib", "step_seconds",
         "epoch_seconds")  # fmt: skip


def words(options: dict[str, Any]) -> list[Any]:
    return [word for name, value in options.items() for word in (f"--{name}", value)]


class Workplace:
    """A directory for the output of mock runs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.output = directory / "out"

    def train(self, *flags: object, **options: object) -> Outcome:
        """Train on mock data, by default on random features; an option None is not named."""
        named = {"output_dir": self.output, "mock_target": MOCK_TARGET} | SMALL | options
        named = {name: value for name, value in named.items() if value is not None}
        return run("--mock_data", *words(named), *flags)

    def trained(self, *flags: object, **options: object) -> Outcome:
        outcome = self.train(*flags, **options)
        assert outcome.code == 0, outcome.err
        return outcome

    def start_event(self) -> dict[str, Any]:
        return read_events(self.output, "start")[0]


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workplace, Outcome]:
    """One uninterrupted mock run that several tests look at; nobody changes it."""
    place = Workplace(tmp_path_factory.mktemp("reference"))
    return place, place.trained()


def fact(out: str, name: str) -> str:
    """A line of the header or the summary."""
    match = re.search(rf"^  {name} +(.+)$", out, re.MULTILINE)
    assert match, f"no line {name!r} in: {out}"
    return match[1]


def state_of(output: Path) -> dict[str, Any]:
    return json.loads((output / "state" / "state.json").read_text())


def files_of(output: Path) -> list[bytes]:
    names = ("model.safetensors", "state/weights.safetensors", "state/optimizer.safetensors")
    return [(output / name).read_bytes() for name in names]


def test_a_mock_run_says_what_it_trains_on_and_that_it_is_not_to_be_served(
    reference: tuple[Workplace, Outcome],
) -> None:
    out = reference[1].out
    assert re.match(
        r"random features \(MockTarget, 8 layers, hidden 64, float32 on cpu\)", fact(out, "target")
    )
    assert re.match(r"24 mock samples, [\d,]+ tokens, mean length \d+", fact(out, "training data"))
    assert fact(out, "held-out data") == "1 other mock samples"
    assert fact(out, "serve it").startswith("no:")
    assert "vllm serve" not in out
    assert "jupyter" not in out
    assert (reference[0].output / "model.safetensors").is_file()


def test_a_mock_run_is_the_same_each_time(place: Workplace, reference: tuple[Workplace, Outcome]) -> None:
    place.trained()
    assert files_of(place.output) == files_of(reference[0].output)
    place.trained("--overwrite", seed=1)
    assert files_of(place.output) != files_of(reference[0].output)


def interrupt_at(place: Workplace, monkeypatch: pytest.MonkeyPatch, step: int, **options: object) -> None:
    train_step = loop.train_step

    def stop(run: loop.Run, window: Any) -> Any:
        if run.state.step == step:
            raise KeyboardInterrupt
        return train_step(run, window)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", stop)
        assert place.train(**options).code == 130
    assert state_of(place.output)["step"] == step


def test_an_interrupted_mock_run_goes_on_to_the_same_weights(
    place: Workplace, reference: tuple[Workplace, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(place, monkeypatch, 2)
    place.trained("--resume")
    assert files_of(place.output) == files_of(reference[0].output)


def test_a_resumed_run_goes_on_with_its_averages_and_totals(
    place: Workplace, reference: tuple[Workplace, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(place, monkeypatch, 2)
    before = state_of(place.output)["statistics"]
    assert before["updates"] == 2
    place.trained("--resume", ema_alpha=0.5)
    after, uninterrupted = (state_of(p.output)["statistics"] for p in (place, reference[0]))
    assert after["updates"] == uninterrupted["updates"] == 4
    assert {name: after["totals"][name] for name in COUNTS} == {
        name: uninterrupted["totals"][name] for name in COUNTS
    }
    assert after["totals"]["seconds"] > before["totals"]["seconds"]
    tokens = [values["tokens"] for values in read_events(place.output, "train")]
    expected = 0.25 * before["averages"]["tokens"] + 0.25 * tokens[2] + 0.5 * tokens[3]
    assert after["averages"]["tokens"] == pytest.approx(expected)


def test_the_averages_are_unbiased_from_the_first_step_on(reference: tuple[Workplace, Outcome]) -> None:
    """The last line can be made again from the counts of all, whose weights are 0.9^age."""
    events = read_events(reference[0].output, "train")
    weights = [0.9 ** (len(events) - 1 - index) for index in range(len(events))]
    means = [
        sum(w * values[name] for w, values in zip(weights, events, strict=True)) / sum(weights)
        for name in COUNTS
    ]
    last = events[-1]
    shown = [last[rate] * last["step_seconds"] for rate in RATES]
    assert shown == pytest.approx(means, rel=1e-6)


def test_every_train_event_has_every_speed_figure(reference: tuple[Workplace, Outcome]) -> None:
    events = read_events(reference[0].output, "train")
    assert [values["step"] for values in events] == [1, 2, 3, 4]
    for values in events:
        for key in SPEED:
            assert isinstance(values[key], int | float), key
            assert math.isfinite(values[key]), key
            assert values[key] > 0, key
        assert values["fill"] == values["tokens"] / values["slots"] <= 1
        assert values["slots"] == values["bucket_len"]
        assert values["bucket_len"] % 64 == 0
        assert values["imbalance"] == 1.0, "one rank is its own mean"
        assert values["data_wait_share"] < 1
        assert 0 < values["supervised_tokens"] < values["tokens"]
    assert [values["total_tokens"] for values in events] == list(
        np.cumsum([values["tokens"] for values in events])
    )


def test_time_per_epoch_is_the_step_s_times_the_epoch_s_steps(place: Workplace) -> None:
    options = {"accumulation_steps": 2, "max_steps": None, "num_epochs": 1}
    place.trained(**options)
    events = read_events(place.output, "train")
    assert len(events) >= 2
    for values in events:
        assert values["epoch_seconds"] == pytest.approx(len(events) * values["step_seconds"])


def test_waiting_for_data_is_part_of_a_step_and_shown_as_its_share(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows, wait = Schedule.windows, 0.1

    def slowly(*args: Any, **options: Any) -> Iterator[Any]:
        for window in windows(*args, **options):
            time.sleep(wait)
            yield window

    monkeypatch.setattr(Schedule, "windows", slowly)
    place.trained(max_steps=2, eval_fraction=0)
    (end,) = read_events(place.output, "end")
    assert end["data_seconds"] >= 2 * wait
    for values in [end, *read_events(place.output, "train")]:
        assert 0.2 < values["data_wait_share"] < 1
        assert values["tokens_per_second"] < 256 / wait
    assert all(values["step_seconds"] >= wait for values in read_events(place.output, "train"))


def test_start_event_and_header_say_total_tokens_and_average_length(
    reference: tuple[Workplace, Outcome],
) -> None:
    start = reference[0].start_event()
    assert (start["train_samples"], start["heldout_samples"]) == (24, 1)
    assert start["train_mean_length"] == pytest.approx(start["train_tokens"] / 24)
    shown = f"{start['train_tokens']:,} tokens, mean length {start['train_mean_length']:.0f}"
    assert shown in reference[1].out


def test_summary_and_end_event_have_the_totals_of_all_steps(reference: tuple[Workplace, Outcome]) -> None:
    place, outcome = reference
    events = read_events(place.output, "train")
    (end,) = read_events(place.output, "end")
    sums = {name: sum(values[name] for values in events) for name in COUNTS}
    assert {name: end[name] for name in COUNTS} == sums
    for name, rate in zip(COUNTS, RATES, strict=True):
        assert end[rate] == pytest.approx(sums[name] / end["seconds"])
    assert end["fill"] == pytest.approx(sums["tokens"] / sums["slots"])
    assert end["data_wait_share"] == pytest.approx(end["data_seconds"] / end["seconds"])
    assert end["peak_memory_gib"] >= events[-1]["peak_memory_gib"]
    steps, speed = fact(outcome.out, "steps"), fact(outcome.out, "per second")
    assert steps.startswith("4 in ")
    assert f"{sums['samples']:,} samples, {sums['tokens']:,} tokens, " in steps
    assert f"{sums['supervised_tokens']:,} supervised" in steps
    assert [word for word in ("samples", "tokens", "supervised tokens", "slots") if word not in speed] == []
    assert f"(fill {end['fill']:.1%})" in speed
    assert fact(outcome.out, "waited for data") == f"{end['data_wait_share']:.1%} of the time"
    assert fact(outcome.out, "peak memory") == f"{end['peak_memory_gib']:.2f} GiB"


@pytest.mark.parametrize(
    "form",
    [
        {"packing": "next_fit"},
        {"packing": "none", "batch_size": 3},
        {"packing": "none", "batch_size": 3, "padding_free": "false"},
    ],
)
def test_every_batch_form_runs_on_mock_data(place: Workplace, form: dict[str, Any]) -> None:
    place.trained(**form, max_steps=None, num_epochs=1)
    events = read_events(place.output, "train")
    assert sum(values["samples"] for values in events) == 24
    assert sum(values["tokens"] for values in events) == place.start_event()["train_tokens"]


def test_a_real_target_trains_on_mock_data(place: Workplace, target_dir: Path) -> None:
    outcome = place.trained(mock_target=None, target=target_dir, max_steps=2)
    assert fact(outcome.out, "target").startswith(f"{target_dir} (LlamaForCausalLM")
    assert [values["step"] for values in read_events(place.output, "validation")] == [0, 2]
    place.trained("--resume", mock_target=None, target=target_dir, max_steps=3)
    assert state_of(place.output)["step"] == 3


def test_without_a_target_the_demo_s_trains_on_mock_data(place: Workplace) -> None:
    outcome = place.trained(mock_target=None, max_steps=1, mock_num_samples=4, eval_fraction=0)
    assert fact(outcome.out, "target").startswith("the bundled demo target")


def test_nothing_is_held_out_without_an_eval_fraction(place: Workplace) -> None:
    outcome = place.trained(eval_fraction=0)
    assert fact(outcome.out, "held-out data").startswith("none: nothing is validated")
    assert place.start_event()["heldout_samples"] == 0
    assert read_events(place.output, "validation") == []
    (end,) = read_events(place.output, "end")
    assert end["best_step"] is None
    assert "nothing was held out" in fact(outcome.out, "best head")


def test_a_share_of_mock_samples_is_held_out_beside_the_others(place: Workplace) -> None:
    place.trained(eval_fraction=0.25, max_steps=1)
    start = place.start_event()
    assert (start["train_samples"], start["heldout_samples"]) == (24, 6)
    place.trained("--overwrite", eval_fraction=0.25, max_eval_samples=2, max_steps=1)
    assert place.start_event()["heldout_samples"] == 2
    data = prepare_data(TrainConfig(mock_data=True, mock_num_samples=40), None, 512, None)
    texts = {sample.input_ids.tobytes() for sample in data.train_samples}
    assert len(data.heldout_samples) == 2
    assert all(sample.input_ids.tobytes() not in texts for sample in data.heldout_samples)


@pytest.mark.parametrize("name", ["lengths.npy", "lengths.txt"])
def test_lengths_may_come_from_a_file(place: Workplace, name: str) -> None:
    lengths = [10, 200, 33, 64, 5]
    path = place.directory / name
    if name.endswith("npy"):
        np.save(path, np.array(lengths))
    else:
        path.write_text("".join(f"{length}\n" for length in lengths))
    place.trained(mock_len=path, mock_num_samples=None, max_steps=1)
    start = place.start_event()
    assert (start["train_samples"], start["train_tokens"]) == (5, sum(lengths))
    place.trained("--overwrite", mock_len=path, mock_num_samples=7, max_steps=1)
    assert place.start_event()["train_tokens"] == sum(lengths) + 10 + 200


def write_overlong(place: Workplace) -> Path:
    path = place.directory / "lengths.txt"
    path.write_text("300\n2\n257\n256\n100\n")
    return path


@pytest.mark.parametrize(
    ("overlong", "counts", "shown"),
    [
        ("truncate", (2, 45, 0, 0), "2 cut to 256 tokens (45 tokens lost)"),
        ("drop", (0, 0, 2, 557), "2 dropped above 256 tokens (557 tokens lost)"),
    ],
)
def test_overlong_mock_samples_are_cut_or_dropped_and_counted(
    place: Workplace, overlong: str, counts: Sequence[int], shown: str
) -> None:
    path = write_overlong(place)
    outcome = place.trained(mock_len=path, mock_num_samples=None, overlong=overlong, max_steps=1)
    data = fact(outcome.out, "training data")
    assert shown in data
    assert "1 without a supervised row left out" in data
    start = place.start_event()
    keys = ("truncated_samples", "truncated_tokens", "dropped_samples", "dropped_tokens")
    assert tuple(start["train_data"]["length"][key] for key in keys) == counts
    assert start["train_data"]["length"]["unsupervised_samples"] == 1
    kept = [256, 256, 256, 100] if overlong == "truncate" else [256, 100]
    assert (start["train_samples"], start["train_tokens"]) == (len(kept), sum(kept))


def test_an_overlong_mock_sample_is_refused_on_request(place: Workplace) -> None:
    line = place.train(mock_len=write_overlong(place), overlong="error").refusal()
    assert "300 tokens, the limit is 256" in line


def test_mock_samples_end_where_the_target_s_positions_do(place: Workplace, target_dir: Path) -> None:
    options = {"mock_target": None, "target": target_dir, "training_seq_len": 1024, "mock_len": 600}
    outcome = place.trained(**options, mock_num_samples=2, eval_fraction=0, max_steps=1)
    assert "2 cut to 512 tokens (176 tokens lost)" in fact(outcome.out, "training data")


def test_the_loss_share_is_that_of_the_supervised_tokens(place: Workplace) -> None:
    place.trained(mock_len=100, mock_loss_share=0.2, max_steps=2)
    for values in read_events(place.output, "train"):
        # An answer of 20 tokens has 19 rows at step 0: its first token is the prompt's.
        assert values["supervised_tokens"] == 19 * values["samples"]
        assert values["tokens"] == 100 * values["samples"]


FAULTS = {
    "a length without mock data": ({"mock_len": 5}, ("--mock_len", "without --mock_data", "add it")),
    "a count without mock data": ({"mock_num_samples": 5}, ("--mock_num_samples", "without --mock_data")),
    "a share without mock data": ({"mock_loss_share": 0.5}, ("--mock_loss_share", "without --mock_data")),
    "a mock target without mock data": (
        {"mock_target": MOCK_TARGET},
        ("--mock_target", "without --mock_data"),
    ),
    "mock data and data": (
        {"mock_data": "true", "data": "data.jsonl"},
        ("--mock_data and --data", "drop one"),
    ),
    "two targets": (
        {"mock_data": "true", "mock_target": MOCK_TARGET, "target": "demo"},
        ("--mock_target and --target", "drop one"),
    ),
    "held-out data beside mock data": (
        {"mock_data": "true", "eval_data": "data.jsonl"},
        ("--eval_data", "without --data"),
    ),
    "no loss": ({"mock_data": "true", "mock_loss_share": 0}, ("--mock_loss_share is 0", "above 0")),
    "more loss than tokens": ({"mock_data": "true", "mock_loss_share": 1.5}, ("--mock_loss_share is 1.5",)),
    "no sample": ({"mock_data": "true", "mock_num_samples": 0}, ("--mock_num_samples is 0", "at least 1")),
    "a mock target of two numbers": (
        {"mock_data": "true", "mock_target": "64,8"},
        ("--mock_target is '64,8'", "hidden,layers,vocab"),
    ),
    "a mock target of too few layers": (
        {"mock_data": "true", "mock_target": "64,4,512"},
        ("4 layers", "--aux_layer_ids"),
    ),
    "lengths that are none": (
        {"mock_data": "true", "mock_target": MOCK_TARGET, "mock_len": "normal:5"},
        ("--mock_len", "'normal:5'", "uniform:a:b"),
    ),
    "samples too short to be trained on": (
        {"mock_data": "true", "mock_target": MOCK_TARGET, "mock_len": 2},
        ("--mock_len 2", "supervised row", "other lengths"),
    ),
}


@pytest.mark.parametrize(("options", "parts"), FAULTS.values(), ids=FAULTS)
def test_mock_options_that_make_no_sense_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], parts: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_conversations(tmp_path / "data.jsonl", 3)
    line = run("train", *words({"output_dir": "out"} | options)).refusal()
    for part in parts:
        assert part in line, line
    assert not (tmp_path / "out").exists()


def test_resuming_on_other_mock_data_is_refused(place: Workplace) -> None:
    place.trained(max_steps=1)
    line = place.train("--resume", mock_loss_share=0.9).refusal()
    assert "--mock_loss_share None -> 0.9" in line
    assert (
        "--mock_len uniform:8:120 -> uniform:8:121"
        in place.train("--resume", mock_len="uniform:8:121").refusal()
    )
    path = place.directory / "lengths.txt"
    path.write_text("40\n50\n")
    place.trained("--overwrite", mock_len=path, max_steps=1)
    path.write_text("50\n40\n")
    assert "the data differ" in place.train("--resume", mock_len=path, max_steps=2).refusal()


def test_a_mock_run_has_its_notes_too(place: Workplace) -> None:
    options = {"mock_len": 100, "max_steps": 1, "num_epochs": 3, "accumulation_steps": 500}
    out = place.trained(**options, tokens_per_row=200).out
    for words in (
        "note: --num_epochs 3 has no effect, because --max_steps 1",
        "note: --tokens_per_row 200: rows are filled to 256 tokens",
        "note: --accumulation_steps 500: an epoch has",
    ):
        assert words in out
    assert out.count("note: ") == 3, "random tokens are not told to be another writer's"
    assert len(place.start_event()["notes"]) == 3
