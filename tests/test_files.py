"""Files are whole or not there, and readable by whom the umask lets."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from eagle_train.errors import InputError
from eagle_train.files import write_atomically, write_json
from eagle_train.model.checkpoint import save_draft_head
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.target_config import draft_config
from eagle_train.train.report import MetricsLog
from eagle_train.train.state import RunState, save_state
from tests.tiny import tiny_target


def test_a_file_may_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    def write_privately(path: Path) -> None:
        path.write_text("x")
        path.chmod(0o600)

    before = os.umask(0o022)
    try:
        write_atomically(tmp_path / "file", write_privately)
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")

    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError("no space")

    with pytest.raises(InputError, match=r"file cannot be written \(no space\); make room"):
        write_atomically(tmp_path / "file", fail)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file may grow beyond `room` bytes: the writers' own errors, without a disk of that size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_told_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    """safetensors and Python have errors of their own for it."""
    (tmp_path / "head").mkdir()
    (tmp_path / "run").mkdir()
    target = tiny_target()
    head = Eagle3DraftHead(draft_config(target, 80))
    optimizer = torch.optim.AdamW(head.parameters())
    state = tmp_path / "run" / "state"
    writers = {
        tmp_path / "head" / "model.safetensors": lambda: save_draft_head(
            head, tmp_path / "head", target_config=target.config, dtype=torch.float32
        ),
        tmp_path / "figures.json": lambda: write_json(tmp_path / "figures.json", ["x" * 5000]),
        state: lambda: save_state(state, RunState(), head, optimizer, {}),
        tmp_path / "metrics.jsonl": lambda: MetricsLog(tmp_path / "metrics.jsonl").write(
            "train", 1, {"x": "x" * 5000}
        ),
    }
    for path, write in writers.items():
        with full_disk(4096), pytest.raises(InputError) as refused:
            write()
        assert f"{path} cannot be written (" in str(refused.value)
        assert "File too large" in str(refused.value)
    left = {path.name for path in tmp_path.rglob("*")}
    assert left == {"head", "run", "metrics.jsonl"}
