"""What is wrong with a draft head by itself: sizes, tensors, maps. What engines make of it follows their
sources or runs of them; where only the source was read, the text says so.

Shapes: H hidden, I MLP width, V vocabulary, D draft vocabulary, q and kv = heads x head size.
"""

from collections.abc import Mapping
from typing import Any

import torch
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
from eagle_train.model.faults import (
    REQUIRED,
    holds_whole_numbers,
    layer_count_fault,
    layer_order_fault,
    map_fault,
    size_faults,
    value_fault,
)
from eagle_train.model.layouts import EAGLE1, EMBEDDING, INDEX, StoredHead, aux_layer_ids

Shapes = dict[str, tuple[int, ...]]
OPTIONAL = (EMBEDDING, "t2d")


def head_findings(stored: StoredHead) -> list[Finding]:
    """Everything about the head that can be told without its target."""
    sizes = head_sizes(stored.flat)
    if isinstance(sizes, Finding):
        return [sizes]
    expected = expected_shapes(stored, sizes)
    found = _prefix(stored) + _buffers(stored) + _beside(stored)
    found += _names(stored, expected, sizes) + _values(stored)
    if stored.algorithm != EAGLE1:
        found += _maps(stored, sizes) + _layer_count(stored) + _layer_order(stored)
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
        if flat.get("model_type") == "qwen3":  # whose attention norms queries and keys
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
    if wrong := size_faults(flat):
        why = "; ".join(wrong)
        return Finding(why, True, everywhere(REFUSED, f"{why}, {BY_SOURCE}"))
    sizes = {key: int(flat[key]) for key in REQUIRED}
    heads = sizes["num_attention_heads"]
    return sizes | {
        "num_key_value_heads": flat.get("num_key_value_heads", heads),
        "draft_vocab_size": flat.get("draft_vocab_size", sizes["vocab_size"]),
        "head_dim": flat.get("head_dim", sizes["hidden_size"] // heads),
    }


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
            text = f"{why} (the draft vocabulary is the whole one); put that into the file to train, measure"
            found.append(Finding(f"{text} or export it here", False, effects))
        elif name == "d2t":
            found.append(_missing_d2t(D, V))
        else:
            found.append(_missing(name))
    surplus = set(has) - set(expected) - {EMBEDDING, "d2t", "t2d"}
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
    shapes = expected | {EMBEDDING: (V, sizes["hidden_size"])}
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


def _values(stored: StoredHead) -> list[Finding]:
    """Tensors that hold no number or were never trained."""
    found = []
    for name, tensor in tqdm(
        sorted(stored.tensors.items()), desc="values", unit="tensor", leave=False, delay=3
    ):
        if why := value_fault(name, tensor):
            remedy = "; take an earlier checkpoint" * ("NaN" in why)
            if name == EMBEDDING:
                remedy = "; leave it out, and engines share the target's"
            verdict = WRONG if tensor.is_floating_point() else UNKNOWN
            found.append(Finding(why + remedy, True, everywhere(verdict, why)))
    return found


def _maps(stored: StoredHead, sizes: Mapping[str, int]) -> list[Finding]:
    """d2t must hold offsets of distinct ids inside the vocabulary, and t2d must say the same."""
    D, V = sizes["draft_vocab_size"], sizes["vocab_size"]
    d2t, t2d = stored.tensors.get("d2t"), stored.tensors.get("t2d")
    found = []
    if d2t is not None and D == V:
        text = "d2t though the draft vocabulary is the whole one"
        effects = of_engines(REFUSED, f"{text}: no module or parameter named draft_id_to_target_id", VLLM)
        found.append(
            Finding(f"{text}: OpenVINO needs it, vLLM refuses it (export --to vllm)", False, effects)
        )
    if d2t is None and D == V:
        d2t = torch.zeros(D, dtype=torch.int64)
    if d2t is None or d2t.shape != (D,) or (t2d is not None and t2d.shape != (V,)):
        return found  # what is wrong is reported by name or shape
    why = map_fault(d2t, t2d, V)
    if why is None:
        return found
    if not holds_whole_numbers(d2t):
        return [*found, Finding(why, True, everywhere(UNKNOWN, why))]
    ids = d2t.long() + torch.arange(D)
    is_checked = bool(((ids < 0) | (ids >= V)).any()) or len(ids.unique()) < D
    checked = {"llamacpp": Effect(REFUSED, f"{why}: its converter checks that")} if is_checked else {}
    return [*found, Finding(why, True, everywhere(WRONG, why, **checked))]


def _beside(stored: StoredHead) -> list[Finding]:
    """Weight files that were not read here, and by whom they are."""
    if not stored.beside:
        return []
    names = ", ".join(stored.beside)
    has_index = (stored.directory / INDEX).is_file()
    why = f"{INDEX} lists {names}" if has_index else f"{names} lies beside model.safetensors"
    effects = {VLLM: Effect(WRONG, f"{why}: reads it too, and the last file wins")}
    if has_index:
        effects = of_engines(
            WRONG, f"{why}: reads that instead of model.safetensors, {BY_SOURCE}", VLLM, LLAMACPP
        )
    elif any(name.startswith("model") for name in stored.beside):
        effects |= of_engines(WRONG, f"{why}: its converter reads both, {BY_SOURCE}", LLAMACPP)
    effects |= of_engines(UNKNOWN, f"{why}; not tried", SGLANG, TENSORRT)
    return [Finding(f"{why}, which alone is looked at here; take it away", False, effects)]


def _buffers(stored: StoredHead) -> list[Finding]:
    if not stored.buffers:
        return []
    why = f"{', '.join(stored.buffers)}: no weight but a table that is computed anew"
    effects = of_engines(UNKNOWN, f"{why}; not tried", TENSORRT)
    return [Finding(f"{why}; it is skipped", False, effects)]


def _layer_count(stored: StoredHead) -> list[Finding]:
    why = layer_count_fault(stored.flat)
    if why is None:
        return []
    effects = {
        VLLM: Effect(WRONG, f"{why}: makes 32 draft layers and accepts nothing"),
        SGLANG: Effect(WRONG, f"{why}: makes 32 draft layers, {BY_SOURCE}"),
        TENSORRT: Effect(UNKNOWN, f"{why}; not tried"),
        OPENVINO: Effect(REFUSED, f"{why}: its converter takes 32 layers and fails"),
        LLAMACPP: Effect(REFUSED, f"{why}, by which its converter knows a head"),
    }
    return [Finding(f"{why}; write the head's own (1)", True, effects)]


def _layer_order(stored: StoredHead) -> list[Finding]:
    why = layer_order_fault(stored.flat)
    if why is None:
        return []
    effects = of_engines(WRONG, f"{why}: sorted and made distinct", VLLM)
    effects |= of_engines(WRONG, f"{why}, {BY_SOURCE}", OPENVINO)
    return [Finding(why, True, effects)]
