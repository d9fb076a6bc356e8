"""The output directory, and the texts around a run: header before it, summary behind it."""

import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from eagle_train.bundled import DEMO_NAME, target_path
from eagle_train.config import TrainConfig
from eagle_train.data.plan_figures import plan_figures
from eagle_train.errors import InputError
from eagle_train.export.card import CARD
from eagle_train.export.engines import TARGET_WORD, Served, full_path, num_drafted, serve_command
from eagle_train.export.findings import VLLM
from eagle_train.model.layouts import OFFICIAL
from eagle_train.train.lock import LOCK, OutputLock
from eagle_train.train.prepare import Prepared
from eagle_train.train.report import format_facts, format_figure, format_shapes
from eagle_train.train.schedule import Schedule
from eagle_train.train.splits import SplitReport
from eagle_train.train.state import RunState, has_saved_state

RUN_CONFIG = "run_config.yaml"
METRICS = "metrics.jsonl"
RUN_FILES = (RUN_CONFIG, METRICS, "model.safetensors", "config.json", CARD)
RUN_FOLDERS = ("state", "state.new", "state.old")


def check_output_dir(path: Path, *, resume: bool = False, overwrite: bool = False) -> None:
    """Refuse an --output_dir that holds something, unless --resume or --overwrite says what to do with it.
    Nothing is changed yet.
    """
    if path.exists() and not path.is_dir():
        raise InputError(f"--output_dir {path} is a file; name a directory")
    names = {entry.name for entry in path.iterdir()} - {LOCK} if path.is_dir() else set()
    # A run that ended before its first saved head has nothing to lose, so it does not block the next one.
    in_use = bool(names) and not (RUN_CONFIG in names and names <= {RUN_CONFIG, METRICS})
    if in_use and not (path / RUN_CONFIG).is_file():
        flag = "--resume" if resume else "--overwrite" if overwrite else "--output_dir"
        raise InputError(
            f"{flag}: {path} holds files but no eagle_train run; it is left alone. Name another --output_dir"
        )
    has_state = has_saved_state(path / "state")
    if in_use and not (resume or overwrite):
        go_on = "add --resume to go on," if has_state else "it holds no saved state to go on from; add"
        raise InputError(
            f"--output_dir {path} is not empty; {go_on} --overwrite to replace it, or name another"
        )
    if resume and not in_use:
        raise InputError(f"--resume: --output_dir {path} holds no run; start without --resume")
    if resume and not has_state:
        raise InputError(f"--resume: {path / 'state'} holds no saved state; start anew with --overwrite")


def lock_output_dir(config: TrainConfig, lock: OutputLock) -> None:
    """Take the lock of an --output_dir that is there already, and see that the run may have it."""
    lock.take()
    check_output_dir(Path(config.output_dir), resume=config.resume, overwrite=config.overwrite)


def resolved(config: TrainConfig, prepared: Prepared, learning_rate: float) -> TrainConfig:
    """The config with everything in it that was derived, chosen or timed."""
    target = prepared.target
    return replace(
        config,
        dtype=str(target.dtype).removeprefix("torch."),
        # The kind of device only: each rank has its own, and so may the next run.
        device=target.device.type if config.device == "auto" else config.device,
        aux_layer_ids=target.aux_layer_ids,
        bucket_granularity=config.granularity,
        # With --init_from none means the head's own vocabulary; its size would ask for another one.
        draft_vocab_size=config.draft_vocab_size
        if config.init_from
        else prepared.head.config.draft_vocab_size,
        draft_intermediate_size=prepared.head.config.intermediate_size,
        learning_rate=learning_rate,
    )


def with_full_paths(config: TrainConfig) -> TrainConfig:
    """The config with the files that it names as full paths, so that it holds in any working directory; a
    target's Hugging Face id, the demo's name and a specification of lengths stay.
    """

    # Not resolved: links in a path are what the user chose to name.
    def full(path: str | None) -> str | None:
        return None if path is None else os.path.abspath(path)

    def all_full(paths: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(os.path.abspath, paths))

    target, mock_len = config.target, config.mock_len
    is_directory = target is not None and target != DEMO_NAME and Path(target).is_dir()
    is_file = mock_len is not None and Path(mock_len).is_file()
    return replace(
        config,
        target=full(target) if is_directory else target,
        data=all_full(config.data),
        eval_data=all_full(config.eval_data),
        measure_prompts=all_full(config.measure_prompts),
        chat_template=full(config.chat_template),
        init_from=full(config.init_from),
        mock_len=full(mock_len) if is_file else mock_len,
    )


