"""`python -m eagle_train export`: a draft head as the directory that one engine needs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle_train.config_export import EXPORT_FORMATS
from eagle_train.errors import InputError
from eagle_train.export.card import CARD, SPECULATORS_FORMAT, model_card
from eagle_train.export.check_head import head_findings
from eagle_train.export.check_target import read_target_embedding, target_findings
from eagle_train.export.engines import (
    TARGET_WORD,
    Served,
    full_path,
    num_drafted,
    script,
    serve_command,
    steps,
)
from eagle_train.export.findings import LLAMACPP, OPENVINO, SGLANG, VLLM, WRONG, Finding
from eagle_train.export.record import RunRecord, read_run_record
from eagle_train.files import write_atomically, write_json, writing
from eagle_train.model.checkpoint import SPECIAL_TOKENS, draft_config_of, official_config, t2d_of
from eagle_train.model.eagle3 import Eagle3Config
from eagle_train.model.layouts import (
    AUX_IDS_KEY,
    EMBEDDING,
    OFFICIAL,
    SPECULATORS,
    StoredHead,
    default_aux_layer_ids,
    read_stored_head,
)
from eagle_train.model.options import unsupported
from eagle_train.model.target_config import read_target_config

NEED_TARGET = (SPECULATORS_FORMAT, OPENVINO, LLAMACPP)
STEPS = "steps.sh"
SPECULATORS_VERSION = "0.9.0"  # whose format is written


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written where. steps: shell lines that remain, as in steps.sh; serve: the line that serves."""

    directory: Path
    engine: str
    steps: tuple[str, ...]
    serve: str


def export_draft_head(draft: str | Path, engine: str, out: str | Path, target: str | None = None) -> Exported:
    """Write `out` as the directory that the engine loads, weights bit for bit, with a model card.

    engine: one of `EXPORT_FORMATS`; target: id or directory; None: the one that the head's run recorded.
    Raises InputError where the head is unsound, does not fit the target, or has what the engine cannot
    honour.
    """
    draft, out = Path(draft), Path(out)
    if engine not in EXPORT_FORMATS:
        raise InputError(f"--to {engine} is not known; it must be one of {', '.join(EXPORT_FORMATS)}")
    _check_out(draft, out)
    record = read_run_record(draft)
    if record.is_mock:
        raise InputError(f"--draft {draft} was trained on random tokens; train on conversations to export")
    target = record.target if target is None else target
    if target is None and engine in NEED_TARGET:
        raise InputError(f"--to {engine} needs the target's config and weights; name it with --target")
    stored = read_stored_head(draft)
    target_config = None if target is None else read_target_config(target)
    config = _fitted_config(stored, target, target_config, record, engine)
    tensors = _tensors(stored, config, always_maps=engine == OPENVINO)
    served = replace(
        _served(out, engine, config, tensors["fc.weight"].dtype, target, target_config),
        num_drafted=num_drafted(record.options.get("ttt_steps")),
    )
    special = {
        name: getattr(target_config, name, None) if target_config else stored.flat.get(name)
        for name in SPECIAL_TOKENS
    }
    values = official_config(config, served.dtype, special)
    if served.layout == SPECULATORS:
        values = _speculators_config(values, served, target_config)
        if EMBEDDING not in tensors:
            tensors[EMBEDDING] = _embedding(served.target, config, tensors["fc.weight"].dtype)
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    elif not served.is_default:
        values |= _layer_key(engine, served)
    card = model_card(served, config.draft_vocab_size, config.vocab_size, record, engine)
    remaining = steps(engine, served)
    _write(out, tensors, values, card, remaining)
    serve = serve_command(VLLM if served.layout == SPECULATORS else engine, served)
    return Exported(out, engine, tuple(remaining), serve or "")


def _served(
    out: Path,
    engine: str,
    config: Eagle3Config,
    dtype: torch.dtype,
    target: str | None,
    target_config: Any,
) -> Served:
    layers, is_default = config.aux_layer_ids, config.aux_layer_ids is None
    if target_config is not None:
        default = default_aux_layer_ids(target_config.num_hidden_layers)
        layers = layers or default
        is_default = layers == default
    return Served(
        draft=str(out.resolve()),
        target=full_path(target or TARGET_WORD),
        layout=SPECULATORS if engine == SPECULATORS_FORMAT else OFFICIAL,
        dtype=str(dtype).removeprefix("torch."),
        aux_layer_ids=layers,
        is_default=is_default,
    )


def _check_out(draft: Path, out: Path) -> None:
    with writing(out):
        is_taken, is_full = out.exists() and not out.is_dir(), out.is_dir() and any(out.iterdir())
    if is_taken:
        raise InputError(f"--out {out} is a file; name a directory")
    if is_full:
        own = " (it is --draft itself)" if out.resolve() == draft.resolve() else ""
        raise InputError(f"--out {out} is not empty{own}; name another directory")


