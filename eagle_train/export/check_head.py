"""What is wrong with a draft head by itself: tensors, maps, config. What engines make of it follows their
sources or runs of them; where only the source was read, the text says so.

Shapes: H hidden, I MLP width, V vocabulary, D draft vocabulary, q and kv = heads x head size.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from eagle_train.export.findings import (
    BY_SOURCE,
    LLAMACPP,
    OPENVINO,
    REFUSED,
    SGLANG,
    TENSORRT,
    UNKNOWN,
    VLLM,
    WRONG,
    Effect,
    Finding,
    everywhere,
    of_engines,
)
from eagle_train.model.layouts import EAGLE1, SPECULATORS, StoredHead, aux_layer_ids, slides

Shapes = dict[str, tuple[int, ...]]
OPTIONAL = ("embed_tokens.weight", "t2d")


def head_findings(stored: StoredHead) -> list[Finding]:
    """Everything about the head that can be told without its target."""
    sizes = head_sizes(stored.flat)
    if isinstance(sizes, Finding):
        return [sizes]
    expected = expected_shapes(stored, sizes)
    found = _prefix(stored) + _names(stored, expected, sizes) + _values(stored, expected)
    if stored.algorithm != EAGLE1:
        found += _maps(stored, sizes) + _layer_order(stored)
    return found


def expected_shapes(stored: StoredHead, sizes: Mapping[str, int]) -> Shapes:
    """Name and shape of every tensor that the config asks for."""
    flat, H, V, D = stored.flat, sizes["hidden_size"], sizes["vocab_size"], sizes["draft_vocab_size"]
    inner, kv = (sizes[key] * sizes["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    width = sizes["intermediate_size"]
    if stored.algorithm == EAGLE1:
        shapes: Shapes = {"fc.weight": (H, 2 * H)} | _layer("layers.0.", H, H, inner, kv, width)
        shapes |= {"fc.bias": (H,)} if flat.get("bias", "fc.bias" in stored.tensors) else {}
        return shapes | {"layers.0.post_attention_layernorm.weight": (H,)}
    read, states = flat.get("target_hidden_size") or H, len(aux_layer_ids(flat) or (0, 1, 2))
    shapes = {"fc.weight": (H, states * read), "norm.weight": (H,), "lm_head.weight": (D, H)}
    if V != D:
        shapes |= {"d2t": (D,), "t2d": (V,)}
    for index in range(flat.get("num_hidden_layers", 1)):
        prefix = "midlayer." if index == 0 else f"layers.{index}."
        shapes |= _layer(prefix, H, 2 * H if index == 0 else H, inner, kv, width)
        norms = ["input_layernorm", "post_attention_layernorm"] + ["hidden_norm"] * (index == 0)
        shapes |= {f"{prefix}{norm}.weight": (H,) for norm in norms}
        if flat.get("attention_bias"):
            rows = {"q": inner, "k": kv, "v": kv}
            if f"{prefix}self_attn.o_proj.bias" in stored.tensors:  # families differ
                rows["o"] = H
            shapes |= {f"{prefix}self_attn.{part}_proj.bias": (rows[part],) for part in rows}
        if flat.get("mlp_bias"):
            rows = {"gate": width, "up": width, "down": H}
            shapes |= {f"{prefix}mlp.{part}_proj.bias": (rows[part],) for part in rows}
        if flat.get("model_type") == "qwen3":
            shapes |= {f"{prefix}self_attn.{part}_norm.weight": (sizes["head_dim"],) for part in "qk"}
    if stored.option("norm_before_fc"):
        shapes["input_norm.weight"] = (states * read,)
    if stored.option("fc_norm"):
        shapes |= {f"fc_norm.{part}.weight": (read,) for part in range(states)}
    return shapes


def _layer(prefix: str, H: int, read: int, inner: int, kv: int, width: int) -> Shapes:
    return {
        f"{prefix}self_attn.q_proj.weight": (inner, read),
        f"{prefix}self_attn.k_proj.weight": (kv, read),
        f"{prefix}self_attn.v_proj.weight": (kv, read),
        f"{prefix}self_attn.o_proj.weight": (H, inner),
        f"{prefix}mlp.gate_proj.weight": (width, H),
        f"{prefix}mlp.up_proj.weight": (width, H),
        f"{prefix}mlp.down_proj.weight": (H, width),
    }


def head_sizes(flat: Mapping[str, Any]) -> dict[str, int] | Finding:
    """The config's sizes, with what engines derive where one is absent."""
    required = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    sizes = {key: flat.get(key) for key in required}
    heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    sizes["num_key_value_heads"] = flat.get("num_key_value_heads") or heads
    sizes["draft_vocab_size"] = flat.get("draft_vocab_size") or sizes["vocab_size"]
    if isinstance(heads, int) and isinstance(hidden, int) and heads:
        sizes["head_dim"] = flat.get("head_dim") or hidden // heads
    bad = [f"{k} {v!r}" for k, v in sizes.items() if type(v) is not int or v < 1]
    if bad:
        why = f"config.json has {', '.join(bad)}"
        return Finding(f"{why}; sizes must be whole numbers above 0", True, everywhere(REFUSED, why))
    return {key: int(value) for key, value in sizes.items() if value is not None}


