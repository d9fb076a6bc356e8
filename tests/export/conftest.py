"""A tiny target and a sound head of it, and a copy of the head to damage."""

from pathlib import Path

import pytest
import torch

from eagle_train.model.target import FrozenTarget, load_target
from tests.export.heads import copy_of, save_head


@pytest.fixture(scope="module")
def target(target_dir: Path) -> FrozenTarget:
    return load_target(str(target_dir), dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def head_dir(target: FrozenTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("head") / "head"
    save_head(directory, target)
    return directory


@pytest.fixture
def head(head_dir: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return copy_of(head_dir, tmp_path / "head")