def _fitted_config(
    stored: StoredHead, target: str | None, target_config: Any, record: RunRecord, engine: str
) -> Eagle3Config:
    """The head's sizes, once it is sound, fits the target and has nothing that the engine cannot honour; the
    position limit becomes the target's.
    """
    where = stored.directory
    if found := unsupported(stored):
        raise InputError(
            f"{where}: cannot be exported: {'; '.join(found)}. `python -m eagle_train check {where}` says "
            "which engines serve it as it is"
        )
    if target_config is not None and (limit := getattr(target_config, "max_position_embeddings", None)):
        stored = replace(stored, flat=stored.flat | {"max_position_embeddings": limit})
    config = draft_config_of(stored)
    findings = head_findings(stored)
    if target is not None and target_config is not None:
        embedding = read_target_embedding(target) if EMBEDDING in stored.tensors else None
        beside_target = target_findings(stored, target_config, embedding, record)
        findings += beside_target
        if lost := [f.effects[engine].why for f in beside_target if _is_lost(f, engine)]:
            raise InputError(f"{where}: cannot be exported --to {engine}, which {'; '.join(lost)}")
    if faults := [finding.text for finding in findings if finding.is_fault]:
        raise InputError(f"{where}: cannot be exported --to {engine}: {'; '.join(faults)}")
    if engine in (SGLANG, OPENVINO) and config.aux_layer_ids and config.aux_layer_ids[0] < 1:
        raise InputError(
            f"--to {engine} cannot honour aux layers {' '.join(map(str, config.aux_layer_ids))}: it counts "
            "the outputs of blocks and so cannot read what enters layer 0; export --to vllm, speculators or "
            "llamacpp, or train with --aux_layer_ids from 1 up"
        )
    return config


def _is_lost(finding: Finding, engine: str) -> bool:
    """Whether an engine does not honour what is no fault of the head's."""
    return not finding.is_fault and engine in finding.effects and finding.effects[engine].verdict == WRONG


def _tensors(stored: StoredHead, config: Eagle3Config, *, always_maps: bool) -> dict[str, Tensor]:
    """The stored tensors, with both maps as the layout has them. For a whole vocabulary it has none, but
    OpenVINO's converter registers both and leaves them unset where they are missing (always_maps).
    """
    tensors = {name: tensor for name, tensor in stored.tensors.items() if name not in ("d2t", "t2d")}
    if config.draft_vocab_size < config.vocab_size:
        d2t = stored.tensors["d2t"].long()
        tensors |= {"d2t": d2t, "t2d": t2d_of(d2t, config.vocab_size)}
    elif always_maps:
        tensors["d2t"] = torch.zeros(config.vocab_size, dtype=torch.int64)
        tensors["t2d"] = torch.ones(config.vocab_size, dtype=torch.bool)
    return tensors


def _embedding(target: str, config: Eagle3Config, dtype: torch.dtype) -> Tensor:
    """The target's token embedding, as the speculators layout carries it."""
    embedding = read_target_embedding(target)
    if embedding.shape != (config.vocab_size, config.hidden_size):
        raise InputError(
            f"--target {target}: its embedding is {list(embedding.shape)}, the head needs "
            f"{[config.vocab_size, config.hidden_size]}; export --to vllm, which shares the target's"
        )
    return embedding.to(dtype)


def _layer_key(engine: str, head: Served) -> dict[str, Any]:
    """Where and how the engine reads aux layers that are not its default."""
    assert head.aux_layer_ids is not None
    if engine == SGLANG:
        return {"eagle_config": {AUX_IDS_KEY: [x - 1 for x in head.aux_layer_ids]}}
    # OpenVINO reads them from the converted model (steps.sh); the key says what was trained.
    return {AUX_IDS_KEY: list(head.aux_layer_ids)}


def _speculators_config(official: Mapping[str, Any], head: Served, target_config: Any) -> dict[str, Any]:
    """`config.json` of the speculators layout. norm_before_residual is always written, because engines differ
    in its default; a top-level model_type is never, because vLLM refuses it.
    """
    outer = ("architectures", "draft_vocab_size", "torch_dtype", "tie_word_embeddings")
    layer = {name: value for name, value in official.items() if name not in outer}
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": official["rope_theta"]}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": official["draft_vocab_size"],
        "target_hidden_size": None,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        AUX_IDS_KEY: None if head.is_default or head.aux_layer_ids is None else list(head.aux_layer_ids),
        "tie_word_embeddings": False,
        "dtype": official["torch_dtype"],
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": head.num_drafted,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": head.target,
                "architectures": getattr(target_config, "architectures", None) or [],
            },
        },
    }


def _write(
    out: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any], card: str, remaining: list[str]
) -> None:
    """All files; the config last, so that a directory without one was cut short."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    write_atomically(
        out / "model.safetensors", lambda path: save_file(whole, path, metadata={"format": "pt"})
    )
    write_atomically(out / CARD, lambda path: path.write_text(card, encoding="utf-8"))
    if remaining:
        write_atomically(out / STEPS, lambda path: path.write_text(script(remaining), encoding="utf-8"))
        (out / STEPS).chmod(0o755)
    write_json(out / "config.json", values)
