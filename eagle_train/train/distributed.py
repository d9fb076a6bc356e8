"""Ranks and what they say to each other. Only this module imports accelerate and torch.distributed."""

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn

from eagle_train.batch import PackedBatch, TargetFeatures
from eagle_train.errors import InputError
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.objective.losses import ChunkFunctions
from eagle_train.objective.unroll import Supervision, UnrolledSums, unrolled_sums

Value = TypeVar("Value")
# What `accelerate launch` sets where its user asks for more than data parallelism.
UNSUPPORTED_LAUNCHES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "tensor or context parallelism",
}


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that train together; the default is a process alone.

    Collective methods must be called by all ranks at the same point.
    """

    rank: int = 0
    world_size: int = 1
    accelerator: Accelerator | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank prints and writes."""
        return self.rank == 0

    @property
    def device(self) -> torch.device | None:
        """The device that the launcher gives this rank; None in a process alone."""
        return self.accelerator.device if self.accelerator else None

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over ranks, in float64, so exact for counts."""
        if self.accelerator is None:
            return [float(value) for value in values]
        total = torch.tensor(values, dtype=torch.float64, device=self.accelerator.device)
        torch.distributed.all_reduce(total)
        return total.tolist()

    def gather(self, value: Value) -> list[Value]:
        """Every rank's value, in order of rank."""
        gathered: list[Value] = gather_object([value]) if self.accelerator else [value]
        return gathered

    def from_first(self, make: Callable[[], Value]) -> Value:
        """What rank 0 makes, on every rank."""
        values: list[Any] = [make() if self.is_first else None]
        return (broadcast_object_list(values) if self.accelerator else values)[0]

    def together(self, action: Callable[[], Value], *, first_only: bool = False) -> Value | None:
        """Run on every rank, or on rank 0 alone; an InputError of any rank is raised on all, so that none
        waits for one that has given up.
        """
        result, fault = None, None
        if self.is_first or not first_only:
            try:
                result = action()
            except InputError as error:
                fault = str(error)
        faults = self.gather(fault)
        if first := next((text for text in faults if text is not None), None):
            raise InputError(first)
        return result

    def part(self) -> None:
        """All ranks are done. What holds on to the process group goes first: a group that is torn down after
        the other ranks have ended waits for them.
        """
        if self.accelerator:
            torch.distributed.barrier()
            self.accelerator.free_memory()

    def require_agreement(self, facts: Mapping[str, str]) -> None:
        """All ranks must hold the same facts (digests of data, options, plan), or they would wait for each
        other in unlike steps for ever. Raises InputError on every rank, naming what differs and where.
        """
        of_ranks = self.gather(dict(facts))
        for name in facts:
            values = [rank_facts.get(name) for rank_facts in of_ranks]
            if len(set(values)) > 1:
                odd = next(rank for rank, value in enumerate(values) if value != values[0])
                raise InputError(
                    f"rank {odd} has another {name} than rank 0 ({values[odd]} and {values[0]}); start all "
                    "ranks with the same options, data files and package versions"
                )


class UnrolledLoss(nn.Module):
    """`unrolled_sums` as a module's forward, because DistributedDataParallel wraps modules. With several
    ranks it averages gradients over them, so the loss is scaled up by their number.
    """

    def __init__(self, head: Eagle3DraftHead, world_size: int) -> None:
        super().__init__()
        self.head = head
        self.world_size = world_size

    def forward(
        self,
        embed: Callable[[Tensor], Tensor],
        target_logits_of: Callable[[Tensor], Tensor],
        batch: PackedBatch,
        supervision: Supervision,
        features: TargetFeatures,
        step_weight_K: Tensor,
        chunks: ChunkFunctions,
    ) -> UnrolledSums:
        return unrolled_sums(
            self.head,
            embed,
            target_logits_of,
            batch,
            supervision,
            features,
            step_weight_K * self.world_size,
            chunks,
        )


def join(on_cpu: bool, timeout_seconds: int) -> Ranks:
    """The ranks that a launcher started, or a process alone.

    on_cpu: ranks that compute on CPUs talk through gloo. timeout_seconds: for how long a rank waits for
    another one before it gives up.

    Raises InputError where the launcher asks for more than plain data parallelism.
    """
    for variable, name in UNSUPPORTED_LAUNCHES.items():
        if os.environ.get(variable, "").lower() in ("1", "true"):
            raise InputError(
                f"{variable} is set, but a draft head is trained data-parallel only, without {name}; use "
                "accelerate launch --multi_gpu, or torchrun"
            )
    accelerator = Accelerator(
        cpu=on_cpu,
        # Precision and compiling are options of ours, whatever the launcher says.
        mixed_precision="no",
        dynamo_backend="no",
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timedelta(seconds=timeout_seconds)),
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        ],
    )
    if accelerator.num_processes == 1:
        return Ranks()
    return Ranks(accelerator.process_index, accelerator.num_processes, accelerator)


def data_parallel(head: Eagle3DraftHead, ranks: Ranks) -> nn.Module:
    """The head's loss as a module whose backward averages gradients over the ranks."""
    module = UnrolledLoss(head, ranks.world_size)
    return ranks.accelerator.prepare_model(module) if ranks.accelerator else module


def without_sync(module: nn.Module, ranks: Ranks, *, is_last: bool) -> AbstractContextManager[Any]:
    """Around all micro-batches of an optimizer step but the last, whose backward then sums up for all."""
    if ranks.accelerator is None or is_last:
        return nullcontext()
    return ranks.accelerator.no_sync(module)


def is_rank_failure(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone: NCCL and the store have error types of their
    own, gloo raises RuntimeError with these words.
    """
    words = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL", "Timed out")
    return isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def leave() -> None:
    """End the talk between ranks; without it a rank that exits can abort one that is still leaving."""
    gc.collect()  # a wrapped module in a reference cycle would hold on to the group
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
