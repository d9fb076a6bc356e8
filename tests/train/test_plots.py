"""`python -m eagle_train plot`: what is drawn from metrics.jsonl, and what cannot be."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_train.train.plots import RunMetrics, draw_runs, read_run, run_labels, shown_length
from tests.commands import run, write_conversations

PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Path:
    """A real run of four steps, with a measured event as in-training measuring writes it."""
    place = tmp_path_factory.mktemp("plots")
    data = write_conversations(place / "data.jsonl", 12)
    shape = ("--training_seq_len", 256, "--bucket_granularity", 64, "--ttt_steps", 3, "--max_steps", 4)
    how = ("--log_every", 1, "--eval_every", 2, "--eval_fraction", 0.5, "--dtype", "float32")
    paths = ("--target", target_dir, "--data", data, "--output_dir", place / "run")
    outcome = run(*paths, *shape, *how, "--num_threads", 1)
    assert outcome.code == 0, outcome.err
    measured = {"event": "measured", "step": 2, "num_speculative_tokens": 3}
    length = {"acceptance_length": {"value": 1.4, "low": 1.2, "high": 1.7}}
    with (place / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(measured | length) + "\n")
    return place / "run"


def lines_of(panel: Any) -> list[np.ndarray]:
    return [line.get_xydata() for line in panel.get_lines()]


def test_the_command_draws_one_or_several_runs(run_dir: Path, tmp_path: Path) -> None:
    outcome = run("plot", run_dir)
    assert outcome.code == 0, outcome.err
    assert (run_dir / "plot.png").read_bytes().startswith(PNG)
    assert str(run_dir / "plot.png") in outcome.out
    outcome = run("plot", "--out", tmp_path / "two.svg", run_dir, run_dir)
    assert outcome.code == 0, outcome.err
    assert b"<svg" in (tmp_path / "two.svg").read_bytes()


def test_curves_lie_at_the_tokens_and_values_of_the_events(run_dir: Path) -> None:
    metrics = read_run(run_dir, "a run")
    loss, length, depth, courses, fill, speed = draw_runs([metrics]).axes
    train, validation = lines_of(loss)
    assert train[:, 1].tolist() == [event["loss"] for event in metrics.train]
    assert train[:, 0].tolist() == [event["total_tokens"] for event in metrics.train]
    assert [event["step"] for event in metrics.validations] == [0, 2, 4]
    assert validation[:, 1].tolist() == [event["eval_loss"] for event in metrics.validations]
    assert validation[:, 0].tolist() == [0.0, *train[[1, 3], 0]]
    assert lines_of(length)[1][:, 1].tolist() == [
        event["eval_acceptance_length"]["3"] for event in metrics.validations
    ]
    assert lines_of(length)[2].tolist() == [[train[1, 0], 1.4]]
    assert lines_of(depth)[0][:, 1].tolist() == metrics.validations[-1]["eval_top1_agreement"]
    assert len(lines_of(courses)) == 3
    assert lines_of(fill)[0][:, 1].tolist() == [100 * event["fill"] for event in metrics.train]
    assert lines_of(speed)[0].shape == (4, 2)


def test_panels_say_what_they_show_and_every_run_is_named(run_dir: Path) -> None:
    figure = draw_runs([read_run(run_dir, "first"), read_run(run_dir, "second")])
    assert all(panel.get_title(loc="left") and panel.get_xlabel() for panel in figure.axes)
    assert "measured at n = 3" in figure.axes[1].get_ylabel()
    assert "n = 3" in figure.axes[1].get_title(loc="left")
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["first", "second"]


def test_a_run_without_validation_is_drawn(run_dir: Path) -> None:
    whole = read_run(run_dir, "a run")
    figure = draw_runs([RunMetrics("bare", whole.train, [], [])])
    assert lines_of(figure.axes[2])[0][:, 1].tolist() == whole.train[-1]["top1_agreement"]


def test_the_shown_length_is_common_to_all_runs() -> None:
    def of(*lengths: str, measured: int | None = None) -> RunMetrics:
        events = [] if measured is None else [{"num_speculative_tokens": measured}]
        return RunMetrics("", [{"acceptance_length": dict.fromkeys(lengths, 1.0)}], [], events)

    assert shown_length([of("3", "5", "7"), of("3", "5")]) == "5"
    assert shown_length([of("3", "5", "10")]) == "10"
    assert shown_length([of("3", "5", "7", measured=5)]) == "5"
    assert shown_length([of("1"), of("2")]) is None


def of_k(events: list[dict[str, Any]], k: int) -> list[dict[str, Any]]:
    """The same events as of a run with K = k, which has acceptance lengths at n = k alone."""
    return [
        {
            key: value[:k]
            if isinstance(value, list)
            else {str(k): 1.5}
            if "acceptance_length" in key
            else value
            for key, value in event.items()
        }
        for event in events
    ]


def test_runs_of_different_k_are_drawn_as_far_as_they_compare(run_dir: Path, tmp_path: Path) -> None:
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for k in (1, 2):
        (tmp_path / f"k{k}").mkdir()
        lines = [json.dumps(event) + "\n" for event in of_k(events, k) if event["event"] != "measured"]
        (tmp_path / f"k{k}" / "metrics.jsonl").write_text("".join(lines))
    dirs = (tmp_path / "k1", tmp_path / "k2")
    outcome = run("plot", *dirs, "--out", tmp_path / "f.png")
    assert outcome.code == 0, outcome.err
    assert "the runs differ in K (k1 K = 1, k2 K = 2)" in outcome.out
    assert "no acceptance length at a common n, so none is drawn" in outcome.out
    figure = draw_runs([read_run(path, path.name) for path in dirs])
    loss, length, depth, _, _, speed = figure.axes
    assert (len(lines_of(loss)), len(lines_of(length)), len(lines_of(speed))) == (4, 0, 2)
    assert sorted({len(line) for line in lines_of(depth)}) == [1, 2]
    assert "not comparable" in loss.get_title(loc="left")
    assert "no common n" in length.get_title(loc="left")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["k1 (K = 1)", "k2 (K = 2)"]
    assert "note" not in run("plot", run_dir, run_dir, "--out", tmp_path / "f.png").out


@pytest.mark.parametrize(
    ("event", "key"),
    [("train", "loss"), ("train", "total_tokens"), ("validation", "eval_loss"), ("measured", "step")],
)
def test_an_event_without_its_keys_is_refused_in_one_line(
    run_dir: Path, tmp_path: Path, event: str, key: str
) -> None:
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    number = next(i for i, values in enumerate(events) if values["event"] == event)
    del events[number][key]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(values) + "\n" for values in events))
    line = run("plot", tmp_path).refusal()
    assert f"metrics.jsonl:{number + 1}: the {event} event lacks {key};" in line


def test_labels_are_names_unless_they_repeat() -> None:
    assert run_labels(["a/one", "b/two"]) == ["one", "two"]
    assert run_labels(["a/run", "b/run"]) == ["a/run", "b/run"]


def test_what_cannot_be_drawn_is_refused_in_one_line(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    young, torn = tmp_path / "young", tmp_path / "torn"
    for path, text in ((young, '{"event": "start", "step": 0}\n'), (torn, '{"event": "train"\n')):
        path.mkdir()
        (path / "metrics.jsonl").write_text(text)
    for args, words in (
        ((tmp_path / "absent", "--out", tmp_path / "f.png"), ("metrics.jsonl does not exist",)),
        ((young,), ("no training step yet",)),
        ((torn,), ("metrics.jsonl:1", "not an event")),
        ((run_dir, "--out", "f.bmp"), ("--out f.bmp", ".png")),
        ((run_dir, "--out", "/nowhere/f.png"), ("/nowhere", "does not exist")),
        ((), ("run_dirs",)),
    ):
        line = run("plot", *args).refusal()
        for word in words:
            assert word in line
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'eagle_train[plot]'" in run("plot", run_dir).refusal()


def test_a_line_that_is_still_being_written_is_left_out(run_dir: Path, tmp_path: Path) -> None:
    text = (run_dir / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(text + '{"event": "tra')
    assert read_run(tmp_path, "").train == read_run(run_dir, "").train
