"""`python -m eagle_train plan`: what a training run's batches would look like, without target or training."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from eagle_train.config import PACKINGS, PlanConfig, TrainConfig
from eagle_train.config_checks import ISOLATED
from eagle_train.data.mock import read_lengths
from eagle_train.data.packing import Ints, Plan
from eagle_train.data.plan_figures import PlanFigures, plan_figures
from eagle_train.errors import InputError
from eagle_train.files import write_atomically
from eagle_train.train.prepare import find_target, load_tokenizer
from eagle_train.train.report import format_facts, format_shapes, format_table
from eagle_train.train.schedule import Schedule
from eagle_train.train.splits import LengthReport, fit_lengths, prepare_data

ANY_VOCABULARY = 2**31 - 1  # of pre-tokenised rows without a target, whose ids nothing bounds


def plan(options: PlanConfig, config: TrainConfig, *, compare: bool) -> None:
    """Print the first epoch's figures: of every packing mode if `compare`, else of --packing.

    Raises InputError as training does for options and data, and for a target that --data needs.
    """
    if options.out is not None:
        check_out(Path(options.out), [options.lengths, *config.data])
    lengths, sample_ids, report, source = read_plan_lengths(options, config)
    if not len(lengths):
        raise InputError(f"{source}: no sample is left to plan; raise --training_seq_len or check the data")
    modes = packing_modes(config) if compare else {mode_name(config): config}
    schedules = {name: Schedule(lengths, mode, options.world_size) for name, mode in modes.items()}
    figures: dict[str, PlanFigures] = {}
    with tqdm(total=len(schedules), desc="plan", unit="mode", disable=not compare, leave=False) as bar:
        for name, schedule in schedules.items():
            # Not schedule.plan(): a mode that drops everything is worth a line here, not an error.
            epoch = schedule.epoch_plan(0)
            figures[name] = plan_figures(epoch, lengths, padding_free=schedule.config.padding_free)
            bar.update()
    facts = length_facts(lengths, report)
    shown = schedules[mode_name(config)]
    if options.json:
        print(json.dumps({"source": source, **facts, **plan_settings(shown), "plans": as_json(figures)}))
    else:
        print(format_plan(source, facts, shown, figures))
    if options.out is not None:
        write_plan(Path(options.out), shown.epoch_plan(0), lengths, sample_ids)


def read_plan_lengths(options: PlanConfig, config: TrainConfig) -> tuple[Ints, Ints, LengthReport, str]:
    """Lengths within --training_seq_len, the samples that they belong to, what was cut or left out for it,
    and where they come from. Samples are counted as they lie in --lengths, else as training counts them.
    """
    if options.lengths:
        if config.data or config.mock_data or config.target:
            raise InputError("--lengths stands in place of data; drop --data, --target and --mock_data")
        in_file = read_lengths(options.lengths, "--lengths")[: config.max_samples]
        limit = config.training_seq_len
        lengths, report = fit_lengths(in_file, limit, config.overlong, shortest=1)
        kept = in_file <= limit if config.overlong == "drop" else np.ones(len(in_file), dtype=bool)
        return lengths, np.flatnonzero(kept), report, options.lengths
    if config.target:
        config.check_target_and_data()
    elif not (config.data or config.mock_data):
        raise InputError("nothing to plan; name --lengths, --data or --mock_data")
    tokenizer, vocab_size, max_positions = None, ANY_VOCABULARY, None
    if config.target or config.mock_data:
        target = find_target(config)
        vocab_size, max_positions = target.vocab_size, target.max_positions
        tokenizer = None if config.mock_data else load_tokenizer(target.name, config)
    data = prepare_data(config, tokenizer, vocab_size, max_positions)
    source = "mock data" if config.mock_data else ", ".join(config.data) or "the bundled demo"
    return data.train_lengths, np.arange(len(data.train_lengths)), data.train_report.length, source


def packing_modes(config: TrainConfig) -> dict[str, TrainConfig]:
    """The options under every packing mode, unpacked batches in both forms."""
    flat = replace(config, padding_free=True, attn_implementation=ISOLATED)
    packed = [replace(flat, packing=packing) for packing in PACKINGS if packing != "none"]
    unpacked = replace(flat, packing="none", tokens_per_row=None)
    modes = [*packed, unpacked, replace(unpacked, padding_free=False)]
    return {mode_name(mode): mode for mode in modes}


def mode_name(config: TrainConfig) -> str:
    return config.packing if config.padding_free else f"{config.packing}, padded"


def length_facts(lengths: Ints, report: LengthReport) -> dict[str, Any]:
    """Figures of the samples, in tokens; the first block of the output."""
    p50, p95 = np.percentile(lengths, [50, 95])
    return {
        "samples": len(lengths),
        "tokens": int(lengths.sum()),
        "mean_length": float(lengths.mean()),
        "p50_length": float(p50),
        "p95_length": float(p95),
        "max_length": int(lengths.max()),
        "overlong": report.truncated_samples + report.dropped_samples,
        "truncated_samples": report.truncated_samples,
        "truncated_tokens": report.truncated_tokens,
        "dropped_samples": report.dropped_samples,
        "dropped_tokens": report.dropped_tokens,
        "unsupervised_samples": report.unsupervised_samples,
    }


def plan_settings(schedule: Schedule) -> dict[str, Any]:
    config, geometry = schedule.config, schedule.geometry
    return {
        "packing": mode_name(config),
        "world_size": geometry.world_size,
        "capacity": geometry.capacity,
        "bucket_granularity": config.granularity,
        "accumulation_steps": geometry.accumulation_steps,
        "seed": config.seed,
    }


def as_json(figures: Mapping[str, PlanFigures]) -> dict[str, Any]:
    return {name: asdict(values) for name, values in figures.items()}


def format_plan(
    source: str, facts: Mapping[str, Any], schedule: Schedule, figures: Mapping[str, PlanFigures]
) -> str:
    """The samples as facts, then one line a packing mode."""
    geometry = schedule.geometry
    lines = {
        "samples": f"{facts['samples']:,}, {facts['tokens']:,} tokens",
        "length": f"mean {facts['mean_length']:,.0f}, p50 {facts['p50_length']:,.0f}, p95 "
        f"{facts['p95_length']:,.0f}, max {facts['max_length']:,} tokens",
        "truncated": f"{facts['truncated_samples']:,} samples, {facts['truncated_tokens']:,} tokens lost",
        "dropped": f"{facts['dropped_samples']:,} samples, {facts['dropped_tokens']:,} tokens, by --overlong",
        "rows": f"{geometry.capacity:,} tokens, lengths rounded up to {schedule.config.granularity:,}, "
        f"{geometry.world_size} ranks",
    }
    if facts["unsupervised_samples"]:
        lines["left out"] = f"{facts['unsupervised_samples']:,} samples without a supervised row"
    if geometry.translation:
        lines["global batch"] = geometry.translation
    header = ["packing", "steps", "fill", "imbalance in tokens", "in cost", "utilisation",
              "dropped samples", "dropped tokens", "shapes"]  # fmt: skip
    rows = [
        [
            name,
            f"{values.num_steps:,}",
            f"{values.fill:.2%}",
            f"{values.imbalance_tokens:.3f}",
            f"{values.imbalance_cost:.3f}",
            f"{values.utilisation:.2%}",
            f"{values.dropped_samples:,}",
            f"{values.dropped_tokens:,}",
            f"{len(values.shapes)}: {format_shapes(values.shapes, limit=3)}",
        ]
        for name, values in figures.items()
    ]
    legend = (
        "  fill: real tokens / computed slots. imbalance: heaviest rank / mean rank, 1 is even.\n"
        "  utilisation: modelled work / (ranks x slowest rank's work), in tokens + length^2 / 24,576."
    )
    return f"{format_facts(f'plan of {source}', lines)}\n{format_table(header, rows)}\n{legend}"


def check_out(path: Path, inputs: Sequence[str | None]) -> None:
    """Refuse, before the work is done, an --out that cannot be a file or that is one of the inputs."""
    if not path.name or path.is_dir() or not path.parent.is_dir():
        raise InputError(f"--out {str(path)!r} is no file in a directory that exists; name one")
    if any(name and Path(name).resolve() == path.resolve() for name in inputs):
        raise InputError(f"--out {path} is also an input, which it would replace; name another file")


def write_plan(path: Path, epoch: Plan, lengths: Ints, sample_ids: Ints) -> None:
    """One JSON object a step and rank."""
    lines = []
    for step in range(epoch.num_steps):
        for rank in range(epoch.world_size):
            pack = epoch.pack(step, rank)
            entry = {
                "step": step,
                "rank": rank,
                "samples": sample_ids[pack].tolist(),
                "tokens": int(lengths[pack].sum()),
                "bucket": int(epoch.bucket_lens[step]),
            }
            lines.append(json.dumps(entry))
    write_atomically(path, lambda temporary: temporary.write_text("".join(f"{line}\n" for line in lines)))
