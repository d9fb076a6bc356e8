"""Validation: loss and acceptance over a whole held-out split, as sums that are divided once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from eagle_train.batch import PackedBatch
from eagle_train.config import TrainConfig
from eagle_train.data.collator import BucketingCollator
from eagle_train.data.loader import PlannedBatches, planned_loader
from eagle_train.data.packing import (
    Plan,
    Shape,
    plan_batches,
    plan_multipack,
    plan_shapes,
    supervised_buckets,
)
from eagle_train.data.samples import Sample, supervised_rows
from eagle_train.errors import InputError
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.target import Target
from eagle_train.objective.acceptance import AcceptanceTotals
from eagle_train.objective.bigram import bigram_walk, fit_bigram
from eagle_train.objective.losses import PLAIN_CHUNKS, ChunkFunctions
from eagle_train.objective.sampled_walk import (
    ExpectedCounts,
    acceptance_probabilities,
    pool_expected,
    sampled_walk,
)
from eagle_train.objective.unroll import STEP_DECAY, UnrolledSums, supervise, unrolled_sums
from eagle_train.train.distributed import Ranks
from eagle_train.train.report import format_sources
from eagle_train.train.schedule import Geometry
from eagle_train.train.splits import PreparedData

WALK_LENGTHS = (3, 5)  # n at which every validation gives the acceptance length, beside n = K


def walk_lengths(ttt_steps: int) -> tuple[int, ...]:
    """The n of each reported acceptance length: 3, 5 and K, as far as K steps can tell."""
    return tuple(sorted({n for n in (*WALK_LENGTHS, ttt_steps) if n <= ttt_steps}))


def micro_batch_sums(
    head: Eagle3DraftHead,
    target: Target,
    batch: PackedBatch,
    step_weight_K: torch.Tensor,
    chunks: ChunkFunctions = PLAIN_CHUNKS,
    *,
    differentiable: bool = True,
    module: nn.Module | None = None,
) -> UnrolledSums:
    """Target features without gradients, then the unrolled sums of one micro-batch that lies on the host.

    differentiable: whether the loss can be backpropagated; module: the head's `UnrolledLoss` in
    data-parallel training.
    """
    supervision = supervise(batch.answer_remaining, len(step_weight_K)).to(target.device)
    batch = batch.to(target.device)
    features = target.features(batch)
    if module is not None:
        return module(target.embed, target.logits, batch, supervision, features, step_weight_K, chunks)
    # Compiled functions keep their gradients' graph in validation too: without, each would be compiled twice.
    with torch.set_grad_enabled(differentiable or chunks is not PLAIN_CHUNKS):
        return unrolled_sums(
            head,
            target.embed,
            target.logits,
            batch,
            supervision,
            features,
            step_weight_K,
            chunks,
            differentiable=differentiable,
        )


def supervised_counts(window: list[PackedBatch], ttt_steps: int) -> list[int]:
    """N_k over the whole window, from masks alone, before any forward."""
    return [
        sum(counts) for counts in zip(*(batch.supervised_counts(ttt_steps) for batch in window), strict=True)
    ]


def step_weights(counts_K: Sequence[float], step_decay: float) -> torch.Tensor:
    """decay^k / N_k, `[K]` float32; zero where no row is supervised."""
    return torch.tensor([step_decay**k / count if count else 0.0 for k, count in enumerate(counts_K)])


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
    chunks: ChunkFunctions = PLAIN_CHUNKS,
    supervised_sizes: Sequence[int] = (),
    ranks: Ranks | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Figures over all samples, each exactly once; see `AcceptanceTotals.metrics` for the keys.

    How samples are batched changes nothing but speed: packed rows of training_seq_len tokens, or without
    padding_free `batch_size` padded rows, for a target that cannot keep the documents of a row apart. Raises
    InputError where the loss is not finite.
    """
    ranks = ranks or Ranks()
    totals = AcceptanceTotals(ttt_steps, walk_lengths(ttt_steps))
    step_weight_K = torch.zeros(ttt_steps, device=target.device)
    plan = validation_plan(
        samples,
        training_seq_len=training_seq_len,
        bucket_granularity=bucket_granularity,
        padding_free=padding_free,
        batch_size=batch_size,
        world_size=ranks.world_size,
    )
    supervised = None
    if supervised_sizes:
        supervised = supervised_buckets(
            plan, supervised_rows(samples), supervised_sizes, padding_free=padding_free
        )
    collator = BucketingCollator(bucket_granularity, padding_free)
    loader = planned_loader(PlannedBatches(samples, plan, collator, ranks.rank, supervised))
    faulty: list[str] = []
    for batch in tqdm(
        loader, desc="validation", unit="batch", leave=False, disable=not (progress and ranks.is_first)
    ):
        sums = micro_batch_sums(head, target, batch, step_weight_K, chunks, differentiable=False)
        if not bool(sums.loss_sum.isfinite().all()):
            faulty += batch.sources
            break
        totals.add(sums, batch.answer_remaining.numpy())
    if sources := [source for of_rank in ranks.gather(faulty) for source in of_rank]:
        raise InputError(
            f"validation loss is not finite on {format_sources(sources)}; look at these samples, or try "
            "--dtype float32"
        )
    return totals.from_list(ranks.sum(totals.as_list())).metrics(step_decay)


