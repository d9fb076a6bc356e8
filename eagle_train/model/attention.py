"""Attention of the training-time-test unroll, exact and without T x T memory.

Row t of step k reads the step-0 keys of rows 0..t of its own document, and of each later step 1..k the key
of row t alone. The first part is causal varlen attention, which flash kernels do in linear memory and return
with its log-sum-exp; the second part is one dot product per step. Both are merged by log-sum-exp.

The backward rests on FlashAttention-2 (Dao 2023, arXiv:2307.08691, section 3.1.2): a flash backward rebuilds
p = exp(s - lse), takes delta = rowsum(dout * out) and forms ds = p * (dout v^T - delta). Nothing in it asks
that lse and out come from the kernel's own keys alone. Given the *merged* out and lse, its p are the
probabilities of the merged softmax, and its dq, dk, dv the step-0 part of the gradients; the single keys have
closed forms.

Suffixes: T rows of the flat row, N query heads, H key/value heads, G = N / H, d head size.
"""

import importlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eagle_train.errors import InputError

Rows = slice | Tensor


@dataclass(frozen=True, eq=False)
class DocumentLayout:
    """Where the documents of one flat row lie; they tile rows 0..T-1.

    cu_seqlens: int32 `[S+1]` on the compute device; offsets: the same on the host, so that nothing here waits
    for the device; max_seqlen: the longest document in rows, or any upper bound. Empty documents are fine.
    """

    cu_seqlens: Tensor
    offsets: tuple[int, ...]
    max_seqlen: int

    @classmethod
    def from_offsets(
        cls, offsets: Sequence[int], *, device: torch.device | str = "cpu", max_seqlen: int | None = None
    ) -> "DocumentLayout":
        """Build a layout from host offsets `[S+1]`: 0 first, never falling, T last."""
        host = tuple(int(offset) for offset in offsets)
        assert host[:1] == (0,), f"document offsets start at 0, not {host[:1]}"
        longest = max((stop - start for start, stop in pairwise(host)), default=0)
        assert list(host) == sorted(host), f"document offsets fall: {host}"
        assert max_seqlen is None or max_seqlen >= longest, (
            f"max_seqlen {max_seqlen} < longest document {longest}"
        )
        cu_seqlens = torch.tensor(host, dtype=torch.int32, device=device)
        return cls(cu_seqlens, host, longest if max_seqlen is None else max_seqlen)

    @property
    def num_rows(self) -> int:
        """T."""
        return self.offsets[-1]

    @cached_property
    def documents(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every document that has rows."""
        return tuple((start, stop) for start, stop in pairwise(self.offsets) if stop > start)

    @cached_property
    def groups(self) -> tuple[tuple[int, Rows], ...]:
        """(length, rows) for each distinct length: documents of one length go through a kernel as one batch.

        Rows are a slice (so a view, no copy) where the documents lie side by side, host indices otherwise.
        """
        starts_of: dict[int, list[int]] = defaultdict(list)
        for start, stop in self.documents:
            starts_of[stop - start].append(start)
        return tuple((length, _rows_of(starts, length)) for length, starts in starts_of.items())


def _rows_of(starts: list[int], length: int) -> Rows:
    size = len(starts) * length
    if starts[-1] + length - starts[0] == size:
        return slice(starts[0], starts[0] + size)
    return (torch.tensor(starts)[:, None] + torch.arange(length)).flatten()


def unrolled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step_keys: tuple[Tensor, ...],
    step_values: tuple[Tensor, ...],
    layout: DocumentLayout,
    *,
    backend: str | None = None,
) -> Tensor:
    """Attend one step's queries to their document's step-0 keys and to the same-row key of each later step.

    query `[T, N, d]`; key and value of step 0, and every entry of step_keys and step_values, `[T, H, d]`, N a
    multiple of H; all of one dtype, RoPE already applied. The softmax scale is 1 / sqrt(d). Returns
    `[T, N, d]`. Gradients are exact for every input; narrow dtypes are merged in float32.

    backend: "cpu", "flash_attn", "torch_cuda" or "matmul"; None chooses by device, dtype and head size.
    Raises InputError when the named backend is unknown or not installed.
    """
    _check(query, (key, value, *step_keys, *step_values), layout)
    assert len(step_keys) == len(step_values), f"{len(step_keys)} step keys, {len(step_values)} step values"
    kernels = _kernels(backend or choose_backend(query))
    out: Tensor = _UnrolledAttention.apply(kernels, layout, query, key, value, *step_keys, *step_values)
    return out


@torch.no_grad()
def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: DocumentLayout,
    *,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Causal attention within each document, forward only; shapes and backends as in `unrolled_attention`.

    scale: factor on the scores, 1 / sqrt(d) when None.
    """
    _check(query, (key, value), layout)
    kernels = _kernels(backend or choose_backend(query))
    return kernels.forward(query, key, value, layout, query.shape[-1] ** -0.5 if scale is None else scale)[0]


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step_keys: tuple[Tensor, ...],
    step_values: tuple[Tensor, ...],
    layout: DocumentLayout,
) -> Tensor:
    """The reference for `unrolled_attention`: a masked softmax over `[T, (k + 1) T]` scores, autograd."""
    _check(query, (key, value, *step_keys, *step_values), layout)
    rows = torch.arange(layout.num_rows, device=query.device)
    document = torch.bucketize(rows, layout.cu_seqlens[1:].long(), right=True)
    causal_TT = (document[:, None] == document) & (rows[:, None] >= rows)
    mask = torch.cat([causal_TT, *[rows[:, None] == rows] * len(step_keys)], dim=1)
    group = query.shape[1] // key.shape[1]
    keys = torch.cat([key, *step_keys]).repeat_interleave(group, dim=1)
    values = torch.cat([value, *step_values]).repeat_interleave(group, dim=1)
    scores = torch.einsum("tnd,snd->nts", query, keys) / math.sqrt(query.shape[-1])
    return torch.einsum("nts,snd->tnd", scores.masked_fill(~mask, -math.inf).softmax(dim=-1), values)


