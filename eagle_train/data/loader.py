"""A plan as something that a DataLoader reads: batches for our loop, or sample indices for any other."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from eagle_train.batch import PackedBatch
from eagle_train.data.collator import BucketingCollator
from eagle_train.data.packing import Ints, Plan, plan_multipack
from eagle_train.data.samples import Sample
from eagle_train.errors import InputError


@dataclass(frozen=True, slots=True)
class PlannedBatches:
    """One rank's batches of a plan as a map-style dataset: item s is the batch of step s, in the buckets that
    all ranks of the step share.

    supervised_lens: int64 `[num_steps]`, of `supervised_buckets`; None: each batch rounds up its own count.
    """

    samples: Sequence[Sample]
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


def planned_loader(batches: PlannedBatches, first_step: int = 0) -> "DataLoader[PackedBatch]":
    """The batches from `first_step` on; nothing of earlier steps is read."""
    dataset: Any = batches
    return DataLoader(dataset, batch_size=None, sampler=range(first_step, len(batches)))


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

    Raises InputError for a sample longer than the capacity, and for a rank outside the world.
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
        self.lengths, self.capacity, self.granularity, self.seed = lengths, capacity, granularity, seed
        self.world_size = int(os.environ.get("WORLD_SIZE", 1)) if world_size is None else world_size
        self.rank = int(os.environ.get("RANK", 0)) if rank is None else rank
        if not 0 <= self.rank < self.world_size:
            raise InputError(f"rank is {self.rank}; it must lie between 0 and {self.world_size - 1}")
        longest = max(lengths, default=0)
        if longest > capacity:
            raise InputError(
                f"a sample has {longest} tokens, but capacity is {capacity}; cut or leave out such samples, "
                "or raise capacity"
            )
        self.first_step = 0
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Plan another epoch, from its first step."""
        self.epoch, self.first_step = epoch, 0
        self.plan = plan_multipack(
            self.lengths,
            self.capacity,
            world_size=self.world_size,
            granularity=self.granularity,
            seed=self.seed,
            epoch=epoch,
        )

    def __len__(self) -> int:
        return self.plan.num_steps - self.first_step

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.first_step, self.plan.num_steps):
            yield self.plan.pack(step, self.rank)

    def state_dict(self, step: int) -> dict[str, Any]:
        """Where the training stands. step: steps of the epoch that are done; the sampler cannot know it,
        because a DataLoader with workers runs ahead.
        """
        return {"epoch": self.epoch, "step": step, "digest": self.plan.digest()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at that step of that epoch. Raises InputError where the plan is another one."""
        self.set_epoch(state["epoch"])
        if self.plan.digest() != state["digest"]:
            raise InputError(
                "the saved plan differs from this one; lengths, capacity, world size, granularity and seed "
                "must be those of the saved run"
            )
        self.first_step = state["step"]
