"""The training loop. `train` is the file's story; everything else is a sentence of it."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from eagle_train.batch import PackedBatch
from eagle_train.config import TrainConfig
from eagle_train.errors import InputError
from eagle_train.model.checkpoint import save_draft_head
from eagle_train.objective.acceptance import AcceptanceTotals
from eagle_train.objective.bigram import bigram_walk, fit_bigram
from eagle_train.objective.unroll import UnrolledSums
from eagle_train.train.distributed import rank_and_world_size, require_agreement
from eagle_train.train.evaluate import evaluate, micro_batch_sums, walk_lengths
from eagle_train.train.optim import learning_rate_factor, make_optimizer, peak_learning_rate
from eagle_train.train.output import (
    check_output_dir,
    claim_output_dir,
    header,
    report_values,
    resolved,
    summary,
    with_saved_choices,
)
from eagle_train.train.prepare import Prepared, choose_device, prepare
from eagle_train.train.report import MetricsLog, format_sources, format_validation
from eagle_train.train.schedule import Schedule, Window, data_digest
from eagle_train.train.state import RunState, load_state, save_state
from eagle_train.train.statistics import batch_counts, peak_memory_gib


@dataclass(slots=True)
class Run:
    """One run's moving parts. baseline: the bigram drafter's acceptance length at each n, as text keys."""

    config: TrainConfig
    prepared: Prepared
    schedule: Schedule
    rank: int
    optimizer: torch.optim.AdamW
    learning_rate: float
    num_steps: int
    output_dir: Path
    state: RunState
    log: MetricsLog
    baseline: dict[str, float | None]


def train(config: TrainConfig) -> Path:
    """Train a draft head; returns the directory that holds the best one.

    Raises InputError for anything that the user can mend.
    """
    config.check_sources()
    check_output_dir(config)
    run = start(with_saved_choices(config))
    config = run.config
    print(header(run.prepared, run.schedule, run.num_steps, run.learning_rate))
    run.log.write("start", run.state.step, report_values(run.prepared))
    if not config.resume:
        validate(run)
        save(run)
    pending: list[tuple[list[UnrolledSums], Window]] = []
    left = run.num_steps - run.state.step
    windows = run.schedule.windows(run.prepared.data.train_samples, run.rank, run.state.position, left)
    with tqdm(
        total=run.num_steps, initial=run.state.step, desc="training", unit="step", dynamic_ncols=True
    ) as bar:
        waited_from = time.perf_counter()
        for window in windows:
            arrived = time.perf_counter()
            pending.append((train_step(run, window.batches), window))
            run.state.position = window.position
            run.state.statistics.add(
                batch_counts(window.batches),
                seconds=time.perf_counter() - waited_from,
                data_seconds=arrived - waited_from,
                alpha=config.ema_alpha,
            )
            bar.update()
            validation_due = is_due(run, config.eval_every or max(run.num_steps // 5, 1))
            save_due = is_due(run, config.save_every) if config.save_every else validation_due
            # Logged before each save too, so that a resumed run's figures cover the same steps.
            if is_due(run, config.log_every) or save_due:
                log_training(run, pending, bar)
                pending = []
            if validation_due:
                validate(run)
            if save_due:
                save(run)
            waited_from = time.perf_counter()
    memory = peak_memory_gib(run.prepared.target.device)
    print(summary(run.state, run.baseline, run.output_dir, config, memory))
    totals = run.state.statistics.totals | run.state.statistics.overall()
    run.log.write(
        "end", run.state.step, {"best_step": run.state.best_step, **totals, "peak_memory_gib": memory}
    )
    return run.output_dir


def start(config: TrainConfig) -> Run:
    """Load everything, and the saved state under --resume."""
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    rank, world_size = rank_and_world_size(on_cpu=choose_device(config.device).type == "cpu")
    if world_size > 1:
        raise InputError(f"{world_size} ranks were launched; training runs in one process so far")
    prepared = prepare(config)
    learning_rate = peak_learning_rate(config, prepared.head.config.hidden_size)
    optimizer = make_optimizer(prepared.head, config, learning_rate)
    digest = f"{data_digest(prepared.data.train_samples)}-{data_digest(prepared.data.heldout_samples)}"
    state = RunState(data_digest=digest)
    output_dir = Path(config.output_dir)
    log = MetricsLog(output_dir / "metrics.jsonl")
    if config.resume:
        state = load_state(output_dir / "state", prepared.head, optimizer)
        if state.data_digest != digest:
            raise InputError(
                f"--resume: the data differ from those of {output_dir}; restore them or start anew"
            )
        log.drop_after(state.step)
    config = resolved(config, prepared, learning_rate)
    schedule = Schedule(prepared.data.train_lengths, config, world_size)
    num_steps = schedule.total_steps(state.step, state.position)
    if config.resume and state.plan_digest != schedule.digest(state.position):
        raise InputError(
            f"--resume: the plan of batches differs from that of {output_dir}; resume with the package "
            "version that it was started with, or start anew"
        )
    require_agreement({"data": digest, "plan": schedule.digest(state.position)})
    claim_output_dir(config)
    return Run(
        config=config,
        prepared=prepared,
        schedule=schedule,
        rank=rank,
        optimizer=optimizer,
        learning_rate=learning_rate,
        num_steps=num_steps,
        output_dir=output_dir,
        state=state,
        log=log,
        baseline={} if config.mock_data else bigram_baseline(prepared, config.ttt_steps),
    )


def train_step(run: Run, window: list[PackedBatch]) -> list[UnrolledSums]:
    """One optimizer step over a window of micro-batches, normalised by the window's supervised rows."""
    config, state, head = run.config, run.state, run.prepared.head
    counts_K = supervised_counts(window, config.ttt_steps)
    state.step += 1
    if counts_K[0] == 0:
        # Nothing to learn from: no weight, no moment and no learning rate moves.
        state.empty_steps += 1
        return []
    step_weight_K = step_weights(counts_K, config.step_decay).to(run.prepared.target.device)
    head.train()
    sums = []
    for batch in window:
        batch_sums = micro_batch_sums(head, run.prepared.target, batch, step_weight_K)
        batch_sums.loss.backward()
        sums.append(replace(batch_sums, loss=batch_sums.loss.detach()))
    grad_norm = torch.nn.utils.clip_grad_norm_(head.parameters(), config.max_grad_norm)
    stop_if_not_finite(run, sum(float(s.loss) for s in sums) + float(grad_norm), window)
    factor = learning_rate_factor(
        state.step - 1 - state.empty_steps, run.num_steps, config.warmup_ratio, config.min_lr_ratio
    )
    for group in run.optimizer.param_groups:
        group["lr"] = run.learning_rate * factor
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return sums