class _Saved(NamedTuple):
    """What a backward needs of its forward; out and lse may come from a softmax over more keys than `key`."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor


Grads = tuple[Tensor, Tensor, Tensor]


class _Kernels(NamedTuple):
    """Causal varlen attention of one backend; lse is a natural log, `[T, N]`, float32 or float64."""

    forward: Callable[[Tensor, Tensor, Tensor, DocumentLayout, float], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, _Saved, DocumentLayout, float], Grads]


class _UnrolledAttention(torch.autograd.Function):
    """Kernels over the step-0 keys, merged with single same-row keys; maths in the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: _Kernels,
        layout: DocumentLayout,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *steps: Tensor,
    ) -> Tensor:
        num_steps, scale = len(steps) // 2, query.shape[-1] ** -0.5
        out, lse = kernels.forward(query, key, value, layout, scale)
        scores: list[Tensor] = []
        if num_steps:
            query_THGd = _wide(_grouped(query, key))
            scores = [
                scale * (query_THGd * _wide(k)[:, :, None]).sum(-1).flatten(1) for k in steps[:num_steps]
            ]
            step0_lse, lse = lse, torch.stack((lse, *scores)).logsumexp(0)
            out_THGd = _wide(_grouped(out, key)) * _grouped((step0_lse - lse).exp(), key)[..., None]
            for score, step_value in zip(scores, steps[num_steps:], strict=True):
                prob_THG = _grouped((score - lse).exp(), key)
                out_THGd.addcmul_(prob_THG[..., None], _wide(step_value)[:, :, None])
            out = out_THGd.flatten(1, 2).to(query.dtype)
        ctx.kernels, ctx.layout, ctx.scale, ctx.num_steps = kernels, layout, scale, num_steps
        ctx.save_for_backward(query, key, value, out, lse, *scores, *steps)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        n, scale = ctx.num_steps, ctx.scale
        saved, rest = _Saved(*ctx.saved_tensors[:5]), ctx.saved_tensors[5:]
        query, key, value, out, lse = saved
        grad_out = grad_out.contiguous()
        grad_query, grad_key, grad_value = ctx.kernels.backward(grad_out, saved, ctx.layout, scale)
        if not n:
            return None, None, grad_query, grad_key, grad_value
        query_THGd, grad_out_THGd = _wide(_grouped(query, key)), _wide(_grouped(grad_out, key))
        grad_query_THGd = _wide(_grouped(grad_query, key))
        delta_THG = (grad_out_THGd * _grouped(out, key)).sum(-1)
        step_key_grads, step_value_grads = [], []
        for score, step_key, step_value in zip(rest[:n], rest[n : 2 * n], rest[2 * n :], strict=True):
            prob_THG = _grouped((score - lse).exp(), key)
            grad_prob_THG = (grad_out_THGd * step_value[:, :, None]).sum(-1)
            grad_score_THG1 = (scale * prob_THG * (grad_prob_THG - delta_THG))[..., None]
            step_value_grads.append((prob_THG[..., None] * grad_out_THGd).sum(2).to(value.dtype))
            step_key_grads.append((grad_score_THG1 * query_THGd).sum(2).to(key.dtype))
            grad_query_THGd = grad_query_THGd.addcmul(grad_score_THG1, _wide(step_key)[:, :, None])
        grad_query = grad_query_THGd.flatten(1, 2).to(query.dtype)
        return None, None, grad_query, grad_key, grad_value, *step_key_grads, *step_value_grads


