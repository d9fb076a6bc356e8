"""Target and draft head with their key/value caches, over a batch of rows that hold different numbers of
tokens.

In both caches position p of a row lies in slot p, and a query sees the slots up to its own position. So
rejected tokens need no removal: the row's next tokens stand at the same positions and overwrite them, and
until then nothing sees them. A padded prompt is undone in the same way.

Shapes: B rows, T new tokens, P tokens of the longest prompt, S slots, H hidden, N heads, d head size.
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from eagle_train.errors import InputError
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.target import FrozenTarget
from eagle_train.model.target_attention import cached_rows, masked_attention


class Slots:
    """Keys and values `[B, H, S, d]` of one layer, allocated when the first are written."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tensors: tuple[Tensor, ...] = ()

    def write(self, new: tuple[Tensor, Tensor], positions_BT: Tensor, num_seen: int) -> tuple[Tensor, Tensor]:
        """Put keys and values `[B, H, T, d]` at their positions; all slots before num_seen come back."""
        if not self.tensors:
            self.tensors = tuple(x.new_zeros(*x.shape[:2], self.capacity, x.shape[3]) for x in new)
        rows_B1 = torch.arange(len(positions_BT), device=positions_BT.device)[:, None]
        for cached, x in zip(self.tensors, new, strict=True):
            cached[rows_B1, :, positions_BT] = x.transpose(1, 2)
        keys, values = (cached[:, :, :num_seen] for cached in self.tensors)
        return keys, values

    def keep(self, rows: Tensor) -> None:
        self.tensors = tuple(x[rows] for x in self.tensors)


class SlotCache(Cache):
    """`Slots` for every layer of a transformers model. `place` says where the next forward's tokens stand."""

    def __init__(self, capacity: int) -> None:
        super().__init__(layers=[])
        self.capacity = capacity
        self.slots: dict[int, Slots] = {}
        self.num_new = self.num_seen = 0

    def place(self, positions_BT: Tensor, num_seen: int) -> None:
        self.positions_BT = positions_BT
        self.num_new, self.num_seen = positions_BT.shape[1], num_seen

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        slots = self.slots.setdefault(layer_idx, Slots(self.capacity))
        return slots.write((key_states, value_states), self.positions_BT, self.num_seen)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_seen - self.num_new

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.num_seen, 0

    def keep(self, rows: Tensor) -> None:
        for slots in self.slots.values():
            slots.keep(rows)


