"""Document isolation for any Hugging Face causal LM, through transformers' attention interface.

`register_target_attention()` makes `attn_implementation="eagle_train"` known to transformers. A model loaded
with it runs plain causal attention on ordinary rows, and attention within each document on a packed row:

    with document_layout(layout):
        target(input_ids=ids_1T, position_ids=restarting_1T, use_cache=False)

The layout travels in a context variable and not as a model argument, because families differ in what they
hand down: some drop unknown keyword arguments between the model and its attention, some refuse them.

Decoding runs rows that hold different numbers of tokens; key s of a row stands at position s:

    with cached_rows(positions_BT):
        target(input_ids=ids_BT, position_ids=positions_BT, cache=cache)

Nothing of size T x T is made: transformers asks our mask function for a mask and gets a `MaskRule`, the
window that the model wants at that layer. So the window comes from where the eager implementation has it;
several families (Qwen2-MoE, Phi-MoE) do not pass it to the attention function. And a model that bypasses the
interface trips over the rule instead of running without a mask.

What cannot be computed exactly is refused by name, never approximated: masks of a model's own making,
bidirectional or chunked attention, position biases, padding before real tokens, preallocated caches, dropout;
and, by `check_target`, recurrent layers, which carry state from document to document.

Suffixes: B rows of T tokens, S keys, N query heads, H key/value heads, d head size.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_train.errors import InputError
from eagle_train.model.attention import DocumentLayout, causal_attention

NAME = "eagle_train"
# What still works for a model whose documents cannot be kept apart on one row.
PADDED_REMEDY = "train on padded rows with --packing none --padding_free false --attn_implementation eager"
_BLOCK_ROWS = 512  # the written-out path holds B x N x 512 x (visible keys) scores at a time
_layout: ContextVar[DocumentLayout | None] = ContextVar("document_layout", default=None)
_cached_positions: ContextVar[Tensor | None] = ContextVar("cached_positions", default=None)


@dataclass(frozen=True)
class MaskRule:
    """Stands in for a layer's mask: query q sees keys k with 0 <= q - k < sliding_window (None: no limit)."""

    sliding_window: int | None = None


def register_target_attention() -> str:
    """Make the attention known to transformers and return the name to load models with; safe to repeat."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, target_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask_rule)
    return NAME


def check_target(model: Any) -> None:
    """Refuse by name, with InputError, a transformers model whose documents this attention cannot isolate."""
    if not getattr(model, "_supports_attention_backend", False):
        raise _refusal(type(model).__name__, "attention outside transformers' attention interface")
    if getattr(model, "_is_stateful", False):
        raise _refusal(type(model).__name__, "recurrent layers")


@contextmanager
def document_layout(layout: DocumentLayout) -> Iterator[None]:
    """Within the block, every forward of a registered model takes its one row as `layout`'s documents."""
    token = _layout.set(layout)
    try:
        yield
    finally:
        _layout.reset(token)


@contextmanager
def cached_rows(positions_BT: Tensor) -> Iterator[None]:
    """Within the block, query t of row b stands at `positions_BT[b, t]` and key s of any row at position s,
    so a query sees its row's keys up to its own position, whatever lies behind them.
    """
    token = _cached_positions.set(positions_BT)
    try:
        yield
    finally:
        _cached_positions.reset(token)