def _grouped(x_TN: Tensor, key_THd: Tensor) -> Tensor:
    """`[T, N, ...]` seen as `[T, H, G, ...]`: the query heads beside the key head that they share."""
    return x_TN.view(x_TN.shape[0], key_THd.shape[1], -1, *x_TN.shape[2:])


def _wide(x: Tensor) -> Tensor:
    """x in the dtype of the merge: float32, or float64 for float64 inputs."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _check(query: Tensor, others: tuple[Tensor, ...], layout: DocumentLayout) -> None:
    num_rows, num_heads, head_size = query.shape
    num_kv_heads = others[0].shape[1]
    assert num_rows == layout.num_rows, f"{num_rows} rows, but the documents tile {layout.num_rows}"
    assert num_heads % num_kv_heads == 0, f"{num_heads} query heads over {num_kv_heads} key/value heads"
    for x in others:
        assert x.shape == (num_rows, num_kv_heads, head_size), f"{tuple(x.shape)} beside {tuple(query.shape)}"
        assert x.dtype == query.dtype, f"{x.dtype} beside {query.dtype}"


def choose_backend(query: Tensor) -> str:
    """The fastest backend that is exact for a query `[T, N, d]` of this device, dtype and head size."""
    if query.device.type == "cpu":
        return "cpu"
    flash_can = (
        query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] in range(8, 257, 8)
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )
    if not flash_can:
        return "matmul"
    return "torch_cuda" if _flash_attn() is None else "flash_attn"


def _kernels(backend: str) -> _Kernels:
    if backend not in _BACKENDS:
        raise InputError(f"attention backend {backend!r} is unknown: use one of {', '.join(_BACKENDS)}")
    if backend == "flash_attn" and _flash_attn() is None:
        raise InputError(
            "attention backend 'flash_attn' needs flash-attn >= 2.7, < 3: install it, or use 'torch_cuda'"
        )
    return _BACKENDS[backend]


def _batch(x: Tensor, rows: Rows, length: int) -> Tensor:
    """Equally long documents of a flat `[T, n, ...]` as a batch `[B, n, length, ...]`."""
    x = x[rows]
    return x.view(-1, length, *x.shape[1:]).transpose(1, 2)


def _flat(x: Tensor) -> Tensor:
    """The inverse of `_batch`: `[B, n, length, ...]` to `[B * length, n, ...]`."""
    return x.transpose(1, 2).flatten(0, 1)


def _cpu_forward(
    query: Tensor, key: Tensor, value: Tensor, layout: DocumentLayout, scale: float
) -> tuple[Tensor, Tensor]:
    out = query.new_empty(query.shape)
    lse = _wide(query.new_empty(query.shape[:2]))
    for length, rows in layout.groups:
        q, k, v = (_batch(x, rows, length) for x in (query, key, value))
        o, s = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
        out[rows], lse[rows] = _flat(o), _flat(s)
    return out, lse


def _cpu_backward(grad_out: Tensor, saved: _Saved, layout: DocumentLayout, scale: float) -> Grads:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads = _empty_grads(saved)
    for length, rows in layout.groups:
        parts = backward(*(_batch(x, rows, length) for x in (grad_out, *saved)), 0.0, True, scale=scale)
        for grad, part in zip(grads, parts, strict=True):
            grad[rows] = _flat(part)
    return grads


def _empty_grads(saved: _Saved) -> Grads:
    return tuple(x.new_empty(x.shape) for x in (saved.query, saved.key, saved.value))  # type: ignore[return-value]


@cache
def _flash_attn() -> Any:
    """flash_attn's low-level interface, or None where it is missing or older than 2.7.

    Written against flash_attn/flash_attn_interface.py of 2.7 and 2.8.3: both functions are custom ops with
    the argument names used below; the forward returns out, lse (float32 `[N, T]`), debug mask, rng state.
    """
    try:
        interface = importlib.import_module("flash_attn.flash_attn_interface")
    except ImportError:
        return None
    return interface if hasattr(interface, "_wrapped_flash_attn_varlen_forward") else None


def _flash_attn_options(layout: DocumentLayout, scale: float) -> dict[str, Any]:
    lengths = {"max_seqlen_q": layout.max_seqlen, "max_seqlen_k": layout.max_seqlen}
    offsets = {"cu_seqlens_q": layout.cu_seqlens, "cu_seqlens_k": layout.cu_seqlens}
    unused = {
        "dropout_p": 0.0,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "alibi_slopes": None,
    }
    return {"softmax_scale": scale, "causal": True, **offsets, **lengths, **unused}


def _flash_attn_forward(
    query: Tensor, key: Tensor, value: Tensor, layout: DocumentLayout, scale: float
) -> tuple[Tensor, Tensor]:
    forward = _flash_attn()._wrapped_flash_attn_varlen_forward
    out, lse_NT, _, _ = forward(q=query, k=key, v=value, **_flash_attn_options(layout, scale))
    return out, lse_NT.t()


def _flash_attn_backward(grad_out: Tensor, saved: _Saved, layout: DocumentLayout, scale: float) -> Grads:
    query, key, value, out, lse = saved
    grads = dict(zip(("dq", "dk", "dv"), _empty_grads(saved), strict=True))
    inputs = {
        "dout": grad_out,
        "q": query,
        "k": key,
        "v": value,
        "out": out,
        "softmax_lse": lse.t().contiguous(),
    }
    deterministic = torch.are_deterministic_algorithms_enabled()
    options = _flash_attn_options(layout, scale)
    _flash_attn()._wrapped_flash_attn_varlen_backward(
        **inputs, **grads, **options, deterministic=deterministic
    )
    return grads["dq"], grads["dk"], grads["dv"]


def _torch_cuda_forward(
    query: Tensor, key: Tensor, value: Tensor, layout: DocumentLayout, scale: float
) -> tuple[Tensor, Tensor]:
    varlen = (layout.cu_seqlens, layout.cu_seqlens, layout.max_seqlen, layout.max_seqlen)
    forward = torch.ops.aten._flash_attention_forward
    out, lse_NT, *_ = forward(query, key, value, *varlen, 0.0, True, False, scale=scale)
    return out, lse_NT.t()


def _torch_cuda_backward(grad_out: Tensor, saved: _Saved, layout: DocumentLayout, scale: float) -> Grads:
    query, key, value, out, lse = saved
    varlen = (layout.cu_seqlens, layout.cu_seqlens, layout.max_seqlen, layout.max_seqlen)
    # Without dropout the random state is never read; torch.nn.attention.varlen passes the same placeholders.
    random_state = (torch.zeros(2, dtype=torch.uint64, device=out.device), torch.empty(0, device=out.device))
    backward = torch.ops.aten._flash_attention_backward
    grads: Grads = backward(
        grad_out, query, key, value, out, lse.t().contiguous(), *varlen, 0.0, True, *random_state, scale=scale
    )
    return grads


_BLOCK_ROWS = 512  # the matmul backend holds N x 512 x (document length) scores at a time


def _blocks(layout: DocumentLayout) -> Iterator[tuple[slice, slice]]:
    """(query rows, the key rows that they can see) for blocks of at most `_BLOCK_ROWS` query rows."""
    for start, stop in layout.documents:
        for low in range(start, stop, _BLOCK_ROWS):
            high = min(low + _BLOCK_ROWS, stop)
            yield slice(low, high), slice(start, high)


def _block_scores(query_rHGd: Tensor, key_sHd: Tensor, scale: float) -> Tensor:
    """Causal scores `[H, G, r, s]` of a document's rows s - r .. s - 1 over its rows 0 .. s - 1."""
    scores = scale * torch.einsum("rhgd,shd->hgrs", query_rHGd, key_sHd)
    num_rows, num_keys = scores.shape[-2:]
    visible = torch.ones(num_rows, num_keys, dtype=torch.bool, device=scores.device).tril(num_keys - num_rows)
    return scores.masked_fill(~visible, -math.inf)


