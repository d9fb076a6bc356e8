"""A thread for each physical core that the process may use."""

import os
from pathlib import Path

import pytest
import torch

from eagle_train.errors import InputError
from eagle_train.train import threads
from eagle_train.train.threads import physical_cores, set_num_threads

NO_QUOTA = Path("/no/such/file")


def write_cpus(directory: Path, siblings: list[str]) -> Path:
    for cpu, text in enumerate(siblings):
        (directory / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (directory / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(text + "\n")
    return directory


@pytest.mark.parametrize(
    ("allowed", "cores"), [({0, 1, 2, 3}, 2), ({0, 2}, 1), ({0, 1}, 2), ({3}, 1), ({0, 1, 3}, 2)]
)
def test_cores_are_those_of_the_affinity(
    allowed: set[int], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cores of two threads: CPUs 0 and 2, 1 and 3."""
    cpus = write_cpus(tmp_path, ["0,2", "1,3", "0,2", "1,3"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed)
    assert physical_cores(cpus, NO_QUOTA) == cores


@pytest.mark.parametrize(
    ("quota", "cores"), [("150000 100000", 2), ("50000 100000", 1), ("900000 100000", 4), ("max 100000", 4)]
)
def test_a_container_s_quota_is_kept(
    quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpus = write_cpus(tmp_path, ["0", "1", "2", "3"])
    (tmp_path / "cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert physical_cores(cpus, tmp_path / "cpu.max") == cores


def test_a_system_that_does_not_tell_leaves_pytorch_s_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    assert physical_cores(tmp_path, NO_QUOTA) is None
    monkeypatch.delattr(os, "sched_getaffinity")
    assert physical_cores(tmp_path, NO_QUOTA) is None


def test_many_times_more_threads_than_cpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    set_num_threads(8)
    with pytest.raises(InputError, match="--num_threads is 100000; it must be at most 8, 4 for each CPU"):
        set_num_threads(100_000)
    assert chosen == [8]


@pytest.mark.parametrize(
    ("num_threads", "variables", "cores", "expected"),
    [
        (None, {}, 6, [6]),
        (None, {}, None, []),
        (None, {"OMP_NUM_THREADS": "3"}, 6, []),
        (None, {"MKL_NUM_THREADS": "3"}, 6, []),
        (2, {"OMP_NUM_THREADS": "3"}, 6, [2]),
    ],
)
def test_the_option_wins_over_the_environment_and_that_over_the_cores(
    num_threads: int | None,
    variables: dict[str, str],
    cores: int | None,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    chosen: list[int] = []
    monkeypatch.setattr(threads, "physical_cores", lambda: cores)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    set_num_threads(num_threads)
    assert chosen == expected
