"""A plan as something that a DataLoader reads: batches for our loop, or sample indices for any other."""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from eagle_train.batch import PackedBatch
from eagle_train.data.collator import BucketingCollator, Feature
from eagle_train.data.packing import Ints, Plan, plan_multipack
from eagle_train.errors import InputError


@dataclass(frozen=True, slots=True)
class PlannedBatches:
    """One rank's batches of a plan as a map-style dataset: item s is the batch of step s, in the buckets that
    all ranks of the step share.

    supervised_lens: int64 `[num_steps]`, of `supervised_buckets`; None: no more than the supervised rows.
    """

    samples: Sequence[Feature]
    plan: Plan
    collator: BucketingCollator
    rank: int = 0
    supervised_lens: Ints | None = None

    def __len__(self) -> int:
        return self.plan.num_steps

    def __getitem__(self, step: int) -> PackedBatch:
        if not 0 <= step < self.plan.num_steps:
            raise IndexError(step)
        pack = [self.samples[index] for index in self.plan.pack(step, self.rank)]
        supervised_len = 0 if self.supervised_lens is None else int(self.supervised_lens[step])
        return self.collator(pack, int(self.plan.bucket_lens[step]), supervised_len)


def planned_loader(
    batches: PlannedBatches, first_step: int = 0, *, num_workers: int = 0, pin_memory: bool = False
) -> "DataLoader[PackedBatch]":
    """The batches from `first_step` on, in order; nothing of earlier steps is read.

    num_workers: processes that prepare batches ahead, 0: none; pin_memory: batches in page-locked memory,
    from which copies to a GPU run beside its work.
    """
    dataset: Any = batches
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=range(first_step, len(batches)),
        num_workers=num_workers,
        pin_memory=pin_memory,
        worker_init_fn=_ignore_signals,
    )


def _ignore_signals(worker: int) -> None:
    """A terminal and a job scheduler signal every process of a job, but only the training itself knows when
    to end; a worker ends with it.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)


class MultipackSampler:
    """The multipack plan as a batch sampler: each item is one rank's sample indices of one step.

    lengths: tokens of each sample; capacity: tokens of a row, and the longest sample that fits; world_size,
    rank: from the launcher's WORLD_SIZE and RANK where not given; granularity: tokens, the collator's.
    Every rank yields equally many packs; in an epoch's last step a rank may have an empty one, which
    BucketingCollator turns into an unsupervised bucket. Nothing is dropped or repeated.

    >>> from eagle_train import MultipackSampler
    >>> sampler = MultipackSampler([5, 3, 8, 2, 6], capacity=8, world_size=1, rank=0)
    >>> sorted(sorted(pack) for pack in sampler)
    [[0, 1], [2], [3, 4]]

    A sampler hands on indices only, so a collator rounds up what its own rank holds. Where several ranks run
    compiled code, use `batches`, whose batches are in the bucket that the step's ranks share.

    Raises InputError for lengths, sizes or a rank that make no sense.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Ints,
        capacity: int,
        *,
        world_size: int | None = None,
        rank: int | None = None,
        granularity: int = 1,
        seed: int = 0,
    ) -> None:
        self.world_size = int(os.environ.get("WORLD_SIZE", 1)) if world_size is None else world_size
        self.rank = int(os.environ.get("RANK", 0)) if rank is None else rank
        for name, value, least in (
            ("capacity", capacity, 1),
            ("granularity", granularity, 1),
            ("world_size", self.world_size, 1),
            ("seed", seed, 0),
        ):
            if int(value) != value or value < least:
                raise InputError(f"{name} is {value}; it must be a whole number of at least {least}")
        if not 0 <= self.rank < self.world_size:
            raise InputError(
                f"rank is {self.rank} of {self.world_size}; it must lie between 0 and {self.world_size - 1}, "
                "or give world_size too"
            )
        self.lengths = _checked_lengths(lengths, capacity)
        self.capacity, self.granularity, self.seed = capacity, granularity, seed
        self.epoch, self.first_step, self._resumed = 0, 0, False
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Plan another epoch, from its first step. Does nothing for the epoch that `load_state_dict` has just
        gone to, so that the usual loop over epochs goes on in its middle.
        """
        if self._resumed and epoch == self.epoch:
            return
        if epoch < 0:
            raise InputError(f"epoch is {epoch}; it must be at least 0")
        self.epoch, self.first_step, self._resumed = epoch, 0, False
        self.plan = plan_multipack(
            self.lengths,
            self.capacity,
            world_size=self.world_size,
            granularity=self.granularity,
            seed=self.seed,
            epoch=epoch,
        )

    def batches(self, samples: Sequence[Feature], collator: BucketingCollator) -> "DataLoader[PackedBatch]":
        """This rank's batches of the epoch, in the buckets that all ranks of a step share."""
        loader = planned_loader(PlannedBatches(samples, self.plan, collator, self.rank), self.first_step)
        self.first_step, self._resumed = 0, False
        return loader

    def __len__(self) -> int:
        return self.plan.num_steps - self.first_step

    def __iter__(self) -> Iterator[list[int]]:
        first_step, self.first_step, self._resumed = self.first_step, 0, False
        for step in range(first_step, self.plan.num_steps):
            yield self.plan.pack(step, self.rank)

    def state_dict(self, step: int) -> dict[str, Any]:
        """Where the training stands. step: steps of the epoch that are done; the sampler cannot know it,
        because a DataLoader with workers runs ahead.
        """
        return {"epoch": self.epoch, "step": step, "digest": self.plan.digest()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at that step of that epoch; the pass after it starts at the beginning again.

        Raises InputError where the plan is another one, or the state none.
        """
        if not {"epoch", "step", "digest"} <= set(state):
            raise InputError(f"the state has the keys {sorted(state)}; it must come from state_dict")
        self._resumed = False
        self.set_epoch(state["epoch"])
        if self.plan.digest() != state["digest"]:
            raise InputError(
                "the saved plan differs from this one; lengths, capacity, world size, granularity and seed "
                "must be those of the saved run"
            )
        if not 0 <= state["step"] <= self.plan.num_steps:
            raise InputError(
                f"the state's step is {state['step']}; it must lie between 0 and {self.plan.num_steps}"
            )
        self.first_step, self._resumed = state["step"], True


def _checked_lengths(lengths: Sequence[int] | Ints, capacity: int) -> Ints:
    array = np.asarray(lengths)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise InputError(
            f"lengths are {array.dtype} of shape {array.shape}; they must be a flat list of whole numbers"
        )
    array = array.astype(np.int64)
    wrong = np.flatnonzero((array < 1) | (array > capacity))
    if len(wrong):
        raise InputError(
            f"sample {wrong[0]} has {array[wrong[0]]} tokens, but lengths must lie between 1 and the "
            f"capacity of {capacity}; cut or leave out such samples, or raise capacity"
        )
    return array
