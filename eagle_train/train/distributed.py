"""What ranks say to each other. Only this module imports accelerate and torch.distributed."""

from collections.abc import Mapping

import torch.distributed
from accelerate import PartialState
from accelerate.utils import gather_object

from eagle_train.errors import InputError


def rank_and_world_size(on_cpu: bool) -> tuple[int, int]:
    """This process's rank and the number of ranks, (0, 1) without a launcher. on_cpu: ranks that compute on
    CPUs talk through gloo.
    """
    state = PartialState(cpu=on_cpu)
    return state.process_index, state.num_processes


def require_agreement(facts: Mapping[str, str]) -> None:
    """All ranks must hold the same facts (digests of data, options, plan), or they would wait for each other
    in unlike steps for ever. All ranks call this at the same point. Raises InputError on every rank, naming
    what differs and where.
    """
    of_ranks: list[Mapping[str, str]] = gather_object([dict(facts)])
    for name in facts:
        values = [rank_facts.get(name) for rank_facts in of_ranks]
        if len(set(values)) > 1:
            odd = next(rank for rank, value in enumerate(values) if value != values[0])
            raise InputError(
                f"rank {odd} has another {name} than rank 0 ({values[odd]} and {values[0]}); start all ranks "
                "with the same options, data files and package versions"
            )


def leave() -> None:
    """End the talk between ranks; without it a rank that exits can abort one that is still leaving."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
