"""Findings about a head, turned into one verdict an engine."""

from collections.abc import Sequence

from eagle_train.export.check_head import head_sizes
from eagle_train.export.findings import (
    BY_SOURCE,
    ENGINES,
    LLAMACPP,
    LOADS,
    NEVER_RUN,
    OPENVINO,
    REFUSED,
    SEVERITY,
    SGLANG,
    TENSORRT,
    UNKNOWN,
    VLLM,
    WRONG,
    Effect,
    Finding,
)
from eagle_train.model.layouts import (
    AUX_IDS_KEY,
    EAGLE1,
    StoredHead,
    aux_layer_ids,
    default_aux_layer_ids,
    eagle_config,
)

# vLLM's attention on a CPU knows these; on a GPU it depends on the kernel.
FUSED_REMEDY = "write num_aux_hidden_states"
VLLM_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def engine_verdicts(
    stored: StoredHead, findings: Sequence[Finding], num_layers: int | None
) -> dict[str, Effect]:
    """What each engine makes of the head: the worst that any finding says. num_layers: of the target, where
    it is known.
    """
    verdicts = {}
    for engine in ENGINES:
        effects = [finding.effects[engine] for finding in findings if engine in finding.effects]
        effects.append(_layer_effect(stored, engine, num_layers))
        worst = max((effect.verdict for effect in effects), key=SEVERITY.index)
        reasons = [effect.why for effect in effects if effect.verdict == worst]
        verdicts[engine] = Effect(worst, "; ".join(dict.fromkeys(reasons)))
    return verdicts


def _layer_effect(stored: StoredHead, engine: str, num_layers: int | None) -> Effect:
    """Whether the engine reads the layers that the config means, and how it is started where it does."""
    if stored.algorithm == EAGLE1:
        return _eagle1_effect(stored, engine)
    meant = aux_layer_ids(stored.flat)
    default = list(default_aux_layer_ids(num_layers)) if num_layers is not None else None
    if engine == OPENVINO:
        is_whole = stored.flat.get("draft_vocab_size") in (None, stored.flat.get("vocab_size"))
        lacks_maps = is_whole and "d2t" not in stored.tensors  # of a part, the finding says what is missing
        return _openvino_effect(meant or default, lacks_maps=lacks_maps)
    needed, fused = len(meant or (0, 1, 2)), _fused_states(stored)
    if engine in (VLLM, SGLANG) and needed != fused:
        source = f", {BY_SOURCE}" if engine == SGLANG else ""
        return Effect(
            REFUSED, f"makes fc for {fused} states, the head's is for {needed}{source}; {FUSED_REMEDY}"
        )
    if meant is not None and engine != TENSORRT:
        read = _layers_read(stored, engine) or default
        if read is None:
            return Effect(UNKNOWN, f"reads the default layers, the head {meant}: name --target to compare")
        if read != meant:
            return Effect(WRONG, f"reads layers {read}, the config means {meant}: export --to {engine}")
        if engine == LLAMACPP and len(read) != 3:
            return Effect(REFUSED, f"takes exactly three aux layers, not {len(read)}")
    how = {
        VLLM: f'as it is, method "eagle3"{_head_size_note(stored)}',
        SGLANG: "as it is, --speculative-algorithm EAGLE3",
        TENSORRT: "Eagle3DecodingConfig",
        LLAMACPP: "once converted to GGUF, if the converter knows the target's tokenizer (export --to "
        "llamacpp lists the steps)",
    }[engine]
    if engine == TENSORRT and meant is not None and meant != default:
        how += f" with eagle3_layers_to_capture {[x - 1 for x in meant]}"
    is_read = engine in NEVER_RUN or needed != 3
    return Effect(LOADS, f"{how}, {BY_SOURCE}" if is_read else how)


def _fused_states(stored: StoredHead) -> int:
    """For how many states vLLM and SGLang make fc: they do not count the top-level list of layers."""
    inner = eagle_config(stored.flat).get(AUX_IDS_KEY)
    return stored.flat.get("num_aux_hidden_states") or len(inner or (0, 1, 2))


def _layers_read(stored: StoredHead, engine: str) -> list[int] | None:
    """Entering states that the engine takes from the config's lists; None: it reads none of them."""
    top = stored.flat.get(AUX_IDS_KEY)
    inner = eagle_config(stored.flat).get(AUX_IDS_KEY)
    if engine == SGLANG:
        return [x + 1 for x in inner] if inner else None
    if engine == VLLM:  # its second runner ignores the inner list
        return top or inner
    return top


def _openvino_effect(layers: list[int] | None, *, lacks_maps: bool) -> Effect:
    if layers and len(layers) != 3:
        return Effect(REFUSED, f"takes exactly three aux layers, not {len(layers)}, {BY_SOURCE}")
    if layers and min(layers) < 1:
        return Effect(REFUSED, f"cannot read layer {min(layers)}: it counts the outputs of blocks")
    shown = f" {' '.join(str(x - 1) for x in layers)}" if layers else ""
    # Run on a head of the whole vocabulary: 49 of 1,197 drafted tokens accepted, with maps 200 of 778.
    if lacks_maps:
        return Effect(
            WRONG, "without d2t and t2d it accepts next to nothing: export --to openvino writes them"
        )
    return Effect(
        LOADS,
        f"once converted, with hidden_layers_list{shown} set (export --to openvino lists the steps); without "
        "it one block late",
    )


def _eagle1_effect(stored: StoredHead, engine: str) -> Effect:
    if engine == VLLM and "fc.bias" in stored.tensors:
        return Effect(REFUSED, f"its fc has no bias, {BY_SOURCE}")
    if engine == VLLM:
        return Effect(LOADS, f'as it is, method "eagle", {BY_SOURCE}')
    if engine == SGLANG:
        return Effect(LOADS, f"as it is, --speculative-algorithm EAGLE, {BY_SOURCE}")
    if engine == TENSORRT:
        return Effect(UNKNOWN, "EAGLE-1 was not looked at")
    return Effect(REFUSED, "reads EAGLE-3 heads only")


def _head_size_note(stored: StoredHead) -> str:
    sizes = head_sizes(stored.flat)
    if isinstance(sizes, Finding):
        return ""
    size = sizes["head_dim"]
    return "" if size in VLLM_CPU_HEAD_SIZES else f" (on a GPU; its CPU attention has no head size {size})"