def mask_rule(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    attention_mask: Tensor | None,
    config: Any,
    local_size: int | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> MaskRule:
    """transformers' mask function: the request of one layer type as a `MaskRule`.

    q_length, kv_length, q_offset, kv_offset: where queries and keys lie, in tokens; attention_mask: bool
    `[B, S]`, True for real tokens; local_size: window or chunk in tokens; use_vmap: the model brings a mask
    function of its own. Raises InputError where a window is not the whole truth.
    """
    family = getattr(config, "model_type", type(config).__name__)
    if "allow_is_bidirectional_skip" in kwargs:
        raise _refusal(family, "bidirectional attention")
    if use_vmap:
        raise _refusal(family, "a mask function of its own")
    if local_size is not None and local_size == getattr(config, "attention_chunk_size", None):
        if kv_length > local_size:
            raise _refusal(family, f"attention in chunks of {local_size} on {kv_length} tokens")
        return MaskRule()
    if bool(q_offset + q_length != kv_offset + kv_length):
        raise _refusal(family, f"a preallocated cache of {kv_length} tokens")
    # Real tokens never see padding on their right, so such a mask changes nothing; any other one would.
    if attention_mask is not None and bool((attention_mask[:, 1:] > attention_mask[:, :-1]).any()):
        raise _refusal(family, "padding before real tokens")
    return MaskRule(local_size)


class _Form(NamedTuple):
    """How scores are made and softmaxed; see `target_attention`."""

    scale: float
    window: int | None
    softcap: float | None
    sinks_N: Tensor | None

    def is_plain(self, num_keys: int) -> bool:
        """Whether this is ordinary causal attention on documents of at most num_keys tokens."""
        windowed = self.window is not None and self.window < num_keys
        return not windowed and self.softcap is None and self.sinks_N is None


@torch.no_grad()
def target_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskRule | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function; query `[B, N, T, d]`, keys `[B, H, S, d]` -> `[B, T, N, d_v]`, None.

    With a `document_layout`, B is 1 and T = S is the packed row. Within `cached_rows` rows differ in length.
    Without either the T queries are the last of S tokens (S > T with a cache). scaling: factor on the scores,
    1 / sqrt(d) when None; softcap: scores become softcap * tanh(scores / softcap); s_aux `[N]`: gpt-oss
    sinks, a logit per head that takes probability but has no value; sliding_window counts only without a
    `MaskRule`. No gradients. Raises InputError for what is not exact here.
    """
    name = type(module).__name__
    if isinstance(attention_mask, Tensor):
        raise _refusal(name, f"an attention mask of its own {list(attention_mask.shape)}")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise _refusal(name, "attention that is not causal")
    if dropout or position_bias is not None:
        raise _refusal(name, "attention dropout" if dropout else "position biases")
    window = attention_mask.sliding_window if isinstance(attention_mask, MaskRule) else sliding_window
    form = _Form(query.shape[-1] ** -0.5 if scaling is None else scaling, window, softcap, s_aux)
    if (positions_BT := _cached_positions.get()) is not None:
        return _attend_cached(query, key, value, positions_BT, form).transpose(1, 2), None
    layout = _layout.get()
    if layout is None:
        return _attend(query, key, value, form).transpose(1, 2), None
    if query.shape[0] != 1 or not query.shape[2] == key.shape[2] == layout.num_rows:
        found = f"queries {list(query.shape[:3])} and keys {list(key.shape[:3])}"
        raise ValueError(f"a document layout describes one row of {layout.num_rows} tokens, not {found}")
    if form.is_plain(layout.max_seqlen) and query.shape[-1] == value.shape[-1]:
        flat = [x[0].transpose(0, 1) for x in (query, key, value)]
        return causal_attention(flat[0], flat[1], flat[2], layout, scale=form.scale)[None], None
    documents = [slice(start, stop) for start, stop in layout.documents]
    parts = [_attend(query[:, :, rows], key[:, :, rows], value[:, :, rows], form) for rows in documents]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _attend(query: Tensor, key: Tensor, value: Tensor, form: _Form) -> Tensor:
    """Causal attention of the last T of S tokens: `[B, N, T, d]`, `[B, H, S, d]`, -> `[B, N, T, d_v]`."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    if form.is_plain(num_keys) and num_queries in (1, num_keys):
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=num_queries > 1, scale=form.scale, enable_gqa=True
        )
    window = num_keys if form.window is None else form.window
    positions = torch.arange(num_keys, device=query.device)
    first = num_keys - num_queries  # position of query 0
    blocks = []
    for low in range(first, num_keys, _BLOCK_ROWS):
        high = min(low + _BLOCK_ROWS, num_keys)
        seen = slice(max(0, low - window + 1), high)
        distance = positions[low:high, None] - positions[seen]
        visible = (distance >= 0) & (distance < window)
        rows = query[:, :, low - first : high - first]
        blocks.append(_attend_block(rows, key[:, :, seen], value[:, :, seen], visible, form))
    return torch.cat(blocks, dim=2)


def _attend_cached(query: Tensor, key: Tensor, value: Tensor, positions_BT: Tensor, form: _Form) -> Tensor:
    """Attention over caches: query t of row b sees keys 0..positions_BT[b, t], or the last of them."""
    distance_BTS = positions_BT[:, :, None] - torch.arange(key.shape[2], device=key.device)
    visible_BTS = distance_BTS >= 0
    if form.window is not None:
        visible_BTS &= distance_BTS < form.window
    if form.softcap is None and form.sinks_N is None:
        return masked_attention(query, key, value, visible_BTS, form.scale)
    return _attend_block(query, key, value, visible_BTS[:, None, None], form)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, visible_BTS: Tensor, scale: float) -> Tensor:
    """Attention with a mask a row: `[B, N, T, d]`, `[B, H, S, d]`, bool `[B, T, S]` -> `[B, N, T, d_v]`.

    The queries of a group lie along T, so that keys are read once and not repeated for each query head.
    """
    grouped = query.unflatten(1, (key.shape[1], -1))
    mask = visible_BTS[:, None].repeat(1, 1, grouped.shape[2], 1)
    out = F.scaled_dot_product_attention(grouped.flatten(2, 3), key, value, attn_mask=mask, scale=scale)
    return out.unflatten(2, grouped.shape[2:4]).flatten(1, 2)


def _attend_block(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, form: _Form) -> Tensor:
    """Masked attention written out: `[B, N, r, d]`, `[B, H, s, d]`, bool `[r, s]` or `[B, 1, 1, r, s]` ->
    `[B, N, r, d_v]`.

    The softmax runs in float32 and the products in the model's dtype, as in transformers' eager attention.
    """
    num_kv_heads = key.shape[1]
    scores = form.scale * (query.unflatten(1, (num_kv_heads, -1)) @ key[:, :, None].transpose(-1, -2))
    if form.softcap is not None:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    scores = scores.float().masked_fill(~visible, -math.inf)
    if form.sinks_N is not None:
        sinks = form.sinks_N.float().view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    probs = scores.softmax(dim=-1)[..., : key.shape[2]].to(value.dtype)
    return (probs @ value[:, :, None]).flatten(1, 2)


def _refusal(who: str, what: str) -> InputError:
    return InputError(
        f"{who} uses {what}, which the document-isolating attention does not compute: use another --target, "
        f"or {PADDED_REMEDY}"
    )
