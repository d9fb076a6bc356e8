"""Options of a stored head's config that change what its layer computes, and which of them the draft layer
here does not have.
"""

from collections.abc import Mapping
from typing import Any

from eagle_train.model.layouts import (
    EAGLE3,
    SPECULATORS,
    StoredHead,
    aux_layer_ids,
    eagle_config,
    rope_of,
    rope_parameters,
    scaling_kind,
    shown,
)

LAYER_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Kinds of model whose layer is Llama's where no tensor and no option says otherwise.
LLAMA_TYPES = ("llama", "mistral", "qwen2")
# The value with which an option changes nothing; None: there is none. From the configs of transformers'
# decoder families, which engines read with the class that the head's model_type names.
NEUTRAL: Mapping[str, Any] = {
    "quantization_config": {},
    "partial_rotary_factor": 1, "rotary_pct": 1, "rope_pct": 1, "rope_percent": 1, "rotary_emb_fraction": 1,
    "rope_dim": None, "rotary_dim": None, "rope_interleave": False, "no_rope_layers": None, "alibi": False,
    "logit_scale": 1, "logits_scaling": 1, "lm_head_multiplier": 1, "final_logit_softcapping": None,
    "embedding_multiplier": 1, "residual_multiplier": 1, "scale_emb": 1, "scale_depth": None,
    "dim_model_base": None, "attention_multiplier": None, "query_pre_attn_scalar": None,
    "attn_logit_softcapping": None, "attn_temperature_tuning": False, "clip_qkv": None,
    "use_qk_norm": False, "qk_norm": False, "qk_layernorm": False, "qkv_bias": False,
    "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": False, "attn_output_gate": False,
    "kv_lora_rank": None, "use_parallel_residual": False, "parallel_attn": False, "hidden_activation": "silu",
}  # fmt: skip
# The same of EAGLE-3 heads alone: keys of eagle_config, and what SGLang and TensorRT-LLM read beside it.
NEUTRAL_EAGLE3: Mapping[str, Any] = {
    "use_aux_hidden_state": True, "num_aux_hidden_states": 3, "use_aux_norm": False, "bias": False,
    "next_layer_regular": True, "eh_proj_before_attn": False, "return_hidden_post_norm": False,
    "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}  # fmt: skip


def changed_options(stored: StoredHead) -> dict[str, Any]:
    """Options that are set to another value than their neutral one, by key, wherever the config has them."""
    neutral = {**NEUTRAL, **(NEUTRAL_EAGLE3 if stored.algorithm == EAGLE3 else {})}
    places = (stored.flat, eagle_config(stored.flat), rope_parameters(stored.flat))
    return {
        key: place[key]
        for place in places
        for key in neutral.keys() & place.keys()
        if place[key] not in (None, neutral[key], [], {})
    }


def unsupported(stored: StoredHead) -> list[str]:
    """What this head has that our draft layer does not, so that training on from it would be wrong."""
    flat = stored.flat
    if stored.algorithm != EAGLE3:
        return [f"it is an {stored.algorithm} head, and the draft layer here is EAGLE-3's"]
    found = [f"{name} is true" for name in LAYER_FLAGS if stored.option(name)]
    if stored.layout == SPECULATORS and stored.option("norm_before_residual") is None:
        found.append(
            "norm_before_residual is not written, and engines disagree on its default (vLLM true, llama.cpp "
            "false); write what it was trained with"
        )
    found += [f"{name} is true" for name in ("attention_bias", "mlp_bias") if flat.get(name)]
    found += [f"{key} is {shown(value)}" for key, value in sorted(changed_options(stored).items())]
    if flat.get("num_hidden_layers", 1) != 1:
        found.append(f"num_hidden_layers is {flat['num_hidden_layers']}")
    if other := other_model_type(flat):
        found.append(other)
    ids = aux_layer_ids(flat)
    if ids is not None and len(ids) != 3:
        found.append(f"it reads {len(ids)} aux layers {ids}, and heads here read three layers")
    is_whole = flat.get("draft_vocab_size", flat.get("vocab_size")) == flat.get("vocab_size")
    if is_whole and "lm_head.weight" not in stored.tensors:
        found.append(
            "it has no lm_head.weight and shares the target's; put that into its model.safetensors to train, "
            "measure or export it"
        )
    if flat.get("hidden_act", "silu") != "silu":
        found.append(f"hidden_act is {flat['hidden_act']}")
    width = flat.get("target_hidden_size")
    if width is not None and width != flat.get("hidden_size"):
        found.append(f"target_hidden_size is {width}, not hidden_size {flat.get('hidden_size')}")
    if slides(flat):
        found.append(f"its attention slides over {flat.get('sliding_window')} tokens")
    if two_scalings(flat):
        found.append(
            "rope_parameters and rope_scaling say different things, and readers take one or the other"
        )
    if (kind := rope_of(flat)[1]) != "default":
        found.append(f"rotary scaling of type {kind!r}")
    return found


def other_model_type(flat: Mapping[str, Any]) -> str | None:
    """Why the layer of a config's model_type is not Llama's; None: it is, or the config is silent."""
    kind = flat.get("model_type")
    if not kind or kind in LLAMA_TYPES:
        return None
    how = (
        "whose attention norms queries and keys"
        if kind == "qwen3"
        else "whose layer is not known to be Llama's"
    )
    return f"model_type is {kind}, {how}"


def two_scalings(flat: Mapping[str, Any]) -> bool:
    """Whether both config schemas stand side by side and differ; transformers 5 takes `rope_scaling` then,
    llama.cpp's converter `rope_parameters`.
    """
    new, old = flat.get("rope_parameters"), flat.get("rope_scaling")
    if not (isinstance(new, dict) and isinstance(old, dict)):
        return False
    shared = new.keys() & old.keys() - {"rope_type", "type"}
    return scaling_kind(new) != scaling_kind(old) or any(new[key] != old[key] for key in shared)


def slides(flat: Mapping[str, Any]) -> bool:
    """Whether the draft layer's attention has a window."""
    if flat.get("layer_types"):
        return "sliding_attention" in flat["layer_types"]
    return bool(flat.get("use_sliding_window") and flat.get("sliding_window"))
