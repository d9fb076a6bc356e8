"""Which batches a run sees: a function of the lengths, the options, the number of ranks and the position, so
that every rank makes it alone and resuming reads no data.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from tqdm import tqdm

from eagle_train.batch import PackedBatch
from eagle_train.config import TrainConfig
from eagle_train.data.collator import BucketingCollator, round_up
from eagle_train.data.loader import PlannedBatches, planned_loader
from eagle_train.data.mock import MockSamples
from eagle_train.data.packing import (
    Ints,
    Plan,
    Shape,
    choose_sizes,
    plan_batches,
    plan_multipack,
    plan_shapes,
    supervised_buckets,
    supervised_counts,
)
from eagle_train.data.packing_baselines import plan_multipack_v1, plan_multipack_v2, plan_next_fit
from eagle_train.data.plan_figures import step_imbalance
from eagle_train.data.samples import Sample
from eagle_train.errors import InputError

ROW_PLANNERS = {
    "multipack": plan_multipack,
    "multipack_v1": plan_multipack_v1,
    "multipack_v2": plan_multipack_v2,
    "next_fit": plan_next_fit,
}

KEPT_PLANS = 16  # of epochs; one of a million samples has about 10 MB


@dataclass(frozen=True, slots=True)
class Geometry:
    """How large batches are. capacity: tokens of a packed row; accumulation_steps: micro-batches of one rank
    in an optimizer step; translation: how that came from --tokens_per_step or --effective_batch_size.
    """

    world_size: int
    capacity: int
    accumulation_steps: int
    translation: str = ""


def batch_geometry(lengths: Ints, config: TrainConfig, world_size: int) -> Geometry:
    """Rows are whole buckets that hold --tokens_per_row and the longest sample; the global batch is the
    nearest to what was asked for that such rows, or unpacked micro-batches, come to.
    """
    longest = round_up(int(lengths.max(initial=1)), config.granularity)
    row_limit = round_up(config.tokens_per_row or config.training_seq_len, config.granularity)
    row_limit = max(min(row_limit, config.training_seq_len), longest)
    mean = float(lengths.mean()) if len(lengths) else 1.0
    if config.tokens_per_step is None and config.effective_batch_size is None:
        return Geometry(world_size, row_limit, config.accumulation_steps or 1)
    if config.packing == "none":
        wanted = config.effective_batch_size or config.tokens_per_step / mean  # type: ignore[operator]
        micro_batch = config.batch_size * world_size
        accumulation, capacity = max(round(wanted / micro_batch), 1), row_limit
        accumulation = min(accumulation, max(-(-len(lengths) // micro_batch), 1))
        step = micro_batch * accumulation
        came_to = (
            f"{config.batch_size} samples x {world_size} ranks x {accumulation:,} micro-batches = {step:,} "
            f"samples, about {step * mean:,.0f} tokens, a step"
        )
        smallest = f"--batch_size is {config.batch_size}"
    else:
        wanted = config.tokens_per_step or config.effective_batch_size * mean  # type: ignore[operator]
        shortest = row_limit if config.tokens_per_row else longest
        accumulation, capacity = _nearest_rows(wanted / world_size, shortest, row_limit, config.granularity)
        # An epoch needs somewhat more rows than it has tokens for; twice as many are certainly enough.
        in_epoch = -(-int(lengths.sum()) // (capacity * world_size))
        accumulation = min(accumulation, 2 * max(in_epoch, 1))
        step = capacity * world_size * accumulation
        came_to = (
            f"{capacity:,} slots x {world_size} ranks x {accumulation:,} micro-batches = {step:,} slots, "
            f"about {step / mean:,.0f} samples, a step"
        )
        smallest = f"the longest sample has {int(lengths.max(initial=0)):,} tokens"
    if step > 1.5 * wanted:
        came_to += f"; no less, because {smallest}"
    elif step < wanted / 1.5:
        came_to += ": the whole epoch"
    asked = "tokens_per_step" if config.tokens_per_step else "effective_batch_size"
    return Geometry(world_size, capacity, accumulation, f"--{asked} {getattr(config, asked):,} -> {came_to}")


def _nearest_rows(tokens: float, shortest: int, longest: int, granularity: int) -> tuple[int, int]:
    """As few rows of `shortest` to `longest` slots as come nearest to a number of tokens: (rows, slots)."""
    fewest = max(int(tokens // longest), 1)
    choices = []
    for rows in (fewest, fewest + 1):
        nearest = round(tokens / rows / granularity) * granularity
        slots = min(max(nearest, shortest), longest)
        choices.append((abs(rows * slots - tokens), rows, slots))
    return min(choices)[1:]


@dataclass(frozen=True, slots=True)
class Segment:
    """Plan steps of one epoch that were done under one number of ranks and one row size."""

    world_size: int
    capacity: int
    steps: int


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run is in its data: whole epochs, and the segments of the epoch that it is in."""

    epoch: int = 0
    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True)
