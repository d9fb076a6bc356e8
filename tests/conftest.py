"""Shared pieces of the tests: where reference numbers lie, and tiny models."""

import os
from pathlib import Path

import pytest

# Tiny tensors: a second thread only waits, and on a busy machine it waits long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that reaches for a hub is a broken test

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Reference numbers and data beside the checkout; tests that need them skip, visibly, where they are
    absent.
    """
    if not (SHARED / "fixtures").is_dir():
        pytest.skip("shared/ with reference numbers is not beside this checkout")
    return SHARED


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random target on disk, read only: copy it before changing it."""
    from tests.tiny import write_target

    return write_target(tmp_path_factory.mktemp("target") / "tiny")
