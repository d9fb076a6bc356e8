"""What a user should know about a run before it starts: options without effect, and answers that are hardly
the target's own.
"""

import os

from eagle_train.config import TrainConfig
from eagle_train.train.schedule import Schedule, batch_geometry
from eagle_train.train.splits import PreparedData

# Measured for SmolLM2-135M: 98 % of its greedy answers' tokens, 77 % of those sampled at temperature 0.7 and
# 53 % at temperature 1; of other writers' 67 % (arithmetic in a set form) and 44 % (open questions).
FEW_OWN_TOKENS = 0.5


def option_notes(config: TrainConfig, data: PreparedData) -> list[str]:
    """A line for each option that changes nothing, or less than it asks for, and why."""
    notes = []
    if config.max_steps is not None and config.num_epochs != TrainConfig.num_epochs:
        notes.append(
            f"--num_epochs {config.num_epochs} has no effect, because --max_steps {config.max_steps} says "
            "how long the run is; drop one"
        )
    if data.heldout_report is not None and config.eval_fraction != TrainConfig.eval_fraction:
        source = "--eval_data names the held-out data" if config.eval_data else "the demo has held-out data"
        notes.append(
            f"--eval_fraction {config.eval_fraction:g} has no effect, because {source}; it is the share that "
            "is held out of --data where no --eval_data is named"
        )
    return [*notes, *_row_notes(config, data), *_accumulation_notes(config, data)]


def _row_notes(config: TrainConfig, data: PreparedData) -> list[str]:
    """What --tokens_per_row comes to, where that is not what it asks for."""
    asked, sizes_steps = config.tokens_per_row, config.tokens_per_step or config.effective_batch_size
    if asked is None or sizes_steps:  # the latter fit rows to the step, and say so
        return []
    capacity = batch_geometry(data.train_lengths, config, 1).capacity
    if asked == capacity:
        return []
    why = f"rows are whole buckets of {config.granularity:,} tokens"
    if asked > config.training_seq_len:
        why = f"--training_seq_len {config.training_seq_len:,} is the capacity of a row"
    elif capacity - asked >= config.granularity:
        why = f"a row holds the longest sample, of {int(data.train_lengths.max()):,} tokens, in whole buckets"
    return [f"--tokens_per_row {asked:,}: rows are filled to {capacity:,} tokens, because {why}"]


def _accumulation_notes(config: TrainConfig, data: PreparedData) -> list[str]:
    """A step ends with its epoch, so an epoch may hold fewer micro-batches than a step asks for."""
    asked, lengths = config.accumulation_steps, data.train_lengths
    if asked is None:
        return []
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    schedule = Schedule(lengths, config, world_size)
    fewest = len(lengths) // (config.batch_size * world_size)
    if config.packing != "none":
        fewest = int(lengths.sum()) // (schedule.geometry.capacity * world_size)
    if asked <= fewest:  # certainly met, so no plan is made for it
        return []
    in_epoch = schedule.epoch_plan(0).num_steps
    if asked <= in_epoch:
        return []
    return [
        f"--accumulation_steps {asked:,}: an epoch has {in_epoch:,} micro-batches and a step ends with its "
        "epoch, so each epoch is one step"
    ]


def own_token_notes(share: float) -> list[str]:
    """A line where most of the answers' tokens are not what the target itself would write. share: 0..1."""
    if share >= FEW_OWN_TOKENS:
        return []
    return [
        f"only {share:.1%} of the first answers' tokens are the target's own arg-max, as of another writer's "
        "answers, and what the head learns from them is not what it will draft; regenerate them: let the "
        "target answer the same prompts, with the same chat template, and train on its answers (sampled at "
        "temperature 1 and above they may stay below half, and are right all the same)"
    ]