def validation_shapes(
    samples: Sequence[Sample],
    config: TrainConfig,
    geometry: Geometry,
    supervised_sizes: Sequence[int],
) -> set[Shape]:
    """The shapes of a run's validations, for the compiler."""
    plan = validation_plan(
        samples,
        training_seq_len=geometry.capacity,
        bucket_granularity=config.granularity,
        padding_free=config.padding_free,
        batch_size=config.batch_size,
        world_size=geometry.world_size,
    )
    return plan_shapes(plan, supervised_rows(samples), supervised_sizes, padding_free=config.padding_free)


def evaluate_sampled(
    head: Eagle3DraftHead,
    target: Target,
    samples: Sequence[Sample],
    *,
    num_speculative_tokens: int,
    temperature: float,
    samples_proposal: bool,
    training_seq_len: int,
    bucket_granularity: int,
    padding_free: bool = True,
    batch_size: int = 8,
    progress: bool = True,
) -> ExpectedCounts:
    """What a decoder at this temperature is expected to have counted along these answers, which it sampled
    from the target; see objective/sampled_walk.py. Batched as in `evaluate`, eager.
    """
    plan = validation_plan(
        samples,
        training_seq_len=training_seq_len,
        bucket_granularity=bucket_granularity,
        padding_free=padding_free,
        batch_size=batch_size,
    )
    loader = planned_loader(
        PlannedBatches(samples, plan, BucketingCollator(bucket_granularity, padding_free))
    )
    walks: list[ExpectedCounts] = []
    for batch in tqdm(loader, desc="chain walk", unit="batch", leave=False, disable=not progress):
        walks += sampled_walks(
            head,
            target,
            batch,
            num_speculative_tokens,
            temperature=temperature,
            samples_proposal=samples_proposal,
        )
    return pool_expected(walks, num_speculative_tokens)


def sampled_walks(
    head: Eagle3DraftHead,
    target: Target,
    batch: PackedBatch,
    num_speculative_tokens: int,
    *,
    temperature: float,
    samples_proposal: bool,
) -> list[ExpectedCounts]:
    """`evaluate_sampled` of one batch that lies on the host, answer by answer."""
    remaining_T = batch.answer_remaining.numpy()
    supervision = supervise(batch.answer_remaining, num_speculative_tokens).to(target.device)
    batch = batch.to(target.device)
    accept_KT = acceptance_probabilities(
        head,
        target.embed,
        target.logits,
        batch,
        supervision,
        target.features(batch),
        num_speculative_tokens,
        temperature=temperature,
        samples_proposal=samples_proposal,
    )
    return sampled_walk(accept_KT.cpu().numpy(), remaining_T, num_speculative_tokens)


def validation_plan(
    samples: Sequence[Sample],
    *,
    training_seq_len: int,
    bucket_granularity: int,
    padding_free: bool = True,
    batch_size: int = 8,
    world_size: int = 1,
) -> Plan:
    """The batches of a validation, the same each time."""
    lengths = [len(sample) for sample in samples]
    if padding_free:
        capacity = max([training_seq_len, *lengths])
        return plan_multipack(lengths, capacity, world_size=world_size, granularity=bucket_granularity)
    return plan_batches(
        lengths, batch_size, world_size=world_size, granularity=bucket_granularity, padding_free=False
    )


def bigram_baseline(data: PreparedData, vocab_size: int, ttt_steps: int) -> dict[str, float | None]:
    """Acceptance length of a bigram drafter, counted on the training answers, over the held-out ones."""
    train_documents = [(s.input_ids, s.answer_remaining) for s in data.train_samples]
    heldout_documents = [(s.input_ids, s.answer_remaining) for s in data.heldout_samples]
    table = fit_bigram(train_documents, vocab_size)
    return {
        str(n): bigram_walk(table, heldout_documents, n).acceptance_length for n in walk_lengths(ttt_steps)
    }