def _prefix(stored: StoredHead) -> list[Finding]:
    if not stored.prefixed:
        return []
    name = min(stored.prefixed.values())
    why = f"{len(stored.prefixed)} names carry a prefix ({name})"
    effects = everywhere(
        UNKNOWN,
        f"{why}; not tried",
        vllm=Effect(REFUSED, f"{why}: no module or parameter of that name"),
        sglang=Effect(WRONG, f"{why}: unknown names are ignored and the head stays random, {BY_SOURCE}"),
    )
    names = ", ".join(sorted(stored.prefixed.values()))
    text = f"{len(stored.prefixed)} names carry a prefix, which has to go: {names}"
    return [Finding(text, True, effects)]


def _names(stored: StoredHead, expected: Shapes, sizes: Mapping[str, int]) -> list[Finding]:
    """Missing, surplus and misshapen tensors, each by name."""
    found = []
    has, D, V = stored.tensors, sizes["draft_vocab_size"], sizes["vocab_size"]
    for name in sorted(set(expected) - set(has) - set(OPTIONAL)):
        if name == "lm_head.weight" and D == V:
            why = "no lm_head.weight: the target's is shared"
            effects = of_engines(UNKNOWN, f"{why} by others, not tried here", SGLANG, OPENVINO)
            found.append(Finding(f"{why} (the draft vocabulary is the whole one)", False, effects))
        elif name == "d2t":
            found.append(_missing_d2t(D, V))
        else:
            found.append(_missing(name))
    surplus = set(has) - set(expected) - {"embed_tokens.weight", "d2t", "t2d"}
    for name in sorted(surplus):
        why = f"{name} is not part of the layout"
        if name.endswith(".bias"):
            why += " and the config names no bias"
        effects = everywhere(
            WRONG,
            f"{why}: ignored, {BY_SOURCE}",
            vllm=Effect(REFUSED, f"{why}: no module or parameter of that name, {BY_SOURCE}"),
            llamacpp=Effect(REFUSED, f"{why}: the converter maps known names only, {BY_SOURCE}"),
            tensorrt_llm=Effect(UNKNOWN, why),
        )
        found.append(Finding(f"{why}; remove it, or use a loader that knows it", True, effects))
    shapes = expected | {"embed_tokens.weight": (V, sizes["hidden_size"])}
    if stored.algorithm != EAGLE1:
        shapes |= {"d2t": (D,), "t2d": (V,)}
    for name in sorted(set(shapes) & set(has)):
        if tuple(has[name].shape) != shapes[name]:
            why = f"{name} has shape {list(has[name].shape)}, the config says {list(shapes[name])}"
            found.append(Finding(why, True, everywhere(REFUSED, f"{why}, {BY_SOURCE}")))
    if "t2d" in expected and "t2d" not in has and "d2t" in has:
        found.append(Finding("t2d is missing; d2t says the same, and engines read no other", False))
    return found


def _missing(name: str) -> Finding:
    why = f"{name} is missing"
    effects = everywhere(
        WRONG,
        f"{why} and stays random, {BY_SOURCE}",
        tensorrt_llm=Effect(UNKNOWN, why),
        llamacpp=Effect(REFUSED, f"{why}, {BY_SOURCE}"),
    )
    return Finding(f"{why}; fetch or export the whole head again", True, effects)


def _missing_d2t(D: int, V: int) -> Finding:
    why = f"d2t is missing with {D:,} of {V:,} tokens"
    effects = everywhere(
        UNKNOWN,
        why,
        vllm=Effect(WRONG, f"{why}: loads without a word and accepts nothing"),
        sglang=Effect(WRONG, f"{why}: draft ids are taken for the target's, {BY_SOURCE}"),
        openvino=Effect(WRONG, f"{why}: its map stays all zero, {BY_SOURCE}"),
    )
    return Finding(f"{why}; draft ids cannot be told from target ids", True, effects)


