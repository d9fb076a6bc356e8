"""How many CPU threads PyTorch computes with."""

import math
import os
from pathlib import Path

import torch

from eagle_train.errors import InputError

MOST_PER_CPU = 4
CPUS = Path("/sys/devices/system/cpu")
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # cgroup v2, as a container sees its own


def set_num_threads(num_threads: int | None) -> None:
    """Compute with num_threads threads; None: as OMP_NUM_THREADS or MKL_NUM_THREADS says, else with one for
    each physical core, because two threads of one core share its arithmetic units.

    Raises InputError for many times more threads than CPUs, with which OpenMP takes the process down.
    """
    if num_threads is not None and num_threads > (most := MOST_PER_CPU * (os.cpu_count() or 1)):
        raise InputError(
            f"--num_threads is {num_threads}; it must be at most {most}, {MOST_PER_CPU} for each CPU of this "
            "machine"
        )
    if num_threads is None and not os.environ.keys() & {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}:
        num_threads = physical_cores()
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def physical_cores(cpus: Path = CPUS, quota: Path = QUOTA) -> int | None:
    """The physical cores that this process may run on: of its CPU affinity, and no more than its container's
    CPU quota. None where the system does not tell (other than Linux).
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    try:
        siblings = {
            (cpus / f"cpu{cpu}/topology/thread_siblings_list").read_text() for cpu in os.sched_getaffinity(0)
        }
    except OSError:
        return None
    return min(len(siblings), _quota_cpus(quota) or len(siblings))


def _quota_cpus(path: Path) -> int | None:
    """CPUs' worth of time that the group may use, rounded up; None: no limit."""
    try:
        quota, period = path.read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no such file, or the quota is "max"
        return None
