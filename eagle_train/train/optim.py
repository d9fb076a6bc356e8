"""AdamW over float32 masters, and the learning rate's course."""

import math

import torch
from torch import nn

from eagle_train.config import TrainConfig


def peak_learning_rate(config: TrainConfig, hidden_size: int) -> float:
    """--learning_rate, or 1e-4 x 4096 / H: the field's 1e-4 at H = 4096, and Adam's rule of 1 / width below.

    The rule is from Yang et al. 2022 (tensor programs V, table 8). At H = 128 even 1e-2 was better in short
    runs; other widths have not been swept.
    """
    return config.learning_rate or 1e-4 * 4096 / hidden_size


def make_optimizer(module: nn.Module, config: TrainConfig, learning_rate: float) -> torch.optim.AdamW:
    """Decay applies to matrices only, as is usual."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=learning_rate, betas=(config.adam_beta1, config.adam_beta2), fused=True
    )


def learning_rate_factor(step: int, total_steps: int, warmup_ratio: float, min_ratio: float) -> float:
    """Share of the peak at 0-based `step`: linear warm-up, then a cosine down to `min_ratio`."""
    warmup_steps = math.ceil(total_steps * warmup_ratio)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
