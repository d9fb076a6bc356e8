"""Everything that happens before the first step: load, check, take over the saved state, claim the output."""

from pathlib import Path

import torch
from tqdm import tqdm

from eagle_train.config import TrainConfig
from eagle_train.errors import InputError
from eagle_train.train.distributed import Ranks, data_parallel
from eagle_train.train.evaluate import bigram_baseline
from eagle_train.train.lock import OutputLock
from eagle_train.train.optim import make_optimizer, peak_learning_rate
from eagle_train.train.output import claim_output_dir, lock_output_dir, resolved
from eagle_train.train.prepare import Prepared, choose_dtype, choose_rank_device, prepare
from eagle_train.train.report import MetricsLog
from eagle_train.train.resume import told_changes
from eagle_train.train.run import Run
from eagle_train.train.schedule import Schedule, data_digest
from eagle_train.train.selection import check_patience, is_out_of_patience, read_measure_prompts
from eagle_train.train.state import RunState, load_state, restore_interrupted_save
from eagle_train.train.threads import set_num_threads


def start(config: TrainConfig, ranks: Ranks, lock: OutputLock) -> Run:
    """Load everything, and the saved state under --resume. What goes wrong on one rank is raised on all.

    lock: of --output_dir, which the first rank takes.
    """
    ranks.together(lambda: lock_output_dir(config, lock), first_only=True)
    output_dir = Path(config.output_dir)
    if config.resume:
        ranks.together(lambda: restore_interrupted_save(output_dir / "state"), first_only=True)
    ranks.together(lambda: set_num_threads(config.num_threads))
    device = ranks.together(lambda: choose_rank_device(config.device, ranks.device))
    assert device is not None
    # Timed on one rank, because ranks could come to different answers.
    dtype = ranks.from_first(lambda: choose_dtype(config.dtype, device))
    prepared = ranks.together(lambda: prepare(config, device, dtype))
    assert prepared is not None
    check_patience(config, prepared)
    prompts = ranks.together(lambda: read_measure_prompts(config, prepared)) or []
    learning_rate = peak_learning_rate(config, prepared.head.config.hidden_size)
    optimizer = make_optimizer(prepared.head, config, learning_rate)
    digest = f"{data_digest(prepared.data.train_samples)}-{data_digest(prepared.data.heldout_samples)}"
    state = RunState(data_digest=digest, owes_checks=True)
    log = MetricsLog(output_dir / "metrics.jsonl", is_kept=ranks.is_first)
    if config.resume:
        state = take_over(config, ranks, prepared, optimizer, digest)
    config = resolved(config, prepared, learning_rate)
    schedule = Schedule(prepared.data.train_lengths, config, ranks.world_size, prepared.data.train_supervised)
    num_steps = schedule.total_steps(state.step, state.position, progress=ranks.is_first)
    if config.resume and state.plan_digest != schedule.digest(state.position):
        raise InputError(
            f"--resume: the plan of batches differs from that of {output_dir}; resume with the package "
            "version that it was started with, or start anew"
        )
    plan_digest = schedule.digest(state.position)
    ranks.require_agreement({"options": config.digest(), "data": digest, "plan": plan_digest})
    if config.resume:
        log.drop_after(state.step, owes_checks=state.owes_checks)
    if state.step < num_steps:  # else the record keeps the options of the steps that were done
        changes = ranks.together(lambda: told_changes(config, num_steps), first_only=True)
        ranks.together(lambda: claim_output_dir(config, lock), first_only=True)
        if changes:
            tqdm.write(changes)
    return Run(
        config=config,
        prepared=prepared,
        schedule=schedule,
        ranks=ranks,
        module=data_parallel(prepared.head, ranks),
        optimizer=optimizer,
        learning_rate=learning_rate,
        num_steps=num_steps,
        output_dir=output_dir,
        state=state,
        log=log,
        prompts=prompts,
        baseline={}
        if config.mock_data or not ranks.is_first
        else bigram_baseline(prepared.data, prepared.target.vocab_size, config.ttt_steps),
    )


def take_over(
    config: TrainConfig, ranks: Ranks, prepared: Prepared, optimizer: torch.optim.Optimizer, digest: str
) -> RunState:
    """The saved state, with its weights and moments in head and optimizer. digest: of the data. Raises
    InputError where it cannot be gone on from.
    """
    directory = Path(config.output_dir)
    state = ranks.together(lambda: load_state(directory / "state", prepared.head, optimizer))
    assert state is not None
    ranks.require_agreement({"data": digest, "saved state": f"{state.step} {state.position}"})
    if is_out_of_patience(config, state):
        raise InputError(
            f"--resume: --patience {config.patience} ended the run at step {state.step}; raise it, or "
            "give --patience none, to go on"
        )
    if state.data_digest != digest:
        raise InputError(
            f"--resume: the data differ from those of {directory}, or an earlier package version, which did "
            "not keep copies together, split them; restore them, resume with that version, or start anew"
        )
    return state