def supervised_counts(window: list[PackedBatch], ttt_steps: int) -> list[int]:
    """N_k over the whole window, from masks alone, before any forward."""
    return [
        sum(counts) for counts in zip(*(batch.supervised_counts(ttt_steps) for batch in window), strict=True)
    ]


def step_weights(counts_K: list[int], step_decay: float) -> Tensor:
    """decay^k / N_k, `[K]` float32; zero where no row is supervised."""
    return torch.tensor([step_decay**k / count if count else 0.0 for k, count in enumerate(counts_K)])


def stop_if_not_finite(run: Run, value: float, window: list[PackedBatch]) -> None:
    """A NaN or infinity ends the run with the state of the step before it saved."""
    if value - value == 0.0:
        return
    failed_step = run.state.step
    run.optimizer.zero_grad(set_to_none=True)
    run.state.step -= 1
    save(run)
    sources = format_sources([source for batch in window for source in batch.sources])
    raise InputError(
        f"loss or gradient is not finite at step {failed_step}, on {sources}; the state of step "
        f"{run.state.step} is saved in {run.output_dir / 'state'}. Look at these samples, or resume with "
        "a lower --learning_rate or --dtype float32"
    )


def log_training(run: Run, pending: list[tuple[list[UnrolledSums], Window]], bar: "tqdm[Any]") -> None:
    """Figures of the steps since the last log line, on the bar and in metrics.jsonl."""
    ttt_steps = run.config.ttt_steps
    totals = AcceptanceTotals(ttt_steps, walk_lengths(ttt_steps))
    for sums, window in pending:
        for batch_sums, batch in zip(sums, window.batches, strict=bool(sums)):
            totals.add(batch_sums, batch.answer_remaining.numpy())
    counts = batch_counts([batch for _, window in pending for batch in window.batches])
    last, statistics = pending[-1][1], run.state.statistics
    rates = statistics.rates(last.steps_per_epoch, run.config.ema_alpha)
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
    }
    run.log.write("train", run.state.step, values)
    loss, length = values["loss"], totals.walks[ttt_steps].acceptance_length if totals.walks else None
    speed = rates["tokens_per_second"] or 0.0
    bar.set_postfix_str(
        f"loss {loss:.3f}, acceptance length {length:.2f}, {speed:,.0f} tokens/s"
        if loss is not None and length is not None
        else "no supervised row"
    )


