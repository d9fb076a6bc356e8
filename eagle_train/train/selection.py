"""Which head of a run is kept, and when a run ends: by the acceptance length that is expected on held-out
data, or by the one that is measured by really decoding a few prompts.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from eagle_train.config import TrainConfig
from eagle_train.decode.chain import measure_acceptance
from eagle_train.decode.check import check_prompts
from eagle_train.decode.figures import AcceptanceFigures, acceptance_figures
from eagle_train.decode.prompts import read_prompts
from eagle_train.decode.results import Prompt, PromptResult, answer_samples
from eagle_train.errors import InputError
from eagle_train.model.checkpoint import save_draft_head
from eagle_train.model.target import FrozenTarget
from eagle_train.train.evaluate import evaluate
from eagle_train.train.prepare import Prepared, find_target, load_tokenizer
from eagle_train.train.run import Run, save, say
from eagle_train.train.state import RunState

MEASURE_BATCH_SIZE = 8


def read_measure_prompts(config: TrainConfig, prepared: Prepared) -> list[Prompt]:
    """The prompts of --measure_prompts, evenly spaced over the files and as serving would render them.

    Raises InputError for what is no prompt or does not fit the target.
    """
    if not config.measure_prompts:
        return []
    assert isinstance(prepared.target, FrozenTarget), "TrainConfig refuses --measure_prompts with mock data"
    prompts, _ = read_prompts(
        config.measure_prompts,
        load_tokenizer(find_target(config).name, config),
        template_options=config.parsed_template_options(),
        max_prompts=config.measure_max_prompts,
    )
    check_prompts(prepared.target, prompts, config.measure_max_new_tokens, flag="--measure_max_new_tokens")
    return prompts


def measure_run(run: Run) -> None:
    """Decode the run's prompts, show measured beside expected acceptance length, and keep the head where
    --select_by measured makes it the best so far.
    """
    n = run.config.ttt_steps
    mine = run.prompts[run.ranks.rank :: run.ranks.world_size]
    # Compiled functions know the planned shapes only; decoding has others at each step, and runs eager.
    with torch.compiler.set_stance("force_eager"):
        mine_measured = run.ranks.together(lambda: decode_and_walk(run, mine))
    assert mine_measured is not None
    results, steps, emitted = mine_measured
    of_all = [result for part in run.ranks.gather(results) for result in part]
    figures = acceptance_figures(of_all)
    steps, emitted = (round(value) for value in run.ranks.sum([steps, emitted]))
    expected = emitted / steps if steps else None
    looping = sum(result.is_looping for result in of_all)
    run.log.write(
        "measured",
        run.state.step,
        {
            "num_speculative_tokens": n,
            **asdict(figures),
            "expected_emitted_per_step": expected,
            "looping_answers": looping,
        },
    )
    say(run, format_measured(run.state.step, n, figures, expected, looping))
    if run.config.select_by == "measured":
        length = figures.acceptance_length
        keep_if_longest(run, length.value if length else None)


def decode_and_walk(run: Run, prompts: list[Prompt]) -> tuple[list[PromptResult], int, int]:
    """One rank's part of a measurement; more ranks than prompts leave some without any."""
    results = decode(run, prompts) if prompts else []
    return results, *(walked(run, prompts, results) if prompts else (0, 0))


def decode(run: Run, prompts: list[Prompt]) -> list[PromptResult]:
    target = run.prepared.target
    assert isinstance(target, FrozenTarget)
    return measure_acceptance(
        target,
        run.prepared.head,
        prompts,
        num_speculative_tokens=run.config.ttt_steps,
        max_new_tokens=run.config.measure_max_new_tokens,
        batch_size=MEASURE_BATCH_SIZE,
        progress=run.ranks.is_first,
    )


