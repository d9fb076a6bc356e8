"""One run: its moving parts, how they are compiled, and what the run reports of itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from eagle_train.config import TrainConfig
from eagle_train.decode.results import Prompt
from eagle_train.export.card import write_model_card
from eagle_train.model.checkpoint import stored_config
from eagle_train.objective.acceptance import AcceptanceTotals
from eagle_train.objective.losses import PLAIN_CHUNKS, ChunkFunctions
from eagle_train.objective.unroll import UnrolledSums
from eagle_train.train.compile import (
    Compiled,
    compile_objective,
    compile_target,
    describe_compiled,
    try_compiled_target,
    warm_up,
    why_not_compiled,
)
from eagle_train.train.distributed import Ranks
from eagle_train.train.evaluate import validation_shapes, walk_lengths
from eagle_train.train.output import summary
from eagle_train.train.prepare import Prepared
from eagle_train.train.report import MetricsLog
from eagle_train.train.schedule import Schedule, Window
from eagle_train.train.state import RunState, save_progress, save_state
from eagle_train.train.statistics import batch_counts, peak_memory_gib


@dataclass(slots=True)
class Run:
    """One run's moving parts. module: the head's loss, averaged over ranks in its backward; baseline: the
    bigram drafter's acceptance length at each n, as text keys; prompts: those of --measure_prompts;
    saved_step: of the state that this process saved last; is_uncovered_noted: `note_uncovered` has spoken.
    """

    config: TrainConfig
    prepared: Prepared
    schedule: Schedule
    ranks: Ranks
    module: nn.Module
    optimizer: torch.optim.AdamW
    learning_rate: float
    num_steps: int
    output_dir: Path
    state: RunState
    log: MetricsLog
    baseline: dict[str, float | None]
    prompts: list[Prompt] = field(default_factory=list)
    compiled: Compiled | None = None
    last_logged: dict[str, Any] = field(default_factory=dict)
    saved_step: int | None = None
    is_uncovered_noted: bool = False

    @property
    def chunks(self) -> ChunkFunctions:
        return self.compiled.chunks if self.compiled else PLAIN_CHUNKS


def compile_run(run: Run) -> None:
    """Compile for every shape that training and validation will meet, or say why not. A run that has no step
    left compiles nothing.
    """
    config, prepared = run.config, run.prepared
    if config.torch_compile is False or run.state.step >= run.num_steps:
        return
    run.schedule.choose_supervised_sizes()
    sizes = run.schedule.supervised_sizes
    shapes = run.schedule.shapes(run.state.position, run.state.step, run.num_steps)
    if prepared.data.heldout_samples:
        shapes |= validation_shapes(prepared.data.heldout_samples, config, run.schedule.geometry, sizes)
    asked_for = bool(config.torch_compile)
    obstacle = run.ranks.together(
        lambda: why_not_compiled(prepared.target.device, shapes, asked_for=asked_for)
    )
    if obstacle := next(filter(None, run.ranks.gather(obstacle)), None):
        run.schedule.supervised_sizes = ()
        say(run, f"torch.compile is off: {obstacle}")
        return
    run.compiled = compile_objective(prepared.head)
    if config.compile_target:
        compile_target(prepared.target)
        run.ranks.together(lambda: try_compiled_target(prepared.target, shapes, config.granularity))
    warm_up(
        run.compiled,
        prepared.head,
        prepared.target,
        shapes,
        config.granularity,
        progress=run.ranks.is_first,
        # Ranks whose caches differ wait for each other shape by shape, each wait within --rank_timeout.
        after_shape=lambda: run.ranks.sum([0.0]),
    )
    say(run, describe_compiled(run.compiled))
    run.log.write("compiled", run.state.step, {**run.compiled.counts(), "seconds": run.compiled.warm_seconds})


def save(run: Run, *, owes_checks: bool = False) -> None:
    """Write the state that --resume goes on from. owes_checks: what is due at its step is to be done then."""
    state, directory = run.state, run.output_dir / "state"
    state.owes_checks = owes_checks
    state.plan_digest = run.schedule.digest(state.position)
    head, target_config = run.prepared.head, run.prepared.target.config
    head_config = stored_config(head.config, target_config, torch.float32)
    # All ranks wait for it: a launcher kills the first one as soon as another ends.
    run.ranks.together(
        lambda: (
            save_progress(directory, state)
            if run.saved_step == state.step
            else save_state(directory, state, head, run.optimizer, head_config)
        ),
        first_only=True,
    )
    run.saved_step = state.step


def log_training(run: Run, pending: list[tuple[list[UnrolledSums], Window]], bar: "tqdm[Any]") -> None:
    """Figures of the steps since the last log line, on the bar and in metrics.jsonl."""
    ttt_steps = run.config.ttt_steps
    totals = AcceptanceTotals(ttt_steps, walk_lengths(ttt_steps))
    for sums, window in pending:
        for batch_sums, batch in zip(sums, window.batches, strict=bool(sums)):
            totals.add(batch_sums, batch.answer_remaining.numpy())
    totals = totals.from_list(run.ranks.sum(totals.as_list()))
    counts = over_ranks(run, batch_counts([batch for _, window in pending for batch in window.batches]))
    last, statistics = pending[-1][1], run.state.statistics
    rates = statistics.rates(last.steps_per_epoch)
    values = totals.metrics(run.config.step_decay) | {
        "learning_rate": run.optimizer.param_groups[0]["lr"],
        "epoch": last.position.epoch,
        "total_tokens": statistics.totals["tokens"],
        "steps": len(pending),
        **counts,
        "fill": counts["tokens"] / counts["slots"],
        "bucket_len": last.batches[-1].bucket_len,
        "imbalance": sum(window.imbalance for _, window in pending) / len(pending),
        **rates,
        "peak_memory_gib": peak_memory_gib(run.prepared.target.device),
        "empty_steps": run.state.empty_steps,
        **compile_counts(run),
    }
    run.last_logged = values
    run.log.write("train", run.state.step, values)
    note_uncovered(run, values)
    loss, length = values["loss"], totals.walks[ttt_steps].acceptance_length
    speed = rates["tokens_per_second"] or 0.0
    bar.set_postfix_str(
        f"loss {loss:.3f}, acceptance length {length:.2f}, {speed:,.0f} tokens/s"
        if loss is not None and length is not None
        else "no supervised row"
    )


def note_uncovered(run: Run, metrics: Mapping[str, Any]) -> None:
    """Say, once, that a loss is zero because no supervised row has a label that can be drafted."""
    if metrics["draft_vocab_coverage"] == 0 and not run.is_uncovered_noted:
        run.is_uncovered_noted = True
        say(
            run,
            f"note: at step {run.state.step} the target's arg-max lies in the draft vocabulary in none of "
            f"{metrics['supervised_rows']:,} supervised rows, so the loss is 0 and nothing is learned from "
            "them; name a larger --draft_vocab_size",
        )


def over_ranks(run: Run, counts: dict[str, int]) -> dict[str, int]:
    """Counts of this rank, summed over all."""
    return dict(zip(counts, map(round, run.ranks.sum(list(counts.values()))), strict=True))


def compile_counts(run: Run) -> dict[str, int]:
    """What Dynamo did, the most of any rank; nothing where nothing is compiled."""
    if run.compiled is None:
        return {}
    of_ranks = run.ranks.gather(run.compiled.counts())
    return {name: max(counts[name] for counts in of_ranks) for name in of_ranks[0]}


def finish(run: Run) -> None:
    """The summary, on screen and in metrics.jsonl."""
    figures = (
        run.state.statistics.totals
        | run.state.statistics.overall()
        | {name: run.last_logged.get(name) for name in ("bucket_len", "imbalance", "epoch_seconds")}
        | {"peak_memory_gib": peak_memory_gib(run.prepared.target.device)}
        | compile_counts(run)
    )
    say(run, summary(run.state, run.baseline, run.output_dir, run.config, figures))
    run.log.write("end", run.state.step, {"best_step": run.state.best_step, **figures})
    run.ranks.together(lambda: write_model_card(run.output_dir), first_only=True)


def say(run: Run, text: str) -> None:
    """Print on the first rank, above any progress bar."""
    if run.ranks.is_first and text:
        tqdm.write(text)
