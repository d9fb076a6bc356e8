"""The matrix products and flash attention kernels of a step: recorded as they run, then timed alone.

Recording sees every operator call, in the forward and in the backward, the target's included, and keeps the
operator with its arguments' shapes, strides and types. Timing alone calls the same operator on random numbers
of these shapes and strides, again and again on the same memory, into output that is already there: the
fastest that this machine does exactly these products.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MATMULS = {"mm": ("self", "mat2"), "bmm": ("self", "mat2"),
           "addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2")}  # fmt: skip
SHORT_SECONDS = 2e-3  # shorter calls are timed several at once


class Like(NamedTuple):
    """A tensor's form, without its numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def span(self) -> int:
        """Elements of memory between its first and its last."""
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


@dataclass(slots=True)
class Product:
    """One operator with the forms of its arguments by name. flops: of one call; times: calls by part."""

    operator: Any
    arguments: dict[str, Any]
    flops: float
    times: dict[str, int] = field(default_factory=lambda: defaultdict(int))


class Recorder(TorchDispatchMode):
    """Collects the products that run while it is open. part: names the part that a call belongs to."""

    def __init__(self, part: Callable[[], str]) -> None:
        super().__init__()
        self.part = part
        self.products: dict[tuple[Any, ...], Product] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        flops = product_flops(func, arguments)
        if flops:
            forms = {name: _form(value) for name, value in arguments.items()}
            key = (func, *(_key(form) for form in forms.values()))
            product = self.products.setdefault(key, Product(func, forms, flops))
            product.times[self.part()] += 1
        return func(*args, **kwargs)


def _form(value: Any) -> Any:
    # Whole numbers decide how much a kernel does (offsets of documents), so they are kept.
    if isinstance(value, Tensor) and value.is_floating_point():
        return Like(tuple(value.shape), tuple(value.stride()), value.dtype)
    return value.detach().clone() if isinstance(value, Tensor) else value


def _key(form: Any) -> Any:
    return (tuple(form.shape), form.dtype) if isinstance(form, Tensor) else repr(form)


def product_flops(operator: Any, arguments: dict[str, Any]) -> float:
    """Floating-point operations of a call of a matrix product or flash kernel, 0 for any other operator.

    A product of m x k and k x n counts 2mkn. Flash attention counts its two products over the visible (query,
    key) pairs, and five in the backward, where the scores are made again (FlashAttention-2, section 3.1).
    """
    name = operator._schema.name.split("::")[-1].rstrip("_")
    if name in MATMULS:
        left, right = (arguments[part] for part in MATMULS[name])
        return 2.0 * left.numel() * right.shape[-1]
    if "flash_attn" in name or "flash_attention" in name:
        products = 5 if "backward" in name else 2
        query = arguments.get("query", arguments.get("q"))
        pairs, rows = _pairs(arguments, query)
        return 2.0 * products * pairs * query.numel() / rows
    return 0.0


def _pairs(arguments: dict[str, Any], query: Tensor) -> tuple[float, int]:
    """Visible (query, key) pairs of a head of a sequence or flat row, and its rows."""
    causal = arguments.get("is_causal", arguments.get("causal", False))
    offsets = arguments.get("cum_seq_q", arguments.get("cu_seqlens_q"))
    if offsets is not None:
        lengths = offsets.diff().double()
        return float((lengths * (lengths + causal) / (1 + causal)).sum()), len(query)
    length = query.shape[-2]
    key = arguments.get("key", arguments.get("k"))
    return (length * (length + 1) / 2 if causal else length * key.shape[-2]), length


class Bench:
    """Times products alone. Arguments of one name and type share their memory."""

    def __init__(self, products: list[Product], device: torch.device) -> None:
        self.products, self.device = products, device
        self.memory: dict[tuple[str, torch.dtype], Tensor] = {}
        sizes: dict[tuple[str, torch.dtype], int] = defaultdict(int)
        for product in products:
            for name, form in self._arguments(product).items():
                if isinstance(form, Like):
                    sizes[name, form.dtype] = max(sizes[name, form.dtype], form.span)
        for (name, dtype), size in sizes.items():
            self.memory[name, dtype] = torch.randn(size, dtype=dtype, device=device)

    def seconds(self) -> list[float]:
        """Seconds of one call of each product, once warm."""
        return [self._time(product) for product in self.products]

    @torch.no_grad()
    def _time(self, product: Product) -> float:
        arguments = {
            name: torch.as_strided(self.memory[name, form.dtype], form.shape, form.stride)
            if isinstance(form, Like)
            else form
            for name, form in self._arguments(product).items()
        }
        operator = self._operator(product)
        first = self._elapsed(operator, arguments, 1)
        repeats = min(max(int(SHORT_SECONDS / max(first, 1e-7)), 1), 50)
        return self._elapsed(operator, arguments, repeats) / repeats

    def _elapsed(self, operator: Any, arguments: dict[str, Any], repeats: int) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        for _ in range(repeats):
            operator(**arguments)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - started

    @staticmethod
    def _operator(product: Product) -> Any:
        """A new result's memory would be part of the time: products write into memory that is there."""
        operator, name = product.operator, product.operator._schema.name.split("::")[-1]
        plain = name in MATMULS and operator._overloadname == "default"
        return operator.overloadpacket.out if plain else operator

    @staticmethod
    def _arguments(product: Product) -> dict[str, Any]:
        name = product.operator._schema.name.split("::")[-1]
        if name not in MATMULS or product.operator._overloadname != "default":
            return product.arguments
        left, right = (product.arguments[part] for part in MATMULS[name])
        shape = (*left.shape[:-1], right.shape[-1])
        stride = (shape[1] * shape[2], shape[2], 1)[-len(shape) :] if len(shape) == 3 else (shape[1], 1)
        return product.arguments | {"out": Like(shape, stride, left.dtype)}
