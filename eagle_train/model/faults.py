"""What makes a stored draft head unusable: loading refuses it, and `check` calls it a fault.

Shapes: V vocabulary, D draft vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from eagle_train.model.layouts import MOST, aux_layer_ids

REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
MAPS = ("d2t", "t2d")


def size_faults(flat: Mapping[str, Any]) -> list[str]:
    """Sizes of a flat config that are absent though nothing stands in for them, or contradict each other.
    Their types are right (`layouts.read_stored_head`).
    """
    lost = [key for key in REQUIRED if key not in flat]
    if lost:
        return [f"config.json lacks {', '.join(lost)}"]
    found = []
    heads, V = flat["num_attention_heads"], flat["vocab_size"]
    groups, D = flat.get("num_key_value_heads", heads), flat.get("draft_vocab_size", V)
    if heads % groups:
        found.append(f"{heads} heads cannot share {groups} key-value heads evenly")
    if (size := flat.get("head_dim", flat["hidden_size"] // heads)) % 2 or size < 1:
        found.append(f"heads of size {size} cannot be rotated in pairs")
    if heads * size > MOST:
        found.append(f"{heads} heads of size {size} are {heads * size:,} wide, above {MOST:,}")
    if D > V:
        found.append(f"draft_vocab_size {D:,} is above vocab_size {V:,}")
    return found


def layer_count_fault(flat: Mapping[str, Any]) -> str | None:
    """Readers without the key take LlamaConfig's 32 layers, of which all but one would be random."""
    return None if "num_hidden_layers" in flat else "config.json lacks num_hidden_layers"


def layer_order_fault(flat: dict[str, Any]) -> str | None:
    """Explicit aux layers must be distinct, rise and not be negative."""
    ids = aux_layer_ids(flat)
    if ids is None or (ids == sorted(set(ids)) and ids[0] >= 0):
        return None
    return f"aux layers {ids} " + ("lie below 0" if min(ids) < 0 else "do not rise")


def value_fault(name: str, tensor: Tensor) -> str | None:
    """A weight that holds no number or was never trained."""
    if name in MAPS:
        return None
    if not tensor.is_floating_point():
        kind = str(tensor.dtype).removeprefix("torch.")
        return f"{name} is {kind}; quantised weights are not read, they must be floating-point numbers"
    if tensor.element_size() == 1:  # PyTorch has no isfinite for 8-bit floats
        tensor = tensor.float()
    if not bool(tensor.isfinite().all()):
        return f"{name} holds a NaN or an infinity"
    # A bias may be zero; a weight of zeros, a norm's as well, gives nothing to accept.
    is_lost = name.endswith(".weight") and not bool(tensor.any())
    return f"{name} is all zero: never trained" if is_lost else None


def map_fault(d2t_D: Tensor, t2d_V: Tensor | None, vocab_size: int) -> str | None:
    """d2t must hold offsets (target id = i + d2t[i]) of distinct ids inside the vocabulary, and t2d, where
    it is there, must mark the same ids: maps that disagree accept nothing, silently.
    """
    if not holds_whole_numbers(d2t_D):
        return f"d2t is {str(d2t_D.dtype).removeprefix('torch.')}; it must hold whole numbers"
    ids_D = d2t_D.long() + torch.arange(len(d2t_D))
    if _is_map(ids_D, t2d_V, vocab_size) and not _looks_absolute(d2t_D, t2d_V):
        return None
    if _is_map(d2t_D.long(), t2d_V, vocab_size):
        return "d2t holds absolute ids where engines add the row's number to it; write offsets, target id - i"
    outside = (ids_D < 0) | (ids_D >= vocab_size)
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        return f"d2t leads out of the vocabulary: row {row} to id {int(ids_D[row])} of {vocab_size:,}"
    if twice := len(ids_D) - len(ids_D.unique()):
        return f"d2t names {twice:,} target ids more than once"
    return "d2t and t2d disagree on which tokens the draft vocabulary holds"


def holds_whole_numbers(tensor: Tensor) -> bool:
    """Whether a tensor's dtype is one of integers."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _is_map(ids_D: Tensor, t2d_V: Tensor | None, vocab_size: int) -> bool:
    """Distinct ids within the vocabulary, the very ones that t2d marks."""
    if bool(((ids_D < 0) | (ids_D >= vocab_size)).any()) or len(ids_D.unique()) < len(ids_D):
        return False
    return t2d_V is None or torch.equal(t2d_V.bool().nonzero().squeeze(1), ids_D.sort().values)


def _looks_absolute(d2t_D: Tensor, t2d_V: Tensor | None) -> bool:
    """Without t2d: offsets that always rise would mean a vocabulary without two neighbouring ids."""
    return t2d_V is None and len(d2t_D) > 8 and bool((d2t_D.diff() > 0).all())
