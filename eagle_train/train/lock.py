"""One run at a time in an output directory."""

import os
from dataclasses import dataclass
from pathlib import Path

from eagle_train.errors import InputError

LOCK = ".eagle_train.lock"


@dataclass(slots=True)
class OutputLock:
    """The right to write into a directory. The system takes it back when the process dies, however it dies.

    file: descriptor of the lock's file while this process has it.
    """

    directory: Path
    file: int | None = None

    def take(self) -> None:
        """Take the lock, unless this process has it; does nothing while the directory is not there, and where
        the filesystem or the system has no locks.

        Raises InputError where another run has it.
        """
        try:
            import fcntl
        except ImportError:  # not on Windows
            return
        path = self.directory / LOCK
        while self.file is None:
            try:
                file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError:  # a directory that is not there, or in which the run will fail to write
                return
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(file)
                raise InputError(
                    f"--output_dir {self.directory} is in use by another run; wait for it or end it, or name "
                    "another --output_dir"
                ) from error
            except OSError:
                os.close(file)
                path.unlink(missing_ok=True)
                return
            # Its last holder may have taken the file away between the two calls.
            if _is_at(file, path):
                self.file = file
                # A process that prepares batches would have the lock for a while after ours was killed.
                os.register_at_fork(after_in_child=self._forget)
            else:
                os.close(file)

    def close(self) -> None:
        """Give the lock back and take its file away."""
        if self.file is None:
            return
        (self.directory / LOCK).unlink(missing_ok=True)
        os.close(self.file)
        self.file = None

    def _forget(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
