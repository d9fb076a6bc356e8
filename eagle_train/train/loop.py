"""The training loop. `train` is the file's story; everything else is a sentence of it."""

import os
import shlex
import signal
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from eagle_train.batch import PackedBatch, to_device
from eagle_train.config import TrainConfig
from eagle_train.errors import InputError, RankError, Stopped
from eagle_train.objective.unroll import UnrolledSums
from eagle_train.train.compile import graphs_so_far, shape_of
from eagle_train.train.distributed import is_rank_failure, join, leave, without_sync
from eagle_train.train.evaluate import evaluate, micro_batch_sums, step_weights, supervised_counts
from eagle_train.train.lock import OutputLock
from eagle_train.train.optim import learning_rate_factor
from eagle_train.train.output import header, report_values
from eagle_train.train.prepare import choose_device
from eagle_train.train.report import format_sources, format_validation
from eagle_train.train.run import (
    Run,
    compile_run,
    finish,
    log_training,
    note_uncovered,
    over_ranks,
    save,
    say,
)
from eagle_train.train.schedule import Window
from eagle_train.train.selection import (
    forget_lost_head,
    is_out_of_patience,
    keep_head,
    measure_run,
    select_by_validation,
    stop_reason,
)
from eagle_train.train.start import start
from eagle_train.train.state import has_saved_state
from eagle_train.train.statistics import batch_counts
from eagle_train.train.stop import StopRequest, stop_on_signals


def train(config: TrainConfig) -> Path:
    """Train a draft head, alone or as one of the ranks that a launcher started; returns the directory that
    holds the best one.

    Raises InputError for anything that the user can mend, RankError when another rank is gone, Stopped when
    SIGTERM or Ctrl-C ended it.
    """
    config.check_sources()
    try:
        return train_on_ranks(config)
    except RuntimeError as error:
        if int(os.environ.get("WORLD_SIZE", 1)) == 1 or not is_rank_failure(error):
            raise
        reason = " ".join(str(error).split())[:200]
        is_saved = has_saved_state(Path(config.output_dir) / "state")
        raise RankError(
            f"rank {os.environ.get('RANK', 0)}: another rank died or stopped answering ({reason}); see "
            f"its own output, then {'go on with --resume' if is_saved else 'start anew'}"
        ) from error
    finally:
        leave()


def train_on_ranks(config: TrainConfig) -> Path:
    ranks = join(choose_device(config.device).type == "cpu", config.rank_timeout)
    with closing(OutputLock(Path(config.output_dir))) as lock:
        run = start(config, ranks, lock)
        try:
            signum = run_steps(run)
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(after_interrupt(run.output_dir)) from interrupt
        ranks.part()
    if signum:
        name, saved = signal.Signals(signum).name, run.output_dir / "state"
        raise Stopped(
            f"ended by {name} behind step {run.state.step}; its state is saved in {saved}, and --resume "
            f"--output_dir {shlex.quote(config.output_dir)} goes on",
            128 + signum,
        )
    return run.output_dir


def after_interrupt(output_dir: Path) -> str:
    """What a user can do about a run that was interrupted behind its start."""
    if has_saved_state(output_dir / "state"):
        return "--resume goes on from the last saved state"
    return "no step was done, so nothing is lost: the same command starts anew"


def run_steps(run: Run) -> int:
    """Every step, with its figures, validations and saved states; returns the signal that ended the run
    early, else 0.
    """
    say(run, header(run.prepared, run.schedule, run.num_steps, run.learning_rate))
    run.log.write("start", run.state.step, report_values(run.prepared))
    compile_run(run)
    if run.config.resume:
        forget_lost_head(run)
    if run.state.owes_checks:
        check(run)
        save(run)
    is_ended = is_out_of_patience(run.config, run.state) and run.state.step > 0
    if is_ended:
        say_out_of_patience(run)
    if run.state.step < run.num_steps and not is_ended:
        with stop_on_signals(says_so=run.ranks.is_first) as request:
            if train_steps(run, request):
                return next(filter(None, run.ranks.gather(request.signum)))
    finish(run)
    return 0


