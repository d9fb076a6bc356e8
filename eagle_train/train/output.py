"""The output directory, and the texts around a run: header before it, summary behind it."""

import shutil
from dataclasses import asdict
from pathlib import Path

import yaml

from eagle_train.config import TrainConfig
from eagle_train.data.packing import fill
from eagle_train.errors import InputError
from eagle_train.train.prepare import Prepared, SplitReport
from eagle_train.train.report import format_facts, format_figure
from eagle_train.train.schedule import plan_epoch, planned_shapes
from eagle_train.train.state import RunState

# Options that may differ between a run and its resumption; all others change what is computed.
FREE_ON_RESUME = {
    "resume", "overwrite", "output_dir", "device", "num_threads", "log_every", "eval_every", "save_every",
    "max_steps", "num_epochs", "learning_rate", "dtype",
}  # fmt: skip


def claim_output_dir(config: TrainConfig) -> None:
    """Make --output_dir. A directory that holds something is refused unless --resume or --overwrite says
    what to do.
    """
    path = Path(config.output_dir)
    if path.exists() and not path.is_dir():
        raise InputError(f"--output_dir {path} is a file; name a directory")
    in_use = path.is_dir() and any(path.iterdir())
    if in_use and not (config.resume or config.overwrite):
        raise InputError(
            f"--output_dir {path} is not empty; add --resume to go on, --overwrite to replace it, "
            "or name another"
        )
    if config.resume and not in_use:
        raise InputError(f"--resume: --output_dir {path} holds no run; start without --resume")
    if in_use and config.overwrite:
        if not (path / "run_config.yaml").is_file():
            raise InputError(
                f"--overwrite: {path} holds files but no eagle_train run; it is left alone. "
                "Name another --output_dir"
            )
        shutil.rmtree(path)
    path.mkdir(parents=True, exist_ok=True)


def check_same_run(config: TrainConfig, output_dir: Path) -> None:
    """Refuse to resume under options that would make it another run, naming each."""
    path = output_dir / "run_config.yaml"
    if not path.is_file():
        raise InputError(f"--resume: {path} does not exist; start without --resume")
    saved = yaml.safe_load(path.read_text())
    changed = [
        f"--{key} {saved.get(key)} -> {value}"
        for key, value in config.to_dict().items()
        if key not in FREE_ON_RESUME and saved.get(key) != value
    ]
    if changed:
        raise InputError(
            f"--resume: other options than the saved run: {'; '.join(changed)}. Use its options or start anew"
        )


def header(prepared: Prepared, config: TrainConfig, num_steps: int, learning_rate: float) -> str:
    """What is about to be trained on what."""
    target, head = prepared.target, prepared.head
    lengths = [len(sample) for sample in prepared.train_samples]
    num_parameters = sum(p.numel() for p in head.parameters())
    if not prepared.heldout_samples:
        heldout = "none: nothing is validated, and the last head is kept"
    elif prepared.heldout_report is None:
        heldout = f"{len(prepared.heldout_samples):,} samples, split off the training data"
    else:
        heldout = f"{len(prepared.heldout_samples):,} samples{_describe(prepared.heldout_report)}"
    facts = {
        "target": f"{prepared.target_name} ({type(target.model).__name__}, {target.config.num_hidden_layers} "
        f"layers, hidden {target.config.hidden_size}, {target.dtype} on {target.device})".replace(
            "torch.", ""
        ),
        "draft head": f"EAGLE-3, {num_parameters / 1e6:.2f} M parameters, K = {config.ttt_steps}, "
        f"aux layers {', '.join(map(str, target.aux_layer_ids))}",
        "draft vocabulary": f"{head.config.draft_vocab_size:,} of {head.config.vocab_size:,} tokens, "
        f"covers {prepared.draft_vocab_coverage:.2%} of the supervised tokens",
        "training data": f"{len(lengths):,} samples, {sum(lengths):,} tokens, "
        f"mean length {sum(lengths) / len(lengths):.0f}{_describe(prepared.train_report)}",
        "held-out data": heldout,
        "batches": _describe_batches(prepared, config),
        "optimizer": f"{num_steps:,} steps of {config.accumulation_steps} micro-batches, AdamW, "
        f"peak learning rate {learning_rate:.2g}",
        "output": config.output_dir,
    }
    return format_facts("eagle_train", facts)


def _describe_batches(prepared: Prepared, config: TrainConfig) -> str:
    """Packing mode and the shapes of the first epoch, the most frequent first."""
    lengths = [len(sample) for sample in prepared.train_samples]
    plan = plan_epoch(lengths, config, epoch=0)
    shapes = planned_shapes(prepared.train_samples, config).most_common()
    shown = ", ".join(f"{shape} (x{times})" for shape, times in shapes[:6])
    more = f" and {len(shapes) - 6} more" if len(shapes) > 6 else ""
    form = f"{config.packing}, {len(plan):,} micro-batches an epoch, {len(shapes)} shapes: {shown}{more}"
    flat = config.packing == "multipack" or config.padding_free
    return form + (f", fill {fill(lengths, plan, config.granularity):.1%}" if flat else "")


def _describe(report: SplitReport) -> str:
    """Everything that was cut, left out or refused, with counts; nothing when there was nothing."""
    length, data = report.length, report.data
    notes = {
        f"cut to {length.limit} tokens": (length.truncated_samples, length.truncated_tokens),
        f"dropped above {length.limit} tokens": (length.dropped_samples, length.dropped_tokens),
    }
    parts = [
        f"{samples:,} {what} ({tokens:,} tokens lost)" for what, (samples, tokens) in notes.items() if samples
    ]
    if length.unsupervised_samples:
        parts.append(f"{length.unsupervised_samples:,} without a supervised row left out")
    if data.rows_refused:
        parts.append(f"{data.rows_refused:,} of {data.rows_read:,} rows refused")
    return "".join(f"; {part}" for part in parts)


def summary(state: RunState, output_dir: Path, config: TrainConfig) -> str:
    """Where the head lies and what to do next."""
    target = config.target or "TARGET"
    facts = {
        "steps": f"{state.step:,}, {state.tokens:,} tokens in {state.seconds:.0f} s "
        f"({state.tokens / max(state.seconds, 1e-9):,.0f} tokens/s)",
        "best head": f"{output_dir} (step {state.best_step}, expected acceptance length "
        f"{format_figure(state.best_acceptance_length, 2)} at n = {config.ttt_steps})"
        if state.best_step is not None
        else f"{output_dir} (the last one; nothing was held out)",
        "figures": f"{output_dir / 'metrics.jsonl'}",
        "serve it": f"vllm serve {target} --speculative-config "
        f'\'{{"method": "eagle3", "model": "{output_dir}", "num_speculative_tokens": 3}}\'',
        "look at it": "jupyter notebook scripts/acceptance_rate.ipynb",
    }
    if state.empty_steps:
        facts["empty steps"] = f"{state.empty_steps} without a supervised row changed nothing"
    return format_facts("done", facts)


def report_values(prepared: Prepared) -> dict[str, object]:
    """The header's counts under plain names, for metrics.jsonl."""
    values: dict[str, object] = {
        "train_samples": len(prepared.train_samples),
        "train_tokens": sum(map(len, prepared.train_samples)),
        "heldout_samples": len(prepared.heldout_samples),
        "draft_vocab_size": prepared.head.config.draft_vocab_size,
        "draft_vocab_coverage": prepared.draft_vocab_coverage,
        "train_data": asdict(prepared.train_report),
    }
    if prepared.heldout_report:
        values["heldout_data"] = asdict(prepared.heldout_report)
    return values
