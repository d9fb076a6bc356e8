"""A draft head on disk, in the official EAGLE-3 layout that vLLM, SGLang and llama.cpp load.

`config.json` is flat, `model.safetensors` has bare names (`midlayer.*`, `fc`, `norm`, `lm_head`, `d2t` as
offsets, `t2d`).
The embedding is left out: engines share the target's. Default aux layers are left out of the config, because
engines disagree on what an explicit id means and agree on the default.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle_train.errors import InputError
from eagle_train.files import write_atomically, write_json
from eagle_train.model.eagle3 import Eagle3Config, Eagle3DraftHead

AUX_IDS_KEY = "eagle_aux_hidden_state_layer_ids"


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
    write_json(directory / "config.json", _config_json(head.config, target_config, dtype))


def load_draft_head(directory: str | Path) -> Eagle3DraftHead:
    """A head from a directory in the official layout, float32, with frozen shapes checked.

    Raises InputError naming the file or each missing, surplus, misshapen or non-finite tensor.
    """
    directory = Path(directory)
    config = read_draft_config(directory)
    tensors = _read_tensors(directory)
    head = Eagle3DraftHead(config)
    expected = head.state_dict()
    if config.draft_vocab_size == config.vocab_size:
        for name in ("d2t", "t2d"):
            tensors.setdefault(name, expected[name])
    # Some published heads carry the target's embedding; ours is always the target's own.
    tensors.pop("embed_tokens.weight", None)
    problems = [f"{name} is missing" for name in sorted(set(expected) - set(tensors))]
    problems += [f"{name} is not part of the layout" for name in sorted(set(tensors) - set(expected))]
    for name in sorted(set(tensors) & set(expected)):
        tensor = tensors[name]
        if tensor.shape != expected[name].shape:
            problems.append(
                f"{name} has shape {list(tensor.shape)}, the config says {list(expected[name].shape)}"
            )
        elif tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            problems.append(f"{name} holds a NaN or an infinity")
    if problems:
        raise InputError(f"{directory}: not a sound EAGLE-3 head: {'; '.join(problems)}")
    head.load_state_dict(tensors)
    _check_maps(head, directory)
    return head


def read_draft_config(directory: Path) -> Eagle3Config:
    """`config.json` of the official layout. Raises InputError naming what is missing."""
    path = directory / "config.json"
    if not path.is_file():
        raise InputError(f"{path} does not exist; name a directory that holds a trained draft head")
    try:
        values = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no JSON object; it is not an EAGLE-3 head's config")
    required = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "rms_norm_eps")
    missing = [key for key in required if key not in values]
    if missing:
        raise InputError(f"{path} lacks {', '.join(missing)}; it is not an EAGLE-3 head's config")
    heads = values["num_attention_heads"]
    return Eagle3Config(
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        vocab_size=values["vocab_size"],
        draft_vocab_size=values.get("draft_vocab_size") or values["vocab_size"],
        rms_norm_eps=values["rms_norm_eps"],
        rope_theta=_rope_theta(values, path),
        max_position_embeddings=values.get("max_position_embeddings", 2048),
        aux_layer_ids=_aux_layer_ids(values),
    )


def _rope_theta(values: dict[str, Any], path: Path) -> float:
    """The rotary base, from either config schema. Raises InputError for a scaled rotary embedding."""
    parameters = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind != "default":
        raise InputError(
            f"{path}: rotary scaling of type {kind!r} is not supported; only an unscaled base is"
        )
    return float(parameters.get("rope_theta") or values.get("rope_theta") or 10_000.0)


def _aux_layer_ids(values: dict[str, Any]) -> tuple[int, int, int] | None:
    ids = values.get(AUX_IDS_KEY) or (values.get("eagle_config") or {}).get(AUX_IDS_KEY)
    if ids and len(ids) != 3:
        raise InputError(f"config.json has {AUX_IDS_KEY} {ids}; this package's heads read three layers")
    return (ids[0], ids[1], ids[2]) if ids else None


def _config_json(config: Eagle3Config, target_config: Any, dtype: torch.dtype) -> dict[str, Any]:
    num_layers = target_config.num_hidden_layers
    values: dict[str, Any] = {
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
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        values[name] = getattr(target_config, name, None)
    if config.aux_layer_ids not in (None, (2, num_layers // 2, num_layers - 3)):
        values[AUX_IDS_KEY] = list(config.aux_layer_ids)
    return values


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    if (directory / "model.safetensors") in files:
        files = [directory / "model.safetensors"]
    if not files:
        raise InputError(f"{directory} holds no .safetensors file; other weight formats are not unpickled")
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            tensors |= load_file(path)
        except SafetensorError as error:
            raise InputError(f"{path} is not a sound safetensors file: {error}") from error
    return tensors


def _check_maps(head: Eagle3DraftHead, directory: Path) -> None:
    """`nonzero(t2d)` must be `i + d2t[i]`: two maps that disagree accept nothing, silently."""
    ids = head.draft_token_ids
    in_range = bool(((ids >= 0) & (ids < head.config.vocab_size)).all())
    if not in_range or not torch.equal(torch.nonzero(head.t2d).squeeze(1), ids.sort().values):
        raise InputError(
            f"{directory}: d2t and t2d disagree; d2t must hold offsets (target id = i + d2t[i]) of "
            "the ids in t2d"
        )