def train_steps(run: Run, request: StopRequest) -> bool:
    """The steps that are left; whether a signal to any rank ended them early, with the state saved."""
    config = run.config
    pending: list[tuple[list[UnrolledSums], Window]] = []
    left, samples = run.num_steps - run.state.step, run.prepared.data.train_samples
    to_gpu = run.prepared.target.device.type == "cuda"
    windows = run.schedule.windows(samples, run.ranks.rank, run.state.position, left, to_gpu=to_gpu)
    with tqdm(
        total=run.num_steps,
        initial=run.state.step,
        desc="training",
        unit="step",
        dynamic_ncols=True,
        disable=not run.ranks.is_first,
    ) as bar:
        waited_from = time.perf_counter()
        for window in windows:
            arrived = time.perf_counter()
            graphs = graphs_so_far()
            pending.append((train_step(run, window.batches), window))
            run.state.position = window.position
            # In the sum of the counts, so that all ranks end behind the same step.
            counts = over_ranks(run, batch_counts(window.batches) | {"signals": int(request.signum != 0)})
            is_ended = counts.pop("signals") > 0 and run.state.step < run.num_steps
            run.state.statistics.add(
                counts,
                seconds=time.perf_counter() - waited_from,
                data_seconds=arrived - waited_from,
                alpha=config.ema_alpha,
                compiled=graphs_so_far() > graphs,
            )
            if run.compiled and graphs_so_far() > graphs:
                shapes = ", ".join(sorted({str(shape_of(batch)) for batch in window.batches}))
                say(run, f"note: step {run.state.step} compiled anew, for the unplanned shape {shapes}")
            bar.update()
            checks_due = any(due_checks(run))
            save_due = is_ended or is_due(run, config.save_every or validation_interval(run))
            # Logged before each save too, so that a resumed run's figures cover the same steps.
            if is_due(run, config.log_every) or save_due:
                log_training(run, pending, bar)
                pending = []
            # Before the checks, which may take longer than who sends a signal waits. A head that is not
            # finite fails them, and must not replace the state before it.
            if save_due and (is_ended or not checks_due or has_finite_weights(run)):
                save(run, owes_checks=checks_due)
            if is_ended:
                return True
            if checks_due:
                check(run)
                signals = over_ranks(run, {"signals": int(request.signum != 0)})["signals"]
                is_ended = signals > 0 and run.state.step < run.num_steps
                if is_ended and pending:
                    log_training(run, pending, bar)
                if save_due or is_ended or is_out_of_patience(config, run.state):
                    save(run)
                if is_out_of_patience(config, run.state):
                    say_out_of_patience(run)
                    return False
                if is_ended:
                    return True
            waited_from = time.perf_counter()
    return False


def train_step(run: Run, window: list[PackedBatch]) -> list[UnrolledSums]:
    """One optimizer step over a window of micro-batches, normalised by the supervised rows of all ranks'
    windows.
    """
    config, state, head = run.config, run.state, run.prepared.head
    counts_K = run.ranks.sum(supervised_counts(window, config.ttt_steps))
    state.step += 1
    if counts_K[0] == 0:
        # Nothing to learn from: no weight, no moment and no learning rate moves.
        state.empty_steps += 1
        return []
    step_weight_K = to_device(step_weights(counts_K, config.step_decay), run.prepared.target.device)
    sums = []
    for batch in window:
        with without_sync(run.module, run.ranks, is_last=batch is window[-1]):
            batch_sums = micro_batch_sums(
                head, run.prepared.target, batch, step_weight_K, run.chunks, module=run.module
            )
            batch_sums.loss.backward()
        sums.append(replace(batch_sums, loss=batch_sums.loss.detach()))
    grad_norm = torch.nn.utils.clip_grad_norm_(head.parameters(), config.max_grad_norm)
    # The step's one wait for the device: weights must not move where the loss or a gradient is not finite.
    is_finite = bool(torch.stack([*(s.loss for s in sums), grad_norm]).isfinite().all())
    stop_if_not_finite(run, is_finite, window)
    factor = learning_rate_factor(
        state.step - 1 - state.empty_steps, run.num_steps, config.warmup_ratio, config.min_lr_ratio
    )
    for group in run.optimizer.param_groups:
        group["lr"] = run.learning_rate * factor
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return sums


