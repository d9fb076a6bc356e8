"""Which batches a run sees, step by step: a function of the config and the step, so that resuming reads no
data.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np
from torch.utils.data import DataLoader

from eagle_train.batch import PackedBatch
from eagle_train.config import TrainConfig
from eagle_train.data.collator import BucketingCollator, round_up
from eagle_train.data.packing import Plan, batch_shuffled, pack_best_fit
from eagle_train.data.samples import Sample


def plan_epoch(lengths: Sequence[int], config: TrainConfig, epoch: int) -> Plan:
    """The micro-batches of one epoch as sample indices; each sample stands in exactly one."""
    if config.packing == "multipack":
        return pack_best_fit(lengths, row_capacity(lengths, config), seed=config.seed, epoch=epoch)
    return batch_shuffled(len(lengths), config.batch_size, seed=config.seed, epoch=epoch)


def row_capacity(lengths: Sequence[int], config: TrainConfig) -> int:
    """Tokens of a multipack row: whole buckets that hold --tokens_per_row and the longest sample."""
    wanted = min(config.tokens_per_row or config.training_seq_len, config.training_seq_len)
    return round_up(max(wanted, max(lengths, default=0)), config.granularity)


def steps_per_epoch(plan: Plan, accumulation_steps: int) -> int:
    """Optimizer steps; the last one of an epoch may hold fewer micro-batches."""
    return -(-len(plan) // accumulation_steps)


def total_steps(samples: Sequence[Sample], config: TrainConfig) -> int:
    """--max_steps, or what --num_epochs comes to. The number of packs does not depend on the shuffle."""
    if config.max_steps is not None:
        return config.max_steps
    plan = plan_epoch([len(sample) for sample in samples], config, epoch=0)
    return config.num_epochs * steps_per_epoch(plan, config.accumulation_steps)


def planned_shapes(lengths: Sequence[int], plan: Plan, config: TrainConfig) -> Counter[str]:
    """How often each micro-batch shape occurs in a plan."""
    shapes: Counter[str] = Counter()
    for pack in plan:
        if config.is_flat:
            shapes[str(round_up(sum(lengths[i] for i in pack), config.granularity))] += 1
        else:
            shapes[f"{len(pack)}x{round_up(max(lengths[i] for i in pack), config.granularity)}"] += 1
    return shapes


def windows(
    samples: Sequence[Sample], config: TrainConfig, first_step: int, last_step: int
) -> Iterator[list[PackedBatch]]:
    """The micro-batches of optimizer steps first_step..last_step - 1, one list a step."""
    lengths = [len(sample) for sample in samples]
    collator = BucketingCollator(config.granularity, config.is_flat)
    step = 0
    for epoch in count():
        plan = plan_epoch(lengths, config, epoch)
        num_steps = steps_per_epoch(plan, config.accumulation_steps)
        skipped = min(max(first_step - step, 0), num_steps)
        step += skipped
        loader: DataLoader[PackedBatch] = DataLoader(
            samples,  # type: ignore[arg-type]
            batch_sampler=plan[skipped * config.accumulation_steps :],
            collate_fn=collator,
        )
        window: list[PackedBatch] = []
        remaining = len(plan) - skipped * config.accumulation_steps
        for batch in loader:
            window.append(batch)
            remaining -= 1
            if len(window) == config.accumulation_steps or remaining == 0:
                if step >= last_step:
                    return
                yield window
                step += 1
                window = []
        if step >= last_step:
            return


def data_digest(samples: Sequence[Sample]) -> str:
    """A digest of the samples' tokens and supervision, to notice that a resumed run reads other data."""
    digest = hashlib.sha256()
    digest.update(np.array([len(sample) for sample in samples], dtype=np.int64).tobytes())
    for sample in samples:
        digest.update(sample.input_ids.tobytes())
        digest.update(sample.answer_remaining.tobytes())
    return digest.hexdigest()[:16]
