"""A sound head and its target on disk, other layouts of it, and the command line on them."""

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle_train.__main__ import main
from eagle_train.model.checkpoint import save_draft_head
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.target import FrozenTarget
from tests.commands import Outcome
from tests.documents import random_head

Tensors = dict[str, Tensor]
V_D = 40


def command(*words: object) -> Outcome:
    """`python -m eagle_train` with these words, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    return Outcome(code, out.getvalue(), err.getvalue())


def save_head(
    directory: Path, target: FrozenTarget, draft_vocab_size: int = V_D, dtype: torch.dtype = torch.float32
) -> Eagle3DraftHead:
    head = random_head(target, draft_vocab_size)
    save_draft_head(head, directory, target_config=target.config, dtype=dtype)
    return head


def tensors_in(directory: Path) -> Tensors:
    return load_file(directory / "model.safetensors")


def config_in(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def change_config(directory: Path, **values: Any) -> None:
    (directory / "config.json").write_text(json.dumps(config_in(directory) | values))


def drop_config(directory: Path, *keys: str) -> None:
    values = {key: value for key, value in config_in(directory).items() if key not in keys}
    (directory / "config.json").write_text(json.dumps(values))


def change_tensors(directory: Path, change: Callable[[Tensors], Tensors]) -> None:
    tensors = {name: tensor.clone() for name, tensor in tensors_in(directory).items()}
    save_file(change(tensors), directory / "model.safetensors")


def copy_of(directory: Path, to: Path) -> Path:
    return Path(shutil.copytree(directory, to))


def assert_same_weights(one: Eagle3DraftHead, other: Eagle3DraftHead) -> None:
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, tensor in one.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
