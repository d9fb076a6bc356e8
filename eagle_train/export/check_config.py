"""Options of a draft head's config that engines read in different ways, or not at all."""

from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from eagle_train.export.findings import (
    BY_SOURCE,
    ENGINES,
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
from eagle_train.model.layouts import (
    DEFAULT_RMS_NORM_EPS,
    EAGLE1,
    SPECULATORS,
    StoredHead,
    eagle_config,
    shown,
)
from eagle_train.model.options import (
    LAYER_FLAGS,
    LLAMA_TYPES,
    changed_options,
    other_model_type,
    slides,
    two_scalings,
)

# Engines that have each option of the layer.
SUPPORT = {
    "norm_before_residual": (VLLM, LLAMACPP),
    "norm_before_fc": (VLLM, SGLANG, TENSORRT, LLAMACPP),
    "fc_norm": (VLLM, SGLANG, TENSORRT),
    "norm_output": (VLLM, SGLANG, TENSORRT),
}
# Who stops at the tensors of an option that it lacks or looks for elsewhere; the others read past it.
STOPS = {("fc_norm", VLLM), ("fc_norm", LLAMACPP), ("norm_before_fc", LLAMACPP)}
# Tried with the option in eagle_config, where these do not look.
RUN_NESTED = {
    ("norm_before_residual", VLLM), ("norm_before_residual", LLAMACPP), ("fc_norm", VLLM),
    ("norm_before_fc", LLAMACPP),
}  # fmt: skip


def config_findings(stored: StoredHead) -> list[Finding]:
    """Options of the config that some engines honour and others do not."""
    found = _speculators_findings(stored) if stored.layout == SPECULATORS else _model_type_findings(stored)
    found += _changed_findings(stored) + _class_findings(stored)
    if stored.algorithm == EAGLE1:
        return found + _eagle1_findings(stored)
    found += _flag_findings(stored) + _layer_findings(stored)
    return found if stored.layout == SPECULATORS else found + _official_findings(stored)


def _class_findings(stored: StoredHead) -> list[Finding]:
    """What transformers' own config class, through which vLLM reads a head, makes of the raw values: it takes
    no null for most of them.
    """
    values = stored.config["transformer_layer_config"] if stored.layout == SPECULATORS else stored.config
    kind = values.get("model_type") or "llama"
    if kind not in (*LLAMA_TYPES, "qwen3"):  # told as another kind of layer
        return []
    try:
        AutoConfig.for_model(kind, **{key: value for key, value in values.items() if key != "model_type"})
    except (StrictDataclassError, AttributeError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        why = f"transformers' {kind} config refuses config.json ({reason})"
        return [Finding(why, False, everywhere(UNKNOWN, why, vllm=Effect(REFUSED, why)))]
    return []


def _flag_findings(stored: StoredHead) -> list[Finding]:
    """Options of the layer that are true, for each engine that lacks them or looks for them elsewhere."""
    found = []
    for name in filter(stored.option, LAYER_FLAGS):
        effects = {}
        for engine in ENGINES:
            verdict = REFUSED if (name, engine) in STOPS else WRONG
            if engine not in SUPPORT[name]:
                effects[engine] = Effect(verdict, f"{name} is not supported, {BY_SOURCE}")
            elif (engine, name) == (SGLANG, "norm_before_fc") and not stored.config.get(name):
                effects[engine] = Effect(UNKNOWN, f"{name} in eagle_config; not tried")
            elif not _is_seen(stored, engine, name):
                place = (
                    "in eagle_config"
                    if engine == TENSORRT and name == "norm_before_fc"
                    else "at the top level"
                )
                source = "" if (name, engine) in RUN_NESTED else f", {BY_SOURCE}"
                effects[engine] = Effect(verdict, f"reads {name} {place} only{source}")
        where = "" if stored.config.get(name) else " in eagle_config"
        found.append(Finding(f"{name} is true{where}", False, effects))
    if stored.layout == SPECULATORS and stored.option("norm_before_residual") is None:
        effects = {
            VLLM: Effect(UNKNOWN, "takes norm_before_residual for true: right only if trained so"),
            LLAMACPP: Effect(UNKNOWN, "takes norm_before_residual for false: right only if trained so"),
        }
        text = "norm_before_residual is not written, and engines disagree on its default; write it"
        found.append(Finding(text, True, effects))
    return found


def _is_seen(stored: StoredHead, engine: str, name: str) -> bool:
    """Whether the engine finds an option true where it looks for it: at the top level, but for one."""
    inner = eagle_config(stored.flat)
    if name == "norm_before_fc" and (engine == TENSORRT or (engine == VLLM and name in inner)):
        return bool(inner.get(name))
    is_default = (engine, name, stored.layout) == (VLLM, "norm_before_residual", SPECULATORS)
    return bool(stored.config.get(name, is_default))


def _changed_findings(stored: StoredHead) -> list[Finding]:
    return [
        Finding(f"{key} is {shown(value)}", False, _changed_effects(key, f"{key} is {shown(value)}"))
        for key, value in sorted(changed_options(stored).items())
    ]


def _changed_effects(key: str, text: str) -> dict[str, Effect]:
    """What engines make of an option that the layer here does not have; tried in vLLM alone."""
    effects = everywhere(UNKNOWN, f"{text}; not tried")
    if key in ("partial_rotary_factor", "logit_scale"):
        del effects[VLLM]  # which honours it
    if key == "partial_rotary_factor":
        effects[LLAMACPP] = Effect(WRONG, f"{text}: its converter rotates whole heads, {BY_SOURCE}")
    if key == "use_aux_hidden_state":
        effects[VLLM] = Effect(WRONG, f"{text}: reads one state and leaves fc out")
    if key == "quantization_config":
        effects[VLLM] = Effect(REFUSED, f"{key}: takes no weights that are not quantised so (fp8 was tried)")
    if key == "num_aux_hidden_states":  # the verdict on the layers tells, and the others do not read it
        return {}
    return effects


def _layer_findings(stored: StoredHead) -> list[Finding]:
    flat, found = stored.flat, []
    if two_scalings(flat):
        why = "rope_parameters and rope_scaling say different things, and engines take one or the other"
        found.append(Finding(f"{why}; keep the one that it was trained with", True, everywhere(UNKNOWN, why)))
    if "rms_norm_eps" not in flat:
        why = f"config.json has no rms_norm_eps: engines take {DEFAULT_RMS_NORM_EPS:g}"
        effects = {}
        if stored.layout == SPECULATORS:
            effects = of_engines(REFUSED, "config.json has no rms_norm_eps, which its server wants", LLAMACPP)
        found.append(Finding(f"{why}, right only if the head was trained so", False, effects))
    if (layers := flat.get("num_hidden_layers", 1)) != 1:
        effects = of_engines(REFUSED, f"takes one draft layer, not {layers}, {BY_SOURCE}", OPENVINO, LLAMACPP)
        found.append(Finding(f"{layers} draft layers", False, effects))
    if flat.get("attention_bias"):
        effects = of_engines(WRONG, f"its q, k and v have no bias, {BY_SOURCE}", SGLANG)
        effects |= of_engines(UNKNOWN, "attention_bias is true; not tried", TENSORRT, OPENVINO, LLAMACPP)
        found.append(Finding("attention_bias is true", False, effects))
    untried = ["mlp_bias is true"] if flat.get("mlp_bias") else []
    if other := other_model_type(flat):
        untried.append(other)
    if slides(flat):
        untried.append(f"attention slides over {flat.get('sliding_window')} tokens")
    if (act := flat.get("hidden_act", "silu")) != "silu":
        refusal = Effect(REFUSED, f"hidden_act is {act}: its Llama layer takes silu only, {BY_SOURCE}")
        text = f"hidden_act is {act}, not silu"
        found.append(Finding(text, False, everywhere(UNKNOWN, f"{text}; not tried", vllm=refusal)))
    found += [Finding(why, False, everywhere(UNKNOWN, f"{why}; not tried")) for why in untried]
    return found


def _speculators_findings(stored: StoredHead) -> list[Finding]:
    config = stored.config
    why = "does not read the speculators layout"
    effects = {engine: Effect(REFUSED, f"{why}: export --to {engine}") for engine in (SGLANG, OPENVINO)}
    effects[TENSORRT] = Effect(REFUSED, f"{why}: export --to vllm writes what it reads, {BY_SOURCE}")
    text = "sglang, tensorrt-llm and openvino read the official layout only: export writes it"
    found = [Finding(text, False, effects)]
    if "model_type" in config:
        why = f"top-level model_type {config['model_type']!r} in the speculators layout"
        effects = of_engines(REFUSED, f"{why}: no architecture of that name", VLLM)
        found.append(Finding(f"{why}; take it out", False, effects))
    named, kind = config.get("speculators_model_type"), stored.flat.get("model_type", "llama")
    for is_wrong, why in (
        (named != "eagle3", f"speculators_model_type is {named!r}, and of EAGLE it knows eagle3 alone"),
        (config.get("speculators_config") is None, "config.json has no speculators_config"),
        (kind not in ("llama", "qwen3"), f"the layer's model_type is {kind!r}, not llama or qwen3"),
    ):
        if is_wrong:
            found.append(Finding(why, False, of_engines(REFUSED, f"{why}, {BY_SOURCE}", VLLM)))
    return found


def _model_type_findings(stored: StoredHead) -> list[Finding]:
    if stored.flat.get("model_type"):
        return []
    why = "config.json has no model_type"
    effects = of_engines(REFUSED, f"{why}, by which its config class is found", VLLM, OPENVINO)
    effects |= of_engines(UNKNOWN, f"{why}; not tried", SGLANG, TENSORRT)
    return [Finding(f"{why}; write llama, as export does", False, effects)]


def _eagle1_findings(stored: StoredHead) -> list[Finding]:
    """The class that engines look for by the config's name. vLLM puts "Eagle" before it."""
    names: list[Any] = stored.flat.get("architectures") or []
    first, effects = names[0] if names else None, {}
    why = f"architectures is {names}"
    if first == "LlamaForCausalLM":
        text = (
            f"{why}: takes it for a plain Llama, whose loader misses these names (sglang pull request 33966)"
        )
        effects[SGLANG] = Effect(WRONG, f"{text}, {BY_SOURCE}; write LlamaForCausalLMEagle")
    elif first == "LlamaForCausalLMEagle":
        effects[VLLM] = Effect(
            REFUSED, f"{why}: has no class Eagle{first}, {BY_SOURCE}; write LlamaForCausalLM"
        )
    else:
        effects = of_engines(UNKNOWN, f"{why}; not tried", SGLANG)
        if first != "EagleLlamaForCausalLM":
            effects |= of_engines(UNKNOWN, f"{why}; not tried", VLLM)
    return [Finding(f"{why}: engines do not agree on the name of an EAGLE-1 head's class", False, effects)]


def _official_findings(stored: StoredHead) -> list[Finding]:
    flat, found = stored.flat, []
    if "target_hidden_size" in flat and flat["target_hidden_size"] is None:
        why = "target_hidden_size is null"
        effects = of_engines(REFUSED, f"{why}: crashes", VLLM)
        effects |= of_engines(REFUSED, f"{why}: crashes, {BY_SOURCE}", SGLANG, TENSORRT)
        effects |= of_engines(UNKNOWN, f"{why}; not tried", OPENVINO)
        found.append(Finding(f"{why}; leave the key out, as export does", False, effects))
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