def stop_if_not_finite(run: Run, is_finite: bool, window: list[PackedBatch]) -> None:
    """A NaN or infinity on any rank ends the run with the state of the step before it saved."""
    if not run.ranks.sum([float(not is_finite)])[0]:
        return
    of_ranks = run.ranks.gather([] if is_finite else [source for batch in window for source in batch.sources])
    failed_step = run.state.step
    run.optimizer.zero_grad(set_to_none=True)
    run.state.step -= 1
    save(run)
    sources = format_sources([source for of_rank in of_ranks for source in of_rank])
    raise InputError(
        f"loss or gradient is not finite at step {failed_step}, on {sources}; the state of step "
        f"{run.state.step} is saved in {run.output_dir / 'state'}. Look at these samples, or resume with "
        "a lower --learning_rate or --dtype float32"
    )


def validate(run: Run) -> None:
    """Walk the held-out split by teacher forcing and show it; the head is kept if it is the best so far."""
    config, prepared, state = run.config, run.prepared, run.state
    if not prepared.data.heldout_samples:
        if config.select_by == "expected":
            keep_head(run)
        return
    try:
        metrics = evaluate(
            prepared.head,
            prepared.target,
            prepared.data.heldout_samples,
            ttt_steps=config.ttt_steps,
            training_seq_len=run.schedule.geometry.capacity,  # so that graphs of training are used
            bucket_granularity=config.granularity,
            padding_free=config.padding_free,
            batch_size=config.batch_size,
            step_decay=config.step_decay,
            chunks=run.chunks,
            supervised_sizes=run.schedule.supervised_sizes,
            ranks=run.ranks,
        )
    except InputError as error:
        if state.step and has_finite_weights(run):
            save(run)  # a validation that is not finite ends the run, but loses no step
        raise InputError(f"validation at step {state.step}: {error}") from error
    run.log.write("validation", state.step, {f"eval_{name}": value for name, value in metrics.items()})
    say(run, format_validation(state.step, metrics, run.baseline))
    note_uncovered(run, metrics)
    if state.step == 0:
        share = metrics["target_own_token_share"]
        say(
            run,
            f"  {share:.1%} of the held-out answer tokens are the target's own arg-max"
            if share is not None
            else "",
        )
    select_by_validation(run, metrics)


def check(run: Run) -> None:
    """The validation and the measurement that are due at the present step."""
    validation_due, measurement_due = due_checks(run)
    if validation_due:
        validate(run)
    if measurement_due:
        measure_run(run)


def due_checks(run: Run) -> tuple[bool, bool]:
    """Whether a validation is due at the present step, and whether a measurement is."""
    eval_every = validation_interval(run)
    measure_every = run.config.measure_every or eval_every
    return is_due(run, eval_every), bool(run.prompts) and is_due(run, measure_every)


def validation_interval(run: Run) -> int:
    """Steps between validations."""
    return run.config.eval_every or max(run.num_steps // 5, 1)


def has_finite_weights(run: Run) -> bool:
    """Whether every weight of the head is finite."""
    return all(bool(parameter.isfinite().all()) for parameter in run.prepared.head.parameters())


def say_out_of_patience(run: Run) -> None:
    say(run, f"stopped at step {run.state.step}: {stop_reason(run.config)}")


def is_due(run: Run, every: int) -> bool:
    """Every so many steps, and at the end."""
    return run.state.step % every == 0 or run.state.step == run.num_steps