def validate(run: Run) -> None:
    """Measure the held-out split, show it, and keep the head if its acceptance length is the longest so
    far.
    """
    config, prepared, state = run.config, run.prepared, run.state
    if not prepared.data.heldout_samples:
        keep_head(run)
        return
    prepared.head.eval()
    try:
        metrics = evaluate(
            prepared.head,
            prepared.target,
            prepared.data.heldout_samples,
            ttt_steps=config.ttt_steps,
            training_seq_len=config.training_seq_len,
            bucket_granularity=config.granularity,
            padding_free=config.padding_free,
            batch_size=config.batch_size,
            step_decay=config.step_decay,
        )
    except InputError as error:
        finite = all(bool(parameter.isfinite().all()) for parameter in prepared.head.parameters())
        if state.step and finite:
            save(run)  # a validation that is not finite ends the run, but loses no step
        raise InputError(f"validation at step {state.step}: {error}") from error
    run.log.write("validation", state.step, {f"eval_{name}": value for name, value in metrics.items()})
    tqdm.write(format_validation(state.step, metrics, run.baseline))
    if state.step == 0:
        share = metrics["target_own_token_share"]
        tqdm.write(
            f"  {share:.1%} of the held-out answer tokens are the target's own arg-max"
            if share is not None
            else ""
        )
    length = metrics["acceptance_length"][str(config.ttt_steps)]
    if state.step == 0:
        state.first_acceptance_length = length
    if length is not None and (state.best_acceptance_length is None or length > state.best_acceptance_length):
        state.best_step, state.best_acceptance_length = state.step, length
        keep_head(run)


def keep_head(run: Run) -> None:
    """Write the head as what the output directory offers to engines."""
    target = run.prepared.target
    save_draft_head(run.prepared.head, run.output_dir, target_config=target.config, dtype=target.dtype)


def save(run: Run) -> None:
    """Write the state that --resume goes on from."""
    run.state.plan_digest = run.schedule.digest(run.state.position)
    save_state(run.output_dir / "state", run.state, run.prepared.head, run.optimizer)


def is_due(run: Run, every: int) -> bool:
    """Every so many steps, and at the end."""
    return run.state.step % every == 0 or run.state.step == run.num_steps


def bigram_baseline(prepared: Prepared, ttt_steps: int) -> dict[str, float | None]:
    """Acceptance length of a bigram drafter, counted on the training answers, over the held-out ones."""
    train_documents = [(s.input_ids, s.answer_remaining) for s in prepared.data.train_samples]
    heldout_documents = [(s.input_ids, s.answer_remaining) for s in prepared.data.heldout_samples]
    table = fit_bigram(train_documents, prepared.target.vocab_size)
    return {
        str(n): bigram_walk(table, heldout_documents, n).acceptance_length for n in walk_lengths(ttt_steps)
    }