class TargetRows:
    """A target that has read some tokens of each row of a batch and reads on.

    A target with our attention reads ragged rows together. Any other one reads a single row, whose rejected
    tokens transformers' own cache crops.

    aux_layer_ids: the layers whose entering states come back, none in plain decoding; capacity: tokens of the
    longest row, drafts included. Raises InputError where the cache cannot forget tokens.
    """

    def __init__(self, target: FrozenTarget, aux_layer_ids: tuple[int, ...], capacity: int) -> None:
        self.target = target
        self.aux_layer_ids = aux_layer_ids
        cache = _croppable_cache(target)
        self.cache: Any = SlotCache(capacity) if target.isolates_documents else cache
        # Beyond the limit lie drafts that no answer keeps; a learned position table has no row for them.
        self.last_position = (getattr(target.config, "max_position_embeddings", None) or capacity) - 1
        names = inspect.signature(target.decoder.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"

    def read(self, token_ids_BT: Tensor, first_B: Tensor, num_seen: int) -> tuple[Tensor | None, Tensor]:
        """Aux states `[B, T, 3H]` (None without aux layers) and final states `[B, T, H]` of T new tokens.

        first_B: the position of each row's first new token; num_seen: the longest row, new tokens included.
        """
        num_new = token_ids_BT.shape[1]
        positions_BT = first_B[:, None] + torch.arange(num_new, device=first_B.device)
        attention: Any = nullcontext()
        if isinstance(self.cache, SlotCache):
            self.cache.place(positions_BT, num_seen)
            # A prompt from its first token on is plain causal attention, which needs no mask.
            attention = cached_rows(positions_BT) if num_seen > num_new else nullcontext()
        elif self.cache.get_seq_length():
            self.cache.crop(num_seen - num_new - self.cache.get_seq_length())
        with self.target.capture_states(self.aux_layer_ids) as captured, attention:
            output = self.target.decoder(
                input_ids=token_ids_BT,
                position_ids=positions_BT.clamp(max=self.last_position),
                use_cache=True,
                **{self.cache_name: self.cache},
            )
        aux = [captured[layer_id] for layer_id in self.aux_layer_ids]
        return (torch.cat(aux, dim=-1) if aux else None), output.last_hidden_state

    def keep(self, rows: Tensor) -> None:
        """Forget all rows but these. A single row is never dropped while others go on."""
        if isinstance(self.cache, SlotCache):
            self.cache.keep(rows)


class DraftRows:
    """A draft head on the rows of a `TargetRows`: row t reads token x_{t+1} and the target's states at t."""

    def __init__(self, head: Eagle3DraftHead, embed: Callable[[Tensor], Tensor], capacity: int) -> None:
        self.head = head
        self.embed = embed
        self.slots = Slots(capacity)
        self.draft_token_ids = head.draft_token_ids

    def extend(
        self, token_ids_BT: Tensor, aux_BT3H: Tensor, first_B: Tensor, num_rows_B: Tensor, num_seen: int
    ) -> Tensor:
        """Step 0 on the rows that the target's real states are now known for; the last row's output `[B, H]`.

        token_ids_BT: x_{t+1} of rows t = first, first + 1, ...; num_rows_B: how many of the T are real (what
        the others write is overwritten before a real row sees it); num_seen: the longest row, in real rows.
        """
        positions_BT = first_B[:, None] + torch.arange(token_ids_BT.shape[1], device=first_B.device)
        hidden_BTH = self.head.fuse(aux_BT3H)
        out_BTH = self._step(token_ids_BT, hidden_BTH, positions_BT, num_seen)
        return out_BTH[torch.arange(len(out_BTH), device=out_BTH.device), num_rows_B - 1]

    def draft(
        self,
        hidden_BH: Tensor,
        last_row_B: Tensor,
        num_tokens: int,
        num_seen: int,
        choose: Callable[[Tensor, int], Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        """Draft a chain from the last row: target ids `[B, n]`, and the logits `[B, V_d]` of each step.

        last_row_B: position of that row; num_seen: the longest row so far, in rows; choose: draft-vocabulary
        index `[B]` from a step's logits and its number.
        """
        tokens: list[Tensor] = []
        logits: list[Tensor] = []
        for step in range(num_tokens):
            if step:
                hidden_BH = self._step(
                    tokens[-1][:, None], hidden_BH[:, None], (last_row_B + step)[:, None], num_seen + step
                )[:, 0]
            logits.append(self.head.logits(hidden_BH))
            tokens.append(self.draft_token_ids[choose(logits[-1], step)])
        return torch.stack(tokens, dim=1), logits

    def keep(self, rows: Tensor) -> None:
        self.slots.keep(rows)

    def _step(self, token_ids_BT: Tensor, hidden_BTH: Tensor, positions_BT: Tensor, num_seen: int) -> Tensor:
        """One pass of the draft layer over T rows of each: `[B, T, H]`."""
        shape = token_ids_BT.shape
        embeds = self.embed(token_ids_BT.flatten()).to(hidden_BTH.dtype)
        projected = self.head.project(embeds, hidden_BTH.flatten(0, 1), positions_BT.flatten())
        query, key, value = (x.unflatten(0, shape).transpose(1, 2) for x in projected)
        is_prompt = not self.slots.tensors  # plain causal attention, which needs no mask
        keys, values = self.slots.write((key, value), positions_BT, num_seen)
        if is_prompt:
            attended = F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
        else:
            visible_BTS = torch.arange(num_seen, device=keys.device) <= positions_BT[:, :, None]
            attended = masked_attention(query, keys, values, visible_BTS, query.shape[-1] ** -0.5)
        out = self.head.finish(hidden_BTH.flatten(0, 1), attended.transpose(1, 2).flatten(0, 1))
        return out.unflatten(0, shape)


def _croppable_cache(target: FrozenTarget) -> Any:
    cache = DynamicCache(config=target.model.config)
    if not getattr(cache, "is_croppable", True):
        raise InputError(
            f"{type(target.model).__name__} keeps a state that cannot be taken back to before a rejected "
            "token, so it cannot verify drafts; use a --target with attention layers only"
        )
    cache.activate_past_recording()  # sliding windows keep what a rejection may bring back
    return cache
