"""What a check of a draft head can find, and what each finding means for each engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

VLLM, SGLANG, TENSORRT, OPENVINO, LLAMACPP = "vllm", "sglang", "tensorrt-llm", "openvino", "llamacpp"
# Versions that these statements are about.
ENGINES: Mapping[str, str] = {
    VLLM: "vLLM 0.32.0",
    SGLANG: "SGLang 0.5.23",
    TENSORRT: "TensorRT-LLM main",
    OPENVINO: "OpenVINO GenAI 2026.4.1",
    LLAMACPP: "llama.cpp 0.5.0-dev",
}
NEVER_RUN = (SGLANG, TENSORRT)
BY_SOURCE = "by its source, not run"

# What an engine makes of a head, the worst last.
LOADS, UNKNOWN, WRONG, REFUSED = "loads", "not known", "loads but wrong", "refused"
SEVERITY = (LOADS, UNKNOWN, WRONG, REFUSED)


class Effect(NamedTuple):
    """What one engine does about one finding, and why."""

    verdict: str
    why: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about a head. is_fault: the head is unsound, whoever serves it; else a note.

    effects: by engine; engines that are not named are not concerned.
    """

    text: str
    is_fault: bool = True
    effects: Mapping[str, Effect] = field(default_factory=dict)


def everywhere(verdict: str, why: str, **others: Effect) -> dict[str, Effect]:
    """The same effect for all engines but those named in `others` (by Python name: tensorrt_llm)."""
    named = {name.replace("_", "-"): effect for name, effect in others.items()}
    return {engine: named.get(engine, Effect(verdict, why)) for engine in ENGINES}


def of_engines(verdict: str, why: str, *engines: str) -> dict[str, Effect]:
    """The same effect for the named engines."""
    return {engine: Effect(verdict, why) for engine in engines}