def claim_output_dir(config: TrainConfig, lock: OutputLock) -> None:
    """Make --output_dir and note the options in it. The files of an earlier run go, unless --resume, and no
    others: data or notes beside them stay.
    """
    path = Path(config.output_dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock_output_dir(config, lock)  # another run may have made it in the meantime
        if not config.resume:
            for name in RUN_FILES:
                (path / name).unlink(missing_ok=True)
            for name in RUN_FOLDERS:
                shutil.rmtree(path / name, ignore_errors=True)
        # Without the two flags, so that `--config` with this file starts the same run in another directory.
        replace(with_full_paths(config), resume=False, overwrite=False).save(path / RUN_CONFIG)
    except OSError as error:
        raise InputError(
            f"--output_dir {path} cannot be written: {error.strerror}; name another directory"
        ) from error


def header(prepared: Prepared, schedule: Schedule, num_steps: int, learning_rate: float) -> str:
    """What is about to be trained on what."""
    target, head, config = prepared.target, prepared.head, schedule.config
    lengths = schedule.lengths
    num_parameters = sum(p.numel() for p in head.parameters())
    if not prepared.data.heldout_samples:
        kept = "the one that measures longest" if config.select_by == "measured" else "the last one"
        heldout = f"none: nothing is validated, and the head kept is {kept}"
    elif prepared.data.heldout_report is None:
        origin = "other mock samples" if config.mock_data else "samples, split off the training data"
        heldout = f"{len(prepared.data.heldout_samples):,} {origin}"
    else:
        heldout = f"{len(prepared.data.heldout_samples):,} samples{_describe(prepared.data.heldout_report)}"
    facts = {
        "target": f"{prepared.target_name} ({type(target.model).__name__}, {target.config.num_hidden_layers} "
        f"layers, hidden {target.config.hidden_size}, {target.dtype} on {target.device})".replace(
            "torch.", ""
        ),
        "draft head": f"EAGLE-3, {num_parameters / 1e6:.2f} M parameters, K = {config.ttt_steps}, "
        f"aux layers {', '.join(map(str, target.aux_layer_ids))}",
        "draft vocabulary": f"{head.config.draft_vocab_size:,} of {head.config.vocab_size:,} tokens, "
        f"covers {prepared.draft_vocab_coverage:.2%} of the supervised tokens",
        "training data": f"{len(lengths):,} {'mock ' * config.mock_data}samples, {lengths.sum():,} tokens, "
        f"mean length {lengths.mean():.0f}{_describe(prepared.data.train_report)}",
        "target's own tokens": f"{prepared.own_token_share:.1%} of the first answers' tokens are its arg-max",
        "held-out data": heldout,
        "batches": _describe_batches(schedule),
        "optimizer": f"{num_steps:,} steps, micro-batches a step: {schedule.geometry.accumulation_steps}, "
        f"AdamW, peak learning rate {learning_rate:.2g}",
        "output": config.output_dir,
    }
    if prepared.warm_start:
        facts["starts from"] = prepared.warm_start.text
    if schedule.geometry.world_size > 1:
        facts["ranks"] = f"{schedule.geometry.world_size}, data parallel"
    if schedule.geometry.translation:
        facts["global batch"] = schedule.geometry.translation
    return format_facts("eagle_train", facts) + _notes(prepared)


def _describe_batches(schedule: Schedule) -> str:
    """Packing mode and the shapes of the first epoch, the most frequent first."""
    config = schedule.config
    figures = plan_figures(schedule.plan(), schedule.lengths, padding_free=config.padding_free)
    dropped = (
        f", drops {figures.dropped_samples:,} samples ({figures.dropped_tokens:,} tokens)"
        if figures.dropped_samples
        else ""
    )
    return (
        f"{config.packing}{'' if config.padding_free else ', padded'}, {figures.num_steps:,} micro-batches "
        f"an epoch, shapes: {format_shapes(figures.shapes)}, fill {figures.fill:.1%}{dropped}"
    )


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
    if data and data.rows_refused:
        parts.append(f"{data.rows_refused:,} of {data.rows_read:,} rows refused")
    parts += [
        f"{times:,} x {kind.replace('_', ' ')}" for kind, times in (data.warnings if data else {}).items()
    ]
    return "".join(f"; {part}" for part in parts)


def _notes(prepared: Prepared) -> str:
    """What is worth knowing about --init_from; the first warning of each kind and the first refusals, with
    file:line; what is worth knowing about options and splits.
    """
    reports = [report for report in (prepared.data.train_report, prepared.data.heldout_report) if report]
    messages = list(prepared.warm_start.notes if prepared.warm_start else ())
    messages += [message for report in reports if report.data for message in report.data.messages]
    return "".join(f"\n  note: {message}" for message in [*messages, *prepared.notes])


def describe_counts(counts: Mapping[str, Any]) -> str:
    """What torch.compile did; a graph after the warm-up is a fault of the plan and is shown as such."""
    if "graphs_compiled" not in counts:
        return "none compiled"
    again = counts["recompiles_after_warmup"]
    return (
        f"{counts['graphs_compiled']:,} compiled, {again:,} after the warm-up{' (unplanned)' * bool(again)}, "
        f"{counts['eager_fallbacks']:,} fallbacks"
    )


def summary(
    state: RunState,
    baseline: Mapping[str, float | None],
    output_dir: Path,
    config: TrainConfig,
    figures: Mapping[str, Any],
) -> str:
    """What came of it, where the head lies and what to do next. figures: those of the `end` event, without a
    `bucket_len` where no step was left to do.
    """
    did_steps = figures["bucket_len"] is not None
    facts = {}
    if state.best_acceptance_length is not None:
        bigram = format_figure(baseline.get(str(config.ttt_steps)), 2)
        of_what = f"expected on held-out answers (bigram drafter {bigram})"
        if config.select_by == "measured":
            of_what = "measured on the prompts that were decoded"
        facts["acceptance length"] = (
            f"{format_figure(state.first_acceptance_length, 2)} before, {state.best_acceptance_length:.2f} "
            f"after, at n = {config.ttt_steps} drafted tokens, {of_what}"
        )
    facts |= {
        "steps": f"{state.step:,} in {figures.get('seconds', 0):.0f} s; {figures.get('samples', 0):,} "
        f"samples, {figures.get('tokens', 0):,} tokens, of them "
        f"{figures.get('supervised_tokens', 0):,} supervised",
        "per second": f"{figures['samples_per_second']:,.1f} samples, {figures['tokens_per_second']:,.0f} "
        f"tokens, {figures['supervised_tokens_per_second']:,.0f} supervised tokens, "
        f"{figures['slots_per_second']:,.0f} slots (fill {figures['fill']:.1%})",
    }
    if did_steps:
        facts["an epoch takes"] = (
            f"{format_figure(figures['epoch_seconds'], 0)} s at the present speed; imbalance of ranks "
            f"{format_figure(figures['imbalance'])}, bucket {figures['bucket_len']}"
        )
    facts |= {
        "waited for data": f"{figures['data_wait_share']:.1%} of the time",
        "peak memory": f"{figures['peak_memory_gib']:.2f} GiB",
        "graphs": describe_counts(figures),
        "best head": f"{output_dir} ({_which_head(state, config)})",
        "figures": f"{output_dir / METRICS}",
    }
    if config.mock_data:
        facts["serve it"] = "no: it was trained on random tokens"
    else:
        served = Served(
            draft=full_path(str(output_dir)),
            target=full_path(target_path(config.target or TARGET_WORD)),
            layout=OFFICIAL,
            dtype=config.dtype,
            aux_layer_ids=config.aux_layer_ids,
            is_default=True,  # vLLM's line is the same for others, which stand in the head's config
            num_drafted=num_drafted(config.ttt_steps),
        )
        facts |= {
            "serve it": serve_command(VLLM, served) or "",
            "look at it": f"EAGLE_TRAIN_HEAD={shlex.quote(served.draft)} "
            "jupyter notebook scripts/acceptance_rate.ipynb",
        }
    if state.empty_steps:
        facts["empty steps"] = f"{state.empty_steps} without a supervised row changed nothing"
    nothing_left = f"nothing left to do: the run is at step {state.step}; a larger --max_steps goes on"
    return format_facts("done" if did_steps else nothing_left, facts)


def _which_head(state: RunState, config: TrainConfig) -> str:
    if state.best_step is None:
        why = "no measurement had a verify step" if config.select_by == "measured" else "nothing was held out"
        return f"the last one; {why}"
    if config.init_from and state.best_step == 0:
        rounded = ", rounded to bfloat16" if config.dtype == "bfloat16" else ""
        return f"no step improved on the head that training started from; this is that head{rounded}"
    return f"of step {state.best_step}"


def report_values(prepared: Prepared) -> dict[str, object]:
    """The header's counts under plain names, for metrics.jsonl."""
    values: dict[str, object] = {
        "train_samples": len(prepared.data.train_lengths),
        "train_tokens": int(prepared.data.train_lengths.sum()),
        "train_mean_length": float(prepared.data.train_lengths.mean()),
        "heldout_samples": len(prepared.data.heldout_samples),
        "draft_vocab_size": prepared.head.config.draft_vocab_size,
        "draft_vocab_coverage": prepared.draft_vocab_coverage,
        "target_own_token_share": prepared.own_token_share,
        "train_data": asdict(prepared.data.train_report),
        "notes": list(prepared.notes),
    }
    if prepared.warm_start:
        values["warm_start"] = prepared.warm_start.values
    if prepared.data.heldout_report:
        values["heldout_data"] = asdict(prepared.data.heldout_report)
    return values
