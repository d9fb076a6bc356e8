"""The optimizer's options arrive, and the learning rate takes its course."""

import math

import pytest
import torch
from torch import nn

from eagle_train.config import TrainConfig
from eagle_train.model.layers import SwiGLU
from eagle_train.train.optim import learning_rate_factor, make_optimizer, peak_learning_rate


def test_the_options_arrive_and_decay_is_for_matrices_only() -> None:
    config = TrainConfig(adam_beta1=0.8, adam_beta2=0.9, weight_decay=0.1)
    module = SwiGLU(8, 12)
    module.register_parameter("scale", nn.Parameter(torch.ones(12)))
    module.gate_proj.weight.requires_grad_(False)
    matrices, vectors = make_optimizer(module, config, 1e-3).param_groups
    assert [group["betas"] for group in (matrices, vectors)] == [(0.8, 0.9)] * 2
    assert [group["lr"] for group in (matrices, vectors)] == [1e-3] * 2
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert [tuple(p.shape) for p in matrices["params"]] == [(12, 8), (8, 12)]
    assert [tuple(p.shape) for p in vectors["params"]] == [(12,)]


def test_the_peak_is_the_field_s_at_a_width_of_4096_and_higher_below() -> None:
    assert peak_learning_rate(TrainConfig(), 4096) == pytest.approx(1e-4)
    assert peak_learning_rate(TrainConfig(), 1024) == pytest.approx(4e-4)
    assert peak_learning_rate(TrainConfig(learning_rate=3e-4), 1024) == 3e-4


def test_the_rate_rises_in_a_line_and_falls_as_a_cosine_to_its_floor() -> None:
    factors = [learning_rate_factor(step, 24, 1 / 6, 0.1) for step in range(30)]
    assert factors[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert factors[4] == pytest.approx(1.0)
    assert factors[14] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert factors[4:25] == sorted(factors[4:25], reverse=True)
    assert factors[24:] == pytest.approx([0.1] * 6)
    assert learning_rate_factor(0, 1, 0.0, 0.1) == 1.0
