"""Validation: loss and acceptance over a whole held-out split, as sums that are divided once."""

from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from eagle_train.batch import PackedBatch
from eagle_train.data.collator import BucketingCollator
from eagle_train.data.loader import PlannedBatches, planned_loader
from eagle_train.data.packing import plan_batches, plan_multipack
from eagle_train.data.samples import Sample
from eagle_train.errors import InputError
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.target import Target
from eagle_train.objective.acceptance import AcceptanceTotals
from eagle_train.objective.unroll import STEP_DECAY, UnrolledSums, supervise, unrolled_sums
from eagle_train.train.report import format_sources

WALK_LENGTHS = (3, 5)  # n at which every validation gives the acceptance length, beside n = K


def walk_lengths(ttt_steps: int) -> tuple[int, ...]:
    """The n of each reported acceptance length: 3, 5 and K, as far as K steps can tell."""
    return tuple(sorted({n for n in (*WALK_LENGTHS, ttt_steps) if n <= ttt_steps}))


def micro_batch_sums(
    head: Eagle3DraftHead, target: Target, batch: PackedBatch, step_weight_K: torch.Tensor
) -> UnrolledSums:
    """Target features without gradients, then the unrolled sums of one micro-batch that lies on the host."""
    supervision = supervise(batch.answer_remaining, len(step_weight_K)).to(target.device)
    batch = batch.to(target.device)
    features = target.features(batch)
    return unrolled_sums(head, target.embed, target.logits, batch, supervision, features, step_weight_K)


@torch.no_grad()
def evaluate(
    head: Eagle3DraftHead,
    target: Target,
    samples: Sequence[Sample],
    *,
    ttt_steps: int,
    training_seq_len: int,
    bucket_granularity: int,
    padding_free: bool = True,
    batch_size: int = 8,
    step_decay: float = STEP_DECAY,
    progress: bool = True,
) -> dict[str, Any]:
    """Figures over all samples, each exactly once; see `AcceptanceTotals.metrics` for the keys.

    How samples are batched changes nothing but speed: packed rows of training_seq_len tokens, or without
    padding_free `batch_size` padded rows, for a target that cannot keep the documents of a row apart. Raises
    InputError where the loss is not finite.
    """
    totals = AcceptanceTotals(ttt_steps, walk_lengths(ttt_steps))
    step_weight_K = torch.zeros(ttt_steps, device=target.device)
    lengths = [len(sample) for sample in samples]
    if padding_free:
        plan = plan_multipack(lengths, max([training_seq_len, *lengths]), granularity=bucket_granularity)
    else:
        plan = plan_batches(lengths, batch_size, granularity=bucket_granularity, padding_free=False)
    collator = BucketingCollator(bucket_granularity, padding_free)
    loader = planned_loader(PlannedBatches(samples, plan, collator))
    for batch in tqdm(loader, desc="validation", unit="batch", leave=False, disable=not progress):
        sums = micro_batch_sums(head, target, batch, step_weight_K)
        if not bool(sums.loss_sum.isfinite().all()):
            raise InputError(
                f"validation loss is not finite on {format_sources(batch.sources)}; look at these samples, "
                "or try --dtype float32"
            )
        totals.add(sums, batch.answer_remaining.numpy())
    return totals.metrics(step_decay)