def _values(stored: StoredHead, expected: Shapes) -> list[Finding]:
    """Tensors that hold no number or were never trained."""
    found = []
    floats = {name: t for name, t in stored.tensors.items() if t.is_floating_point()}
    for name, tensor in tqdm(sorted(floats.items()), desc="values", unit="tensor", leave=False, delay=3):
        if tensor.element_size() == 1:  # PyTorch has no isfinite for 8-bit floats
            tensor = tensor.float()
        if not bool(tensor.isfinite().all()):
            why = f"{name} holds a NaN or an infinity"
            found.append(Finding(f"{why}; take an earlier checkpoint", True, everywhere(WRONG, why)))
        elif tensor.ndim == 2 and not bool(tensor.any()):
            why = f"{name} is all zero: never trained"
            remedy = "; leave it out, and engines share the target's" if name == "embed_tokens.weight" else ""
            found.append(Finding(why + remedy, True, everywhere(WRONG, why)))
    return found


def _maps(stored: StoredHead, sizes: Mapping[str, int]) -> list[Finding]:
    """d2t must hold offsets of distinct ids inside the vocabulary, and t2d must say the same."""
    D, V = sizes["draft_vocab_size"], sizes["vocab_size"]
    d2t, t2d = stored.tensors.get("d2t"), stored.tensors.get("t2d")
    if D > V:
        why = f"draft_vocab_size {D:,} is above vocab_size {V:,}"
        return [Finding(why, True, everywhere(REFUSED, f"{why}, {BY_SOURCE}"))]
    if d2t is None or d2t.shape != (D,) or (t2d is not None and t2d.shape != (V,)):
        return []  # reported by name or shape
    if d2t.is_floating_point():
        why = f"d2t is {str(d2t.dtype).removeprefix('torch.')}; it must hold whole numbers"
        return [Finding(why, True, everywhere(UNKNOWN, why))]
    offsets = d2t.long() + torch.arange(D)
    if _is_map(offsets, t2d, V) and not _looks_absolute(d2t, t2d):
        return []
    if _is_map(d2t.long(), t2d, V):
        why = "d2t holds absolute ids where engines add the row's number to it"
        return [Finding(f"{why}; write offsets, target id - i", True, everywhere(WRONG, why))]
    if bool(((offsets < 0) | (offsets >= V)).any()):
        row = int(((offsets < 0) | (offsets >= V)).nonzero()[0])
        why = f"d2t leads out of the vocabulary: row {row} to id {int(offsets[row])} of {V:,}"
        checked = Effect(REFUSED, f"{why}: its converter checks the range")
        return [Finding(why, True, everywhere(WRONG, why, llamacpp=checked))]
    if len(offsets.unique()) < D:
        why = f"d2t names {D - len(offsets.unique()):,} target ids more than once"
        checked = Effect(REFUSED, f"{why}: its converter checks that")
        return [Finding(why, True, everywhere(WRONG, why, llamacpp=checked))]
    why = "d2t and t2d disagree on which tokens the draft vocabulary holds"
    return [Finding(why, True, everywhere(WRONG, f"{why}; d2t is used"))]


def _layer_order(stored: StoredHead) -> list[Finding]:
    ids = aux_layer_ids(stored.flat)
    if ids is None or ids == sorted(set(ids)):
        return []
    why = f"aux layers {ids} do not rise"
    effects = of_engines(WRONG, f"{why}: sorted and made distinct", VLLM)
    effects |= of_engines(WRONG, f"{why}, {BY_SOURCE}", OPENVINO)
    return [Finding(why, True, effects)]


def _is_map(ids_D: Tensor, t2d: Tensor | None, V: int) -> bool:
    """Distinct ids within the vocabulary, the very ones that t2d marks."""
    if bool(((ids_D < 0) | (ids_D >= V)).any()) or len(ids_D.unique()) < len(ids_D):
        return False
    return t2d is None or torch.equal(t2d.bool().nonzero().squeeze(1), ids_D.sort().values)


def _looks_absolute(d2t: Tensor, t2d: Tensor | None) -> bool:
    """Without t2d: offsets that always rise would mean a vocabulary without two neighbouring ids."""
    return t2d is None and len(d2t) > 8 and bool((d2t.diff() > 0).all())


def config_findings(stored: StoredHead) -> list[Finding]:
    """Options of the config that some engines honour and others do not."""
    if stored.algorithm == EAGLE1:
        return []
    return _flag_findings(stored) + _layout_findings(stored)


