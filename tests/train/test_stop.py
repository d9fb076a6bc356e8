"""A signal ends a run behind its step with the state saved; resumed, it equals one that nobody ended."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from eagle_train.train import loop, selection, stop
from eagle_train.train.stop import stop_on_signals
from tests.commands import Outcome, read_events, run
from tests.train.test_distributed import launch

MOCK = {
    "mock_target": "32,8,96",
    "mock_num_samples": 24,
    "mock_len": 40,
    "training_seq_len": 64,
    "bucket_granularity": 64,
    "ttt_steps": 2,
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "log_every": 10,
    "max_steps": 6,
    "eval_every": 2,
    "save_every": 100,
    "torch_compile": "false",
}
STATE = ("weights.safetensors", "optimizer.safetensors")
# Rank 1 alone gets a signal; both must end behind the same step.
RANK = """
import os, signal, sys
from eagle_train.__main__ import main
from eagle_train.train import loop
whole_step = loop.train_step
def step(run, window):
    if run.ranks.rank == 1 and run.state.step == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return whole_step(run, window)
loop.train_step = step
sys.exit(main(sys.argv[1:]))
"""
# The main thread waits in C for a lock that it has itself, as in a collective whose other side hangs.
BLOCKED = """
import ctypes
from eagle_train.train.stop import stop_on_signals
mutex = ctypes.create_string_buffer(64)
lock = ctypes.CDLL(None).pthread_mutex_lock
with stop_on_signals(says_so=True):
    lock(mutex)
    print("waits", flush=True)
    lock(mutex)
"""


def words(output: Path, **options: object) -> list[str]:
    named = MOCK | {"output_dir": output} | options
    return ["--mock_data", *(str(word) for name, value in named.items() for word in (f"--{name}", value))]


def step_of(output: Path) -> int:
    step: int = json.loads((output / "state" / "state.json").read_text())["step"]
    return step


def signalled(
    output: Path, monkeypatch: pytest.MonkeyPatch, at_step: int, *signums: int, **options: object
) -> Outcome:
    """A run that gets signals while it is in a step."""
    train_step = loop.train_step

    def step(own: loop.Run, window: Any) -> Any:
        if own.state.step == at_step - 1:
            for signum in signums:
                os.kill(os.getpid(), signum)
                time.sleep(0.1)
        return train_step(own, window)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", step)
        return run(*words(output, **options))


@pytest.mark.parametrize(("signum", "step"), [(signal.SIGTERM, 3), (signal.SIGINT, 4)])
def test_a_signal_saves_the_step_and_the_run_goes_on_from_it(
    signum: signal.Signals, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    outcome = signalled(cut, monkeypatch, step, signum)
    assert outcome.code == 128 + signum
    assert outcome.err.splitlines()[-1] == (
        f"eagle_train: ended by {signum.name} behind step {step}; its state is saved in {cut / 'state'}, and "
        f"--resume --output_dir {cut} goes on"
    )
    assert step_of(cut) == step
    assert run("--resume", "--output_dir", cut).code == 0
    assert run(*words(whole)).code == 0
    for name in (f"state/{STATE[0]}", f"state/{STATE[1]}", "model.safetensors"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes(), name
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "REPEAT_SECONDS", 0.05)
    outcome = signalled(tmp_path, monkeypatch, 3, signal.SIGINT, signal.SIGINT)
    assert outcome.code == 130
    assert outcome.err.splitlines()[-1] == (
        "eagle_train: interrupted; --resume goes on from the last saved state"
    )
    assert step_of(tmp_path) == 0


def test_a_launcher_that_passes_a_signal_on_does_not_ask_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert signalled(tmp_path, monkeypatch, 3, signal.SIGTERM, signal.SIGTERM).code == 143
    assert step_of(tmp_path) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="the lock's layout is that of Linux")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_process_that_waits_for_a_rank_that_hangs(signum: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signum)
        time.sleep(1.2)
        assert process.poll() is None
        process.send_signal(signum)
        _, err = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 128 + signum
    assert err.count("once more ends it at once") == 1


class Killed(BaseException):
    """Nothing behind it is done, as after SIGKILL."""


@pytest.mark.parametrize(
    ("place", "step"), [("evaluate", 0), ("evaluate", 2), ("evaluate", 6), ("keep_head", 0)]
)
def test_a_run_that_dies_in_a_check_loses_no_step_and_does_it_again(
    place: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    module: Any = loop if place == "evaluate" else selection
    original, states = getattr(module, place), list[loop.Run]()
    compile_run = loop.compile_run

    def check(*args: Any, **kwargs: Any) -> Any:
        if states[-1].state.step == step:
            if place == "keep_head":
                original(*args, **kwargs)
            raise Killed
        return original(*args, **kwargs)

    def note(own: loop.Run) -> None:
        states.append(own)
        compile_run(own)

    options: dict[str, object] = {"save_every": 2}
    with monkeypatch.context() as patch:
        patch.setattr(loop, "compile_run", note)
        patch.setattr(module, place, check)
        with pytest.raises(Killed):
            run(*words(cut, **options))
    assert run(*words(whole, **options)).code == 0
    if step or place == "keep_head":
        assert step_of(cut) == step
        outcome = run("--resume", "--output_dir", cut)
    else:  # nothing was kept, so the same command starts again
        outcome = run(*words(cut, **options))
    assert outcome.code == 0, outcome.err
    for name in (f"state/{STATE[0]}", f"state/{STATE[1]}", "model.safetensors"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes(), name
    validations = read_events(cut, "validation")
    assert [event["step"] for event in validations] == [0, 2, 4, 6]
    assert validations == read_events(whole, "validation")
    assert json.loads((cut / "state" / "state.json").read_text())["owes_checks"] is False


def test_a_signal_in_a_validation_ends_the_run_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validate = loop.validate

    def check(own: loop.Run) -> None:
        if own.state.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        validate(own)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "validate", check)
        assert run(*words(tmp_path)).code == 143
    assert step_of(tmp_path) == 2
    assert run("--resume", "--output_dir", tmp_path).code == 0
    assert [event["step"] for event in read_events(tmp_path, "validation")] == [0, 2, 4, 6]


def test_a_signal_in_the_last_step_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = signalled(tmp_path, monkeypatch, 6, signal.SIGTERM)
    assert outcome.code == 0, outcome.err
    assert "\ndone\n" in outcome.out


def test_other_threads_and_ignored_signals_are_left_alone() -> None:
    def enter() -> None:
        with stop_on_signals(says_so=False):
            seen.append(signal.getsignal(signal.SIGTERM))

    before, seen = signal.getsignal(signal.SIGTERM), list[Any]()
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    try:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as nohup does with others
        enter()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [before, signal.SIG_IGN]


def test_all_ranks_end_behind_the_same_step(tmp_path: Path) -> None:
    for code, _, err in launch(2, RANK, *words(tmp_path / "out")):
        assert code == 143, err
        assert "ended by SIGTERM behind step 3; its state is saved" in err
    assert step_of(tmp_path / "out") == 3


def test_a_signal_to_every_process_of_a_job_saves_too(tmp_path: Path) -> None:
    """Job schedulers do so; a process that prepares batches must not die of it."""
    options = {"max_steps": 100_000, "eval_every": 100_000, "log_every": 1, "num_workers": 1}
    process = subprocess.Popen(
        [sys.executable, "-m", "eagle_train", *words(tmp_path / "out", **options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics, deadline = tmp_path / "out" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and '"event": "train"' in metrics.read_text()):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert err.splitlines()[-1].startswith("eagle_train: ended by SIGTERM behind step "), err
    assert step_of(tmp_path / "out") > 0
