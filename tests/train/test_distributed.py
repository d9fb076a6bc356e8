"""Ranks that disagree end with an error on every one of them."""

import os
import socket
import subprocess
import sys

from eagle_train.train.distributed import rank_and_world_size, require_agreement

PROGRAM = """
import sys
from eagle_train.data.packing import plan_multipack
from eagle_train.errors import InputError
from eagle_train.train.distributed import leave, rank_and_world_size, require_agreement

rank, world_size = rank_and_world_size(on_cpu=True)
lengths = [5, 7, 16 if rank == 1 and "odd" in sys.argv else 8]
plan = plan_multipack(lengths, 16, world_size=world_size)
try:
    require_agreement({"options": "same", "plan": plan.digest()})
except InputError as error:
    print(error)
    sys.exit(2)
finally:
    leave()
print("agreed", rank, world_size)
"""


def launch(*arguments: str) -> list[tuple[int, str]]:
    """Two processes as a launcher starts them: exit code and output of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = []
    for process in processes:
        out, err = process.communicate(timeout=120)
        ended.append((process.returncode, out if process.returncode in (0, 2) else err))
    return ended


def test_ranks_that_agree_go_on() -> None:
    assert launch() == [(0, "agreed 0 2\n"), (0, "agreed 1 2\n")]


def test_ranks_that_disagree_get_an_error_and_do_not_hang() -> None:
    for code, out in launch("odd"):
        assert code == 2
        assert out.startswith("rank 1 has another plan than rank 0 (")
        assert "same options, data files" in out


def test_one_process_is_rank_zero_of_one_and_agrees_with_itself() -> None:
    assert rank_and_world_size(on_cpu=True) == (0, 1)
    require_agreement({"plan": "x"})
