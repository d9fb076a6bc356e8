"""--resume goes on as the run was, says what it changes, and shares its directory with no other run."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle_train.config import TrainConfig
from eagle_train.errors import InputError
from eagle_train.train import loop
from eagle_train.train.lock import LOCK, OutputLock
from eagle_train.train.output import with_full_paths
from tests.commands import Outcome, read_events, run, write_conversations, write_jsonl

OPTIONS: dict[str, Any] = {
    "training_seq_len": 256,
    "bucket_granularity": 64,
    "ttt_steps": 2,
    "dtype": "float32",
    "num_threads": 1,
    "log_every": 1,
    "eval_every": 1,
    "learning_rate": 1e-3,
    "max_steps": 2,
    "measure_every": 2,
    "measure_max_prompts": 2,
    "measure_max_new_tokens": 4,
    "select_by": "measured",
}
FORKS = """
import os, sys, time
from pathlib import Path
from eagle_train.train.lock import OutputLock
OutputLock(Path(sys.argv[1])).take()
if not os.fork():
    print(os.getpid(), flush=True)
    time.sleep(60)
os.wait()
"""


def flags_of(options: dict[str, Any]) -> list[Any]:
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def step_of(output: Path) -> int:
    step: int = json.loads((output / "state" / "state.json").read_text())["step"]
    return step


def options_of(output: Path) -> dict[str, Any]:
    options: dict[str, Any] = yaml.safe_load((output / "run_config.yaml").read_text())
    return options


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("resume")
    files = {
        "target": target_dir,
        "data": write_conversations(directory / "data.jsonl", 12),
        "eval_data": write_conversations(directory / "heldout.jsonl", 4),
        "measure_prompts": write_jsonl(directory / "prompts.jsonl", [{"prompt": "one two"}] * 3),
    }
    return files | OPTIONS


@pytest.fixture(scope="module")
def finished(named: dict[str, Any]) -> Path:
    """A finished run that nobody changes."""
    output = Path(named["data"]).parent / "finished"
    outcome = run(*flags_of(named), "--output_dir", output)
    assert outcome.code == 0, outcome.err
    assert '"num_speculative_tokens": 2}' in outcome.out, "no more is drafted than was trained for"
    assert '"num_speculative_tokens": 2}' in (output / "README.md").read_text()
    return output


@pytest.fixture
def output(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "out"))


def resume(output: Path, *flags: object) -> Outcome:
    return run("--resume", "--output_dir", output, *flags)


def test_the_directory_alone_says_how_to_go_on(output: Path) -> None:
    before = options_of(output)
    outcome = resume(output, "--max_steps", 4)
    assert outcome.code == 0, outcome.err
    assert options_of(output) == before | {"max_steps": 4, "output_dir": str(output)}
    assert [event["step"] for event in read_events(output, "measured")] == [0, 2, 4]
    assert [event["step"] for event in read_events(output, "validation")] == [0, 1, 2, 3, 4]
    (line,) = [line for line in outcome.out.splitlines() if line.startswith("changed on resume")]
    assert line == ("changed on resume: --max_steps 2 -> 4; the learning rate's schedule now ends at step 4")


def test_every_change_is_told_and_the_next_resume_keeps_it(output: Path) -> None:
    flags = ("--max_steps", 3, "--learning_rate", 0.1, "--eval_every", 3)
    out = resume(output, *flags).out
    assert "--learning_rate 0.001 -> 0.1" in out
    assert "--eval_every 1 -> 3" in out
    out = resume(output, "--num_epochs", 5).out
    assert "--max_steps 3 -> None" in out
    assert "--learning_rate" not in out.split("changed on resume")[1].splitlines()[0]
    assert step_of(output) > 3
    assert options_of(output)["learning_rate"] == 0.1


def test_nothing_is_left_to_do_at_the_end(output: Path) -> None:
    before = options_of(output)
    for flags in ((), ("--max_steps", 1)):
        outcome = resume(output, *flags)
        assert outcome.code == 0, outcome.err
        assert "\nnothing left to do: the run is at step 2; a larger --max_steps goes on\n" in outcome.out
        assert "an epoch takes" not in outcome.out
        assert "changed on resume" not in outcome.out
        assert "\ndone" not in outcome.out
    assert options_of(output) == before, "a run that does nothing changes nothing"


def test_another_option_is_refused_by_name_whatever_else_it_would_break(output: Path) -> None:
    line = resume(output, "--ttt_steps", 7, "--tokens_per_step", 256).refusal()
    assert "--ttt_steps 2 -> 7" in line
    assert "--tokens_per_step None -> 256" in line
    line = resume(output, "--measure_max_new_tokens", 9).refusal()
    assert "--measure_max_new_tokens 4 -> 9" in line, "--select_by measured compares over the same answers"


def test_a_file_is_the_same_however_it_is_spelt(
    output: Path, named: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Path(named["data"])
    monkeypatch.chdir(data.parent)
    same = ("--data", data.name, "--eval_data", f"../{data.parent.name}/heldout.jsonl")
    assert resume(output, *same, "--target", os.path.relpath(named["target"])).code == 0
    assert "the data differ" in resume(output, "--data", "heldout.jsonl").refusal()


def test_the_record_holds_in_any_working_directory(
    named: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    names = ("data", "eval_data", "measure_prompts")
    paths = {name: shutil.copy(named[name], place) for name in names}
    template = Path(named["target"]) / "chat_template.jinja"
    monkeypatch.chdir(place)
    relative = {name: Path(path).name for name, path in paths.items()}
    relative["target"] = os.path.relpath(named["target"])
    if template.is_file():
        relative["chat_template"] = os.path.relpath(template)
    assert run(*flags_of(named | relative), "--output_dir", "run").code == 0
    saved = options_of(place / "run")
    assert saved["target"] == str(named["target"])
    assert [saved[name] for name in names] == [[str(paths[name])] for name in names]
    monkeypatch.chdir(tmp_path)
    outcome = resume(Path("place/run"), "--max_steps", 3, "--data", f"place/{relative['data']}")
    assert outcome.code == 0, outcome.err
    assert "--data" not in outcome.out.split("changed on resume")[1].splitlines()[0]
    (place / relative["data"]).rename(tmp_path / "moved.jsonl")
    moved = resume(Path("place/run"), "--max_steps", 4, "--data", "moved.jsonl")
    assert moved.code == 0, moved.err
    assert options_of(place / "run")["data"] == [str(tmp_path / "moved.jsonl")]


def test_full_paths_leave_what_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    config = with_full_paths(TrainConfig(target="demo", init_from="head", chat_template="a/b.jinja"))
    assert (config.target, config.init_from) == ("demo", str(tmp_path / "head"))
    assert config.chat_template == str(tmp_path / "a" / "b.jinja")
    assert with_full_paths(TrainConfig(target="org/model")).target == "org/model"
    assert with_full_paths(TrainConfig(mock_data=True, mock_len="uniform:8:9")).mock_len == "uniform:8:9"


def test_data_that_are_gone_are_named(output: Path, tmp_path: Path) -> None:
    path = output / "run_config.yaml"
    path.write_text(yaml.safe_dump(options_of(output) | {"data": [str(tmp_path / "gone.jsonl")]}))
    assert f"{tmp_path / 'gone.jsonl'} does not exist" in resume(output, "--max_steps", 3).refusal()
    path.write_text("eval_evry: 3\n")
    assert "did you mean eval_every" in resume(output).refusal()


def test_a_second_run_in_the_same_directory_is_refused(
    named: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, refusals = tmp_path / "out", list[str]()
    train_step = loop.train_step

    def step(own: loop.Run, window: Any) -> Any:
        for flag in ("--resume", "--overwrite"):
            words = [*flags_of(named | {"learning_rate": 1e-3}), "--output_dir", output, flag]
            refusals.append(run(*words).refusal())
        return train_step(own, window)

    monkeypatch.setattr(loop, "train_step", step)
    outcome = run(*flags_of(named), "--output_dir", output)
    assert outcome.code == 0, outcome.err
    assert len(refusals) == 4
    assert all(f"--output_dir {output} is in use by another run; wait for it" in line for line in refusals)
    assert [event["step"] for event in read_events(output, "train")] == [1, 2]
    assert not (output / LOCK).exists()


def test_a_run_that_comes_while_another_prepares_finds_its_directory_taken(
    named: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither had a directory to lock when it started."""
    output, others = tmp_path / "out", list[OutputLock]()

    def meanwhile(*args: Any) -> None:
        output.mkdir()
        others.append(OutputLock(output))
        others[0].take()

    monkeypatch.setattr("eagle_train.train.start.check_patience", meanwhile)
    assert "in use by another run" in run(*flags_of(named), "--output_dir", output).refusal()
    assert {path.name for path in output.iterdir()} == {LOCK}
    others[0].close()


def test_a_process_that_a_run_forked_does_not_keep_its_lock(tmp_path: Path) -> None:
    run = subprocess.Popen([sys.executable, "-c", FORKS, tmp_path], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    worker = int(run.stdout.readline())
    run.kill()
    run.wait()
    try:
        lock = OutputLock(tmp_path)
        lock.take()
        lock.close()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_the_lock_of_a_run_that_was_killed_is_no_obstacle(tmp_path: Path) -> None:
    first, second = OutputLock(tmp_path), OutputLock(tmp_path)
    first.take()
    with pytest.raises(InputError, match="in use by another run"):
        second.take()
    assert first.file is not None
    os.close(first.file)  # as the system does
    first.file = None  # or a later fork closes whatever has the number by then
    second.take()
    second.close()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / LOCK).touch()
    second.take()
    second.close()
    OutputLock(tmp_path / "not there").take()
