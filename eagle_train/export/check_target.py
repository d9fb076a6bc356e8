"""What a draft head and the target that it is served with must have in common."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils.hub import cached_file

from eagle_train.errors import InputError
from eagle_train.export.findings import (
    BY_SOURCE,
    OPENVINO,
    REFUSED,
    SGLANG,
    TENSORRT,
    UNKNOWN,
    WRONG,
    Effect,
    Finding,
    everywhere,
    of_engines,
)
from eagle_train.export.record import RunRecord
from eagle_train.model.layouts import (
    EAGLE1,
    EMBEDDING,
    INDEX,
    StoredHead,
    aux_layer_ids,
    default_aux_layer_ids,
    read_weight_map,
    rope_of,
    rope_parameters,
)

# How families call the token embedding; what stands before differs.
EMBEDDING_NAMES = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
# Who always drafts with the target's embedding; vLLM and llama.cpp take the head's where it has one.
SHARE_EMBEDDING = (SGLANG, TENSORRT, OPENVINO)
TRAINED_COSINE = 0.9  # mean cosine of rows with the target's, below which they are not the target's at all


def target_findings(
    stored: StoredHead, target_config: Any, embedding_VH: Tensor | None, record: RunRecord
) -> list[Finding]:
    """Every mismatch with the target. target_config: its text config; embedding_VH: its token embedding,
    asked for where the head has one of its own; record: beside the head.
    """
    found = _size_findings(stored, target_config) + _rope_findings(stored, target_config)
    if stored.algorithm != EAGLE1:
        found += _aux_findings(stored, target_config.num_hidden_layers, record)
    own = stored.tensors.get("embed_tokens.weight")
    if own is not None and embedding_VH is not None:
        found += _embedding_findings(own, embedding_VH)
    return found


def _size_findings(stored: StoredHead, target_config: Any) -> list[Finding]:
    flat, found = stored.flat, []
    read = flat.get("target_hidden_size") or flat.get("hidden_size")
    if read != target_config.hidden_size:
        why = f"the head reads states of hidden size {read}, the target's are {target_config.hidden_size}"
        found.append(Finding(f"{why}; it belongs to another target", True, everywhere(REFUSED, why)))
    if flat.get("vocab_size") != target_config.vocab_size:
        why = f"vocab_size is {flat.get('vocab_size')}, the target's {target_config.vocab_size}"
        effects = everywhere(WRONG, f"{why}, {BY_SOURCE}")
        found.append(Finding(f"{why}; it belongs to another target", True, effects))
    limit = getattr(target_config, "max_position_embeddings", None)
    own = flat.get("max_position_embeddings", 2048)
    if limit is not None and own < limit:
        why = f"max_position_embeddings is {own}, the target's {limit}"
        effects = everywhere(WRONG, f"{why}: fails or drafts badly beyond {own} tokens")
        found.append(Finding(f"{why}; write the target's", True, effects))
    elif limit is not None and own > limit:
        found.append(Finding(f"max_position_embeddings is {own}, above the target's {limit}", False))
    return found


def _rope_findings(stored: StoredHead, target_config: Any) -> list[Finding]:
    """Engines rotate a head by its own config. Trainers differ in what they write there: some published heads
    were trained with the default base of 10,000 whatever the target's, so a difference is no fault by itself.
    """
    target_flat = target_config.to_dict()
    theta, kind = rope_of(stored.flat)
    target_theta, target_kind = rope_of(target_flat)
    found = []
    if theta != target_theta:
        why = f"rope_theta is {theta:,.0f}, the target's {target_theta:,.0f}: right only if it was trained so"
        found.append(Finding(why, False, everywhere(UNKNOWN, why)))
    if kind != target_kind:
        why = f"rotary scaling is {kind!r}, the target's {target_kind!r}"
        found.append(Finding(f"{why}: right if the head was trained so (heads of this package are)", False))
    elif changed := _different(rope_parameters(stored.flat), rope_parameters(target_flat)):
        why = f"rotary scaling of type {kind!r} differs from the target's in {', '.join(changed)}"
        found.append(Finding(f"{why}: right only if it was trained so", False, everywhere(UNKNOWN, why)))
    return found


def _different(own: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Parameters that both name with different values, the base apart."""
    return sorted(key for key in own.keys() & other.keys() - {"rope_theta"} if own[key] != other[key])