def walked(run: Run, prompts: list[Prompt], results: list[PromptResult]) -> tuple[int, int]:
    """Verify steps and emitted tokens that the chain walk expects on the answers that were decoded."""
    config, samples = run.config, answer_samples(prompts, results)
    metrics = evaluate(
        run.prepared.head,
        run.prepared.target,
        samples,
        ttt_steps=config.ttt_steps,
        training_seq_len=run.schedule.geometry.capacity,
        bucket_granularity=config.granularity,
        padding_free=config.padding_free,
        batch_size=config.batch_size,
        progress=False,
    )
    steps = metrics["verify_steps"][str(config.ttt_steps)]
    return steps, round(steps * (metrics["acceptance_length"][str(config.ttt_steps)] or 0))


def format_measured(
    step: int, n: int, figures: AcceptanceFigures, expected: float | None, looping: int
) -> str:
    """One line of a measurement: measured, its interval, and expected on the same answers."""
    title = f"measured at step {step}: {figures.prompts} prompts decoded, n = {n}"
    length = figures.acceptance_length
    if length is None or figures.emitted_per_step is None or expected is None:
        return f"{title}: no verify step"
    interval = "" if length.low is None else f" ({length.low:.2f} to {length.high:.2f})"
    loops = f"; {looping} of the answers loop" if looping else ""
    return (
        f"{title}: acceptance_length {length.value:.2f}{interval} measured; emitted tokens per verify step "
        f"{figures.emitted_per_step.value:.2f} measured, {expected:.2f} expected on the same answers{loops}"
    )


def select_by_validation(run: Run, metrics: Mapping[str, Any]) -> None:
    """Keep the head where --select_by expected makes it the best so far."""
    if run.config.select_by == "expected":
        keep_if_longest(run, metrics["acceptance_length"][str(run.config.ttt_steps)])


def keep_if_longest(run: Run, length: float | None) -> None:
    """Keep the head if its acceptance length is the longest so far, or count that it is not. While there was
    nothing to compare, the last head is kept.
    """
    state = run.state
    if state.step == 0:
        state.first_acceptance_length = length
    if length is not None and (state.best_acceptance_length is None or length > state.best_acceptance_length):
        keep_head(run)
        state.best_step, state.best_acceptance_length, state.checks_since_best = state.step, length, 0
        return
    if state.best_step is None:
        keep_head(run)
    state.checks_since_best += 1


def keep_head(run: Run) -> None:
    """Write the head as what the output directory offers to engines."""
    if run.state.step == 0:
        # A directory with a head and without a state could be neither resumed nor begun anew.
        save(run, owes_checks=True)
    head, target = run.prepared.head, run.prepared.target
    run.ranks.together(
        lambda: save_draft_head(head, run.output_dir, target_config=target.config, dtype=target.dtype),
        first_only=True,
    )


def forget_lost_head(run: Run) -> None:
    """Begin the comparison anew where the kept head was taken away, so that a resumed run leaves one."""
    state, files = run.state, [run.output_dir / name for name in ("config.json", "model.safetensors")]
    is_there = run.ranks.from_first(lambda: all(path.is_file() for path in files))
    if state.best_step is None or is_there:
        return
    say(
        run, f"note: the head of step {state.best_step} is no longer in {run.output_dir}; a later one is kept"
    )
    state.best_step, state.best_acceptance_length, state.checks_since_best = None, None, 0


def check_patience(config: TrainConfig, prepared: Prepared) -> None:
    """Raise InputError where --patience would count validations and nothing is held out."""
    is_idle = config.select_by == "expected" and not prepared.data.heldout_samples
    if config.patience is not None and is_idle:
        raise InputError(
            f"--patience {config.patience} does nothing, because no sample is held out of "
            f"{len(prepared.data.train_samples)}; name --eval_data, or drop --patience"
        )


def is_out_of_patience(config: TrainConfig, state: RunState) -> bool:
    """Whether --patience ends the run here."""
    return config.patience is not None and state.checks_since_best >= config.patience


def stop_reason(config: TrainConfig) -> str:
    """Why a run that is out of patience ends."""
    what = "measurement" if config.select_by == "measured" else "validation"
    return f"{config.patience} {what}{'s' * (config.patience != 1)} without a longer acceptance length"