def _matmul_forward(
    query: Tensor, key: Tensor, value: Tensor, layout: DocumentLayout, scale: float
) -> tuple[Tensor, Tensor]:
    out = query.new_empty(query.shape)
    lse = _wide(query.new_empty(query.shape[:2]))
    for rows, seen in _blocks(layout):
        scores = _block_scores(_wide(_grouped(query[rows], key)), _wide(key[seen]), scale)
        lse_HGr = scores.logsumexp(-1)
        out_rHGd = torch.einsum("hgrs,shd->rhgd", (scores - lse_HGr[..., None]).exp(), _wide(value[seen]))
        out[rows], lse[rows] = out_rHGd.flatten(1, 2).to(out.dtype), lse_HGr.flatten(0, 1).t()
    return out, lse


def _matmul_backward(grad_out: Tensor, saved: _Saved, layout: DocumentLayout, scale: float) -> Grads:
    query, key, value, out, lse = saved
    grad_query = query.new_empty(query.shape)
    grad_key, grad_value = torch.zeros_like(_wide(key)), torch.zeros_like(_wide(value))
    for rows, seen in _blocks(layout):
        q, g, o, lse_rHG = (_wide(_grouped(x[rows], key)) for x in (query, grad_out, out, lse))
        k, v = _wide(key[seen]), _wide(value[seen])
        prob = (_block_scores(q, k, scale) - lse_rHG.permute(1, 2, 0)[..., None]).exp()
        delta_HGr1 = (g * o).sum(-1).permute(1, 2, 0)[..., None]
        grad_score = scale * prob * (torch.einsum("rhgd,shd->hgrs", g, v) - delta_HGr1)
        grad_query[rows] = torch.einsum("hgrs,shd->rhgd", grad_score, k).flatten(1, 2).to(query.dtype)
        grad_key[seen] += torch.einsum("hgrs,rhgd->shd", grad_score, q)
        grad_value[seen] += torch.einsum("hgrs,rhgd->shd", prob, g)
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


_BACKENDS = {
    "cpu": _Kernels(_cpu_forward, _cpu_backward),
    "flash_attn": _Kernels(_flash_attn_forward, _flash_attn_backward),
    "torch_cuda": _Kernels(_torch_cuda_forward, _torch_cuda_backward),
    "matmul": _Kernels(_matmul_forward, _matmul_backward),
}
