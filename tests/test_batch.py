"""How batches move between devices."""

from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_train.batch import to_device
from eagle_train.objective.unroll import supervise


def test_host_tensors_go_to_a_gpu_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def pin_memory(x: Tensor) -> Tensor:
        calls.append("pinned")
        return x

    def copy(x: Tensor, device: Any, non_blocking: bool = False) -> Tensor:
        calls.append((str(device), non_blocking))
        return x

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(Tensor, "to", copy)
    to_device(torch.zeros(2), "cuda:0")
    supervise(torch.tensor([0, 3, 2, 1, 0]), 2).to(torch.device("cuda", 1))
    assert calls == ["pinned", ("cuda:0", True)] + 4 * ["pinned", ("cuda:1", True)]
    calls.clear()
    to_device(torch.zeros(2), "cpu")
    assert calls == [("cpu", True)]
