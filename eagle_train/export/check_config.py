"""Options of a draft head's config that engines read in different ways, or not at all."""

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
from eagle_train.model.layouts import DEFAULT_RMS_NORM_EPS, EAGLE1, SPECULATORS, StoredHead, slides


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
    if flat.get("model_type") == "qwen3":
        untried.append("model_type is qwen3, whose attention norms queries and keys")
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
        why = "does not read the speculators layout"
        effects = {engine: Effect(REFUSED, f"{why}: export --to {engine}") for engine in (SGLANG, OPENVINO)}
        effects[TENSORRT] = Effect(REFUSED, f"{why}: export --to vllm writes what it reads, {BY_SOURCE}")
        text = "sglang, tensorrt-llm and openvino read the official layout only: export writes it"
        found.append(Finding(text, False, effects))
        if "model_type" in stored.config:
            why = f"top-level model_type {stored.config['model_type']!r} in the speculators layout"
            effects = of_engines(REFUSED, f"{why}: no architecture of that name", VLLM)
            found.append(Finding(f"{why}; take it out", False, effects))
        return found
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
    if not flat.get("model_type"):
        why = "config.json has no model_type"
        effects = of_engines(REFUSED, f"{why}, by which its config class is found", VLLM, OPENVINO)
        effects |= of_engines(UNKNOWN, f"{why}; not tried", SGLANG, TENSORRT)
        found.append(Finding(f"{why}; write llama, as export does", False, effects))
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
