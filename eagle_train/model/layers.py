"""The small parts of a draft layer. Parameters are float32 masters; the maths runs in the input's dtype.

Shapes: T rows, H hidden, N heads, d head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """y = x W^T without bias, in the dtype of x. Starts with variance 1 / in_features, which keeps unit
    scale.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        nn.init.normal_(self.weight, std=in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019, eq. 4), accumulated in float32."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight).to(x.dtype)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, eq. 6)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rope_tables(
    positions_T: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin `[T, 1, head_dim]` of the half-rotation form that Hugging Face and the engines use."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_T.device) / head_dim
    angles = positions_T.float()[:, None] * (theta**-exponents)[None, :]
    angles = torch.cat([angles, angles], dim=-1)[:, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x_TNd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head by its position (Su et al. 2021, eq. 34, halves instead of pairs)."""
    first, second = x_TNd.chunk(2, dim=-1)
    return x_TNd * cos + torch.cat([-second, first], dim=-1) * sin