def _flag_findings(stored: StoredHead) -> list[Finding]:
    flat, found = stored.flat, []
    nbr = stored.option("norm_before_residual")
    if nbr:
        why = "norm_before_residual is not supported"
        effects = of_engines(WRONG, f"{why}, {BY_SOURCE}", SGLANG, TENSORRT, OPENVINO)
        found.append(Finding("norm_before_residual is true", False, effects))
    elif nbr is None and stored.layout == SPECULATORS:
        effects = {
            VLLM: Effect(UNKNOWN, "takes norm_before_residual for true: right only if trained so"),
            LLAMACPP: Effect(UNKNOWN, "takes norm_before_residual for false: right only if trained so"),
        }
        text = "norm_before_residual is not written, and engines disagree on its default; write it"
        found.append(Finding(text, True, effects))
    if stored.option("norm_before_fc"):
        effects = of_engines(WRONG, f"norm_before_fc is not supported, {BY_SOURCE}", OPENVINO)
        if not isinstance(flat.get("eagle_config"), dict):
            effects |= of_engines(WRONG, f"reads norm_before_fc in eagle_config only, {BY_SOURCE}", TENSORRT)
        found.append(Finding("norm_before_fc is true", False, effects))
    for name in ("fc_norm", "norm_output"):
        if stored.option(name):
            effects = of_engines(REFUSED, f"{name} is not supported, {BY_SOURCE}", OPENVINO, LLAMACPP)
            found.append(Finding(f"{name} is true", False, effects))
    if (layers := flat.get("num_hidden_layers", 1)) != 1:
        effects = of_engines(REFUSED, f"takes one draft layer, not {layers}, {BY_SOURCE}", OPENVINO, LLAMACPP)
        found.append(Finding(f"{layers} draft layers", False, effects))
    if flat.get("attention_bias"):
        effects = of_engines(WRONG, f"its q, k and v have no bias, {BY_SOURCE}", SGLANG)
        effects |= of_engines(UNKNOWN, "attention_bias is true; not tried", TENSORRT, OPENVINO, LLAMACPP)
        found.append(Finding("attention_bias is true", False, effects))
    untried = ["mlp_bias is true"] if flat.get("mlp_bias") else []
    if slides(flat):
        untried.append(f"attention slides over {flat.get('sliding_window')} tokens")
    if (act := flat.get("hidden_act", "silu")) != "silu":
        refusal = Effect(REFUSED, f"hidden_act is {act}: its Llama layer takes silu only, {BY_SOURCE}")
        text = f"hidden_act is {act}, not silu"
        found.append(Finding(text, False, everywhere(UNKNOWN, f"{text}; not tried", vllm=refusal)))
    found += [Finding(why, False, everywhere(UNKNOWN, f"{why}; not tried")) for why in untried]
    return found


def _layout_findings(stored: StoredHead) -> list[Finding]:
    flat, found = stored.flat, []
    if stored.layout == SPECULATORS:
        why = "does not read the speculators layout; export --to its own"
        found.append(
            Finding(
                why.replace("does", "sglang, tensorrt-llm and openvino do"),
                False,
                of_engines(REFUSED, why, SGLANG, TENSORRT, OPENVINO),
            )
        )
        if "model_type" in stored.config:
            why = f"top-level model_type {stored.config['model_type']!r} in the speculators layout"
            effects = of_engines(REFUSED, f"{why}: no architecture of that name", VLLM)
            found.append(Finding(f"{why}; take it out", True, effects))
        return found
    if "target_hidden_size" in flat and flat["target_hidden_size"] is None:
        why = "target_hidden_size is null"
        effects = of_engines(REFUSED, f"{why}: crashes", VLLM)
        effects |= of_engines(REFUSED, f"{why}: crashes, {BY_SOURCE}", SGLANG, TENSORRT)
        effects |= of_engines(UNKNOWN, f"{why}; not tried", OPENVINO)
        found.append(Finding(f"{why}; leave the key out", True, effects))
    if flat.get("tie_word_embeddings"):
        why = "tie_word_embeddings is true"
        found.append(Finding(why, False, of_engines(REFUSED, f"{why}, {BY_SOURCE}", SGLANG)))
    if not flat.get("draft_vocab_size"):
        why = "config.json has no draft_vocab_size"
        effects = of_engines(REFUSED, f"{why}, by which a head is known, {BY_SOURCE}", TENSORRT, LLAMACPP)
        found.append(Finding(why, False, effects))
    if not (flat.get("torch_dtype") or flat.get("dtype")):
        why = "config.json has no torch_dtype"
        found.append(Finding(why, False, of_engines(REFUSED, f"{why}, {BY_SOURCE}", TENSORRT)))
    known = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"}
    names = flat.get("architectures") or []
    if not known & set(names):
        why = f"architectures is {names}, not one of {', '.join(sorted(known))}"
        effects = of_engines(REFUSED, f"{why}, {BY_SOURCE}", SGLANG, OPENVINO)
        effects |= of_engines(UNKNOWN, why, TENSORRT)
        if names != ["LlamaForCausalLM"]:
            effects |= of_engines(UNKNOWN, why, VLLM)
        found.append(Finding(why, False, effects))
    return found
