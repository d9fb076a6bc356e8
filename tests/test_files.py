"""Files are whole or not there, and readable by whom the umask lets."""

import os
from pathlib import Path

import pytest

from eagle_train.files import write_atomically


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

    with pytest.raises(OSError, match="no space"):
        write_atomically(tmp_path / "file", fail)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
