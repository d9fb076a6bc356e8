"""Writing files so that a reader never sees half of one, and a failure is one line that says what to do."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from eagle_train.errors import InputError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around anything that writes to `path`: what the system refuses, such as a full disk, becomes an
    InputError that names the file and the reason.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"{path} cannot be written ({reason}); make room for it there, or name another place"
        ) from error


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary neighbour of `path`, then rename it over `path`.

    Raises InputError where the system refuses it; the old file then stays, and nothing else.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            write(temporary)
            # Some writers make files that only their owner may read; an engine often runs as somebody else.
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_json(path: Path, value: Any) -> None:
    """`value` as indented JSON; NaN and infinity are refused, as they are not JSON."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text))
