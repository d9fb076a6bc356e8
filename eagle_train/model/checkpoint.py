"""A draft head on disk, in the official EAGLE-3 layout that vLLM, SGLang and llama.cpp load.

`config.json` is flat, `model.safetensors` has bare names (`midlayer.*`, `fc`, `norm`, `lm_head`, `d2t` as
offsets, `t2d`).
The embedding is left out: engines share the target's. Default aux layers are left out of the config, because
engines disagree on what an explicit id means and agree on the default.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle_train.errors import InputError
from eagle_train.files import write_atomically, write_json
from eagle_train.model.eagle3 import Eagle3Config, Eagle3DraftHead
from eagle_train.model.faults import (
    layer_count_fault,
    layer_order_fault,
    map_fault,
    size_faults,
    value_fault,
)
from eagle_train.model.layouts import (
    AUX_IDS_KEY,
    DEFAULT_RMS_NORM_EPS,
    EMBEDDING,
    StoredHead,
    aux_layer_ids,
    default_aux_layer_ids,
    read_stored_head,
    rope_of,
)
from eagle_train.model.options import unsupported

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def save_draft_head(
    head: Eagle3DraftHead, directory: Path, *, target_config: Any, dtype: torch.dtype
) -> None:
    """Write `model.safetensors` (floats in `dtype`) and `config.json`. target_config: the target's text
    config.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for name, tensor in head.state_dict().items()
    }
    if head.config.draft_vocab_size == head.config.vocab_size:
        # Engines take absent maps for "the draft vocabulary is the target's".
        del tensors["d2t"], tensors["t2d"]
    write_atomically(
        directory / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"})
    )
    write_json(directory / "config.json", stored_config(head.config, target_config, dtype))


def stored_config(config: Eagle3Config, target_config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """`config.json` of a head whose floats are stored in `dtype`. target_config: the target's text config."""
    special = {name: getattr(target_config, name, None) for name in SPECIAL_TOKENS}
    values = official_config(config, str(dtype).removeprefix("torch."), special)
    layers = config.aux_layer_ids
    if layers is not None and layers != default_aux_layer_ids(target_config.num_hidden_layers):
        values[AUX_IDS_KEY] = list(layers)
    return values


def load_draft_head(directory: str | Path) -> Eagle3DraftHead:
    """A head from a directory in the official or the speculators layout (`model/layouts.py`), float32, weight
    for weight.

    Raises InputError naming the file, each missing, surplus, misshapen, non-finite or untrained tensor, or
    the options that our draft layer does not have.
    """
    return draft_head_of(read_stored_head(directory))


def draft_head_of(stored: StoredHead) -> Eagle3DraftHead:
    """As `load_draft_head`, of a directory that was read already."""
    directory = stored.directory
    if found := unsupported(stored):
        raise InputError(
            f"{directory}: cannot be loaded for training or measuring here: {'; '.join(found)}. "
            f"`python -m eagle_train check {directory}` says which engines serve it as it is"
        )
    config = draft_config_of(stored)
    with torch.device("meta"):  # shapes alone: sizes that the tensors do not have must not be allocated
        shapes = {name: tensor.shape for name, tensor in Eagle3DraftHead(config).state_dict().items()}
    tensors = dict(stored.tensors)
    if config.draft_vocab_size == config.vocab_size:
        tensors.setdefault("d2t", torch.zeros(config.vocab_size, dtype=torch.int64))
    if "t2d" not in tensors and "d2t" in tensors:
        del shapes["t2d"]  # engines read no other map than d2t, so it can be derived from that
    if EMBEDDING in tensors:
        shapes[EMBEDDING] = torch.Size((config.vocab_size, config.hidden_size))
    own_names = {stored.prefixed.get(name, name): tensor for name, tensor in tensors.items()}
    if problems := _problems(own_names, shapes):
        raise InputError(f"{directory}: not a sound EAGLE-3 head: {'; '.join(problems)}")
    if fault := map_fault(tensors["d2t"], tensors.get("t2d"), config.vocab_size):
        raise InputError(f"{directory}: not a sound EAGLE-3 head: {fault}")
    tensors["t2d"] = t2d_of(tensors["d2t"], config.vocab_size)
    # Some published heads carry the target's embedding; ours is always the target's own.
    tensors.pop(EMBEDDING, None)
    head = Eagle3DraftHead(config)
    head.load_state_dict(tensors)
    return head


def _problems(tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> list[str]:
    """Each missing, surplus, misshapen or untrained tensor, by the file's own name."""
    problems = [f"{name} is missing" for name in sorted(set(shapes) - set(tensors))]
    problems += [f"{name} is not part of the layout" for name in sorted(set(tensors) - set(shapes))]
    for name in sorted(set(tensors) & set(shapes)):
        tensor = tensors[name]
        if tensor.shape != shapes[name]:
            problems.append(f"{name} has shape {list(tensor.shape)}, the config says {list(shapes[name])}")
        elif fault := value_fault(name, tensor):
            problems.append(fault)
    return problems


def draft_config_of(stored: StoredHead) -> Eagle3Config:
    """Sizes of a stored head. Raises InputError naming what its config lacks or what contradicts itself."""
    values = stored.flat
    layers = (layer_count_fault(values), layer_order_fault(values))
    if faults := [*size_faults(values), *filter(None, layers)]:
        raise InputError(f"{stored.directory / 'config.json'}: {'; '.join(faults)}")
    heads, ids = values["num_attention_heads"], aux_layer_ids(values)
    return Eagle3Config(
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=values.get("num_key_value_heads", heads),
        head_dim=values.get("head_dim", values["hidden_size"] // heads),
        vocab_size=values["vocab_size"],
        draft_vocab_size=values.get("draft_vocab_size", values["vocab_size"]),
        rms_norm_eps=values.get("rms_norm_eps", DEFAULT_RMS_NORM_EPS),
        rope_theta=rope_of(values)[0],
        max_position_embeddings=values.get("max_position_embeddings", 2048),
        aux_layer_ids=(ids[0], ids[1], ids[2]) if ids else None,
    )


def official_config(config: Eagle3Config, dtype: str, special: dict[str, Any]) -> dict[str, Any]:
    """`config.json` of the official layout without aux layers, whose key and meaning differ by engine.

    special: ids under the names of `SPECIAL_TOKENS`.
    """
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **special,
    }


def t2d_of(d2t_D: Tensor, vocab_size: int) -> Tensor:
    """The second map `[V]`, which marks the target ids of a sound first one."""
    t2d_V = torch.zeros(vocab_size, dtype=torch.bool)
    t2d_V[d2t_D.long() + torch.arange(len(d2t_D))] = True
    return t2d_V