class Window:
    """One optimizer step of this rank. position: behind it; imbalance: of tokens over ranks, max / mean;
    steps_per_epoch: optimizer steps of a whole epoch under the present number of ranks.
    """

    batches: list[PackedBatch]
    position: Position
    imbalance: float
    steps_per_epoch: int


class Schedule:
    """The plans of a run's epochs.

    Where a run goes on with another number of ranks, the samples that the epoch's earlier segments used are
    found by making their plans again, and what is left is planned anew: each sample stays once an epoch.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Ints,
        config: TrainConfig,
        world_size: int,
        supervised_rows: Ints | None = None,
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.supervised_rows = np.zeros_like(self.lengths) if supervised_rows is None else supervised_rows
        self.config = config
        self.supervised_sizes: tuple[int, ...] = ()  # chosen where the head is compiled
        self.geometry = batch_geometry(self.lengths, config, world_size)
        # Kept, because planning a million samples takes seconds, and steps, shapes and windows each ask.
        self._segment_plan = lru_cache(maxsize=KEPT_PLANS)(self._make_segment_plan)

    def plan(self, epoch: int = 0, earlier: tuple[Segment, ...] = ()) -> Plan:
        """What is left of an epoch behind some segments; without any, the whole epoch.

        Raises InputError where a planner that drops the tail of an epoch drops everything.
        """
        plan = self.epoch_plan(epoch, earlier)
        if not plan.num_steps and not earlier:
            raise InputError(
                f"--packing {self.config.packing} drops all {len(self.lengths)} samples, because they do not "
                f"fill one step of {self.geometry.world_size} ranks; use --packing multipack"
            )
        return plan

    def epoch_plan(self, epoch: int, earlier: tuple[Segment, ...] = ()) -> Plan:
        """As `plan`, even if it is empty."""
        return self._segment_plan(epoch, earlier, self.geometry.world_size, self.geometry.capacity)

    def digest(self, position: Position) -> str:
        """Of the plan that led to a position; another one means other data, options or ranks."""
        if not position.segments:
            return self.plan(position.epoch).digest()
        *earlier, last = position.segments
        return self._segment_plan(position.epoch, tuple(earlier), last.world_size, last.capacity).digest()

    def _make_segment_plan(
        self, epoch: int, earlier: tuple[Segment, ...], world_size: int, capacity: int
    ) -> Plan:
        left = np.arange(len(self.lengths))
        for segment in earlier:
            plan = self._plan_of(left, epoch, segment.world_size, segment.capacity)
            used = plan.samples[: plan.offsets[segment.steps * segment.world_size]]
            left = np.setdiff1d(left, used, assume_unique=True)
        return self._plan_of(left, epoch, world_size, capacity)

    def _plan_of(self, samples: Ints, epoch: int, world_size: int, capacity: int) -> Plan:
        lengths, config = self.lengths[samples], self.config
        if config.packing == "none":
            plan = plan_batches(
                lengths,
                config.batch_size,
                world_size=world_size,
                granularity=config.granularity,
                padding_free=config.padding_free,
                seed=config.seed,
                epoch=epoch,
            )
        else:
            plan = ROW_PLANNERS[config.packing](
                lengths,
                capacity,
                world_size=world_size,
                granularity=config.granularity,
                seed=config.seed,
                epoch=epoch,
            )
        return replace(plan, samples=samples[plan.samples])

    def _open(self, position: Position) -> tuple[tuple[Segment, ...], int]:
        """The segments before the present one, and the plan steps of the present one that are done."""
        *earlier, last = position.segments or (Segment(0, 0, 0),)
        if (last.world_size, last.capacity) == (self.geometry.world_size, self.geometry.capacity):
            return tuple(earlier), last.steps
        return position.segments, 0

    def optimizer_steps(self, plan_steps: int) -> int:
        """The last one of an epoch may hold fewer micro-batches."""
        return -(-plan_steps // self.geometry.accumulation_steps)

    def total_steps(self, step: int, position: Position, *, progress: bool = True) -> int:
        """--max_steps, or the steps done and what is left of --num_epochs. Epochs differ by a step or so,
        so each is planned.
        """
        if self.config.max_steps is not None:
            return self.config.max_steps
        epochs = range(position.epoch + 1, self.config.num_epochs)
        for epoch in tqdm(
            epochs, desc="planning epochs", unit="epoch", delay=2, leave=False, disable=not progress
        ):
            step += self.optimizer_steps(self.plan(epoch).num_steps)
        if position.epoch < self.config.num_epochs:
            earlier, done = self._open(position)
            step += self.optimizer_steps(self.plan(position.epoch, earlier).num_steps - done)
        return step

    def choose_supervised_sizes(self) -> None:
        """Few sizes to which later TTT steps round up, the best for the first epoch's plan."""
        counts = supervised_counts(self.plan(), self.supervised_rows)
        self.supervised_sizes = tuple(choose_sizes(counts))

    def _supervised_lens(self, plan: Plan) -> Ints | None:
        if not self.supervised_sizes:
            return None
        return supervised_buckets(
            plan, self.supervised_rows, self.supervised_sizes, padding_free=self.config.padding_free
        )

    def shapes(self, position: Position, step: int, num_steps: int) -> set[Shape]:
        """Shapes of all batches that are still to come, for the compiler."""
        earlier, done = self._open(position)
        epoch, shapes = position.epoch, set[Shape]()
        while step < num_steps:
            plan = self.plan(epoch, earlier)
            shapes |= plan_shapes(
                plan,
                self.supervised_rows,
                self.supervised_sizes,
                padding_free=self.config.padding_free,
            )
            step += self.optimizer_steps(plan.num_steps - done)
            epoch, earlier, done = epoch + 1, (), 0
        return shapes

    def windows(
        self,
        samples: Sequence[Sample],
        rank: int,
        position: Position,
        num_steps: int,
        *,
        to_gpu: bool = False,
    ) -> Iterator[Window]:
        """The next `num_steps` optimizer steps of one rank, from `position` on. to_gpu: batches are prepared
        for a copy to a GPU, and by default in a process beside the training.
        """
        num_workers = int(to_gpu) if self.config.num_workers is None else self.config.num_workers
        collator = BucketingCollator(self.config.granularity, self.config.padding_free)
        epoch = position.epoch
        earlier, done = self._open(position)
        while num_steps > 0:
            plan = self.plan(epoch, earlier)
            imbalance = step_imbalance(plan, self.lengths)
            whole = self.epoch_plan(epoch).num_steps if earlier else plan.num_steps
            per_epoch = self.optimizer_steps(whole)
            batches: list[PackedBatch] = []
            planned = PlannedBatches(samples, plan, collator, rank, self._supervised_lens(plan))
            for batch in planned_loader(planned, done, num_workers=num_workers, pin_memory=to_gpu):
                batches.append(batch)
                done += 1
                if len(batches) < self.geometry.accumulation_steps and done < plan.num_steps:
                    continue
                segment = Segment(self.geometry.world_size, self.geometry.capacity, done)
                behind = Position(epoch, (*earlier, segment))
                skew = float(imbalance[done - len(batches) : done].mean())
                yield Window(batches, behind, skew, per_epoch)
                batches, num_steps = [], num_steps - 1
                if num_steps == 0:
                    return
            epoch, earlier, done = epoch + 1, (), 0


def data_digest(samples: Sequence[Sample]) -> str:
    """A digest of the samples' tokens and supervision, to notice that a resumed run reads other data."""
    if isinstance(samples, MockSamples):
        return samples.digest
    digest = hashlib.sha256()
    digest.update(np.array([len(sample) for sample in samples], dtype=np.int64).tobytes())
    for sample in tqdm(samples, desc="digest data", unit=" samples", delay=3, leave=False):
        digest.update(sample.input_ids.tobytes())
        digest.update(sample.answer_remaining.tobytes())
    return digest.hexdigest()[:16]
