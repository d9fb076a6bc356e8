"""`python -m eagle_train check`: layout, algorithm, faults of a draft head, and what engines make of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_train.export.check_config import config_findings
from eagle_train.export.check_head import head_findings
from eagle_train.export.check_target import read_target_embedding, target_findings, unseen_embedding
from eagle_train.export.findings import ENGINES, Effect, Finding
from eagle_train.export.record import read_run_record
from eagle_train.export.verdicts import engine_verdicts
from eagle_train.model.layouts import (
    EAGLE1,
    StoredHead,
    aux_layer_ids,
    default_aux_layer_ids,
    read_stored_head,
)
from eagle_train.model.target_config import read_target_config


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check found. target: as named, or None; num_layers: the target's; verdicts: by engine."""

    stored: StoredHead
    target: str | None
    num_layers: int | None
    findings: tuple[Finding, ...]
    verdicts: dict[str, Effect]

    @property
    def is_sound(self) -> bool:
        """No fault, whichever engine serves it."""
        return not any(finding.is_fault for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `--json` writes them."""
        return {
            "draft": str(self.stored.directory),
            "target": self.target,
            "layout": self.stored.layout,
            "algorithm": self.stored.algorithm,
            "sound": self.is_sound,
            "faults": [finding.text for finding in self.findings if finding.is_fault],
            "notes": [finding.text for finding in self.findings if not finding.is_fault],
            "engines": {
                engine: {"version": ENGINES[engine], "verdict": effect.verdict, "why": effect.why}
                for engine, effect in self.verdicts.items()
            },
        }


def check_draft_head(directory: str | Path, target: str | None = None) -> CheckReport:
    """Look at a head in any published layout, and at what it must share with its target where one is named.

    Raises InputError where head, target or the record beside the head cannot be read at all.
    """
    stored = read_stored_head(directory)
    findings = head_findings(stored) + config_findings(stored)
    num_layers = None
    if target is None:
        findings += unseen_embedding(stored)
    else:
        target_config = read_target_config(target)
        num_layers = target_config.num_hidden_layers
        has_embedding = "embed_tokens.weight" in stored.tensors
        embedding = read_target_embedding(target) if has_embedding else None
        findings += target_findings(stored, target_config, embedding, read_run_record(stored.directory))
    verdicts = engine_verdicts(stored, findings, num_layers)
    return CheckReport(stored, target, num_layers, tuple(findings), verdicts)


def format_report(report: CheckReport) -> str:
    """The report as text: what it is, what is wrong, and a line an engine."""
    stored = report.stored
    lines = [
        f"{stored.directory}",
        f"  {stored.algorithm} head, {stored.layout} layout, {len(stored.tensors)} tensors, "
        + (f"against {report.target}" if report.target else "without a target (--target compares with one)"),
    ]
    if stored.algorithm != EAGLE1:
        lines.append(f"  aux layers: {_layers(report)}")
    for word, is_fault in (("fault", True), ("note", False)):
        lines += [f"  {word}: {f.text}" for f in report.findings if f.is_fault == is_fault]
    lines.append("  sound: no fault of its own" if report.is_sound else "  not sound")
    names = {engine: f"{engine} ({version})" for engine, version in ENGINES.items()}
    width = max(map(len, names.values()))
    wide = max(len(effect.verdict) for effect in report.verdicts.values())
    lines += [
        f"  {names[engine]:<{width}}  {effect.verdict:<{wide}}  {effect.why}"
        for engine, effect in report.verdicts.items()
    ]
    return "\n".join(lines)


def _layers(report: CheckReport) -> str:
    """The layers whose entering states the head reads, as far as config and target tell."""
    if ids := aux_layer_ids(report.stored.flat):
        return ", ".join(map(str, ids))
    if report.num_layers is None:
        return "the default (2, L//2, L-3)"
    return f"the default, here {', '.join(map(str, default_aux_layer_ids(report.num_layers)))}"