def _aux_findings(stored: StoredHead, num_layers: int, record: RunRecord) -> list[Finding]:
    ids = aux_layer_ids(stored.flat)
    if ids is None:
        if num_layers >= 7:
            return _record_findings(default_aux_layer_ids(num_layers), record)
        why = f"the default aux layers of a target with {num_layers} layers coincide"
        effects = everywhere(
            WRONG,
            f"{why}, {BY_SOURCE}",
            vllm=Effect(REFUSED, f"{why}: two states are read where three are needed"),
            openvino=Effect(REFUSED, f"{why}; its default needs 10 layers"),
        )
        if num_layers <= 5:
            effects |= of_engines(REFUSED, f"{why}, {BY_SOURCE}", TENSORRT)
        return [Finding(f"{why}; write the layers that the head was trained on", True, effects)]
    if not all(0 <= layer_id < num_layers for layer_id in ids):
        why = f"aux layers {ids} lie outside the target's {num_layers} layers"
        return [Finding(why, True, everywhere(REFUSED, f"{why}, {BY_SOURCE}"))]
    return _record_findings(ids, record)


def _record_findings(read: Sequence[int], record: RunRecord) -> list[Finding]:
    """A config is silent where the layers are the default of the target that was trained for."""
    why = record.layers_fault(read)
    return [Finding(f"{why}; it belongs to another target", True, everywhere(WRONG, why))] if why else []


def _embedding_findings(own_VH: Tensor, target_VH: Tensor) -> list[Finding]:
    """Engines read the head's own embedding where it has one, so it must be the target's or be trained."""
    if own_VH.shape != target_VH.shape:
        why = f"embed_tokens.weight is {list(own_VH.shape)}, the target's {list(target_VH.shape)}"
        return [Finding(why, True, everywhere(WRONG, why))]
    if torch.equal(own_VH, target_VH.to(own_VH.dtype)):
        return []
    cosine = torch.nn.functional.cosine_similarity(own_VH.float(), target_VH.float(), dim=1).mean().item()
    if cosine >= TRAINED_COSINE:
        text = f"embed_tokens.weight is not quite the target's (mean cosine {cosine:.3f}): trained on"
        why = f"drafts with the target's embedding, and the head has its own, {BY_SOURCE}"
        return [Finding(text, False, of_engines(WRONG, why, *SHARE_EMBEDDING))]
    why = f"embed_tokens.weight is not the target's (mean cosine {cosine:.3f})"
    text = f"{why}: untrained, or another model's; leave it out, and engines share the target's"
    return [Finding(text, True, everywhere(WRONG, why))]


def unseen_embedding(stored: StoredHead) -> list[Finding]:
    """What an embedding of the head's own means where no target is named to compare it with."""
    if EMBEDDING not in stored.tensors:
        return []
    why = f"drafts with the target's embedding, and the head has one: name --target to compare, {BY_SOURCE}"
    text = f"{EMBEDDING} is there: heads share the target's or bring one that was trained on"
    return [Finding(text, False, of_engines(UNKNOWN, why, *SHARE_EMBEDDING))]


def read_target_embedding(name_or_path: str) -> Tensor:
    """The target's token embedding `[V, H]` alone, in the file's dtype. Raises InputError where it is not
    found.
    """
    try:
        name, path = _find_embedding(name_or_path)
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"--target {name_or_path}: its weights cannot be read ({reason})") from error


def _find_embedding(name_or_path: str) -> tuple[str, Path]:
    """Name and file of the embedding, so that of a sharded target one shard is read."""
    single = cached_file(name_or_path, "model.safetensors", _raise_exceptions_for_missing_entries=False)
    if single is not None:
        with safe_open(single, framework="pt") as file:
            files = dict.fromkeys(file.keys(), "model.safetensors")
    else:
        index = cached_file(name_or_path, INDEX, _raise_exceptions_for_missing_entries=False)
        files = read_weight_map(Path(index)) if index else {}
    names = [name for name in files if name.endswith(EMBEDDING_NAMES) and "vision" not in name]
    if len(names) != 1:
        raise InputError(
            f"--target {name_or_path}: {len(names)} tensors look like its token embedding; it must have one "
            f"that ends in {' or '.join(EMBEDDING_NAMES[:2])}"
        )
    return names[0], Path(cached_file(name_or_path, files[names[0]]))
