"""PackedBatch: the one contract between data, model and objective.

A batch is one flat axis of T slots on which documents lie end to end; offsets say where each begins. The
padded tail is a document of its own that nothing supervises. With bucket_granularity 8 and documents of 6
and 5 tokens:

    slot               0 1 2 3 4 5 | 6 7 8 9 10 | 11 12 13 14 15
    document           A A A A A A | B B B B B  | padding
    position_ids       0 1 2 3 4 5 | 0 1 2 3 4  | 0  0  0  0  0
    answer_remaining   0 3 2 1 0 0 | 3 2 1 0 0  | 0  0  0  0  0
    cu_seqlens         0             6            11               16

The padded form (`num_rows` > 1) is the same axis cut into equal rows: a short document is followed by its
own padding.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """x on `device`. A host tensor goes to a GPU from page-locked memory: from any other the host would wait
    for the copy, and so for all work before it.
    """
    if x.device.type == "cpu" and torch.device(device).type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One micro-batch of one rank, built on the CPU.

    input_ids int64 `[T]`; position_ids int64 `[T]`, restarting with each document, 0 on padding;
    answer_remaining int32 `[T]`: the assistant tokens from t+1 on within that turn (see data/samples.py);
    cu_seqlens int32 `[S+1]` and offsets (the same on the host): the documents tile [0, T);
    max_seqlen: the longest document in tokens; num_tokens: slots that hold real tokens;
    num_rows: 1 when documents lie flat, B for the padded B x L form;
    supervised_len: rows that steps 1, 2, ... compute at least: one of few sizes that hold those supervised at
    step 0, the same on all ranks of a step. 0: just the supervised ones;
    sources: "file:line" of each real document, in order, for messages.
    """

    input_ids: Tensor
    position_ids: Tensor
    answer_remaining: Tensor
    cu_seqlens: Tensor
    offsets: tuple[int, ...]
    max_seqlen: int
    num_tokens: int
    num_rows: int
    sources: tuple[str, ...]
    supervised_len: int = 0

    @property
    def num_slots(self) -> int:
        """T: the slots that the model computes."""
        return len(self.input_ids)

    @property
    def bucket_len(self) -> int:
        """Padded length of a row, a multiple of the bucket granularity."""
        return self.num_slots // self.num_rows

    def supervised_counts(self, ttt_steps: int) -> list[int]:
        """Supervised rows at each step k: rows with answer_remaining >= k + 2. Reads host memory: call
        before `to`.
        """
        per_depth = torch.bincount(self.answer_remaining.clamp(max=ttt_steps + 1), minlength=ttt_steps + 2)
        at_least = per_depth.flip(0).cumsum(0).flip(0)
        return [int(count) for count in at_least[2:]]

    def to(self, device: torch.device | str) -> "PackedBatch":
        """The same batch with its tensors on `device`."""
        return self._map(lambda x: to_device(x, device))

    def pin_memory(self) -> "PackedBatch":
        """The same batch in page-locked memory; a DataLoader calls this."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "PackedBatch":
        return replace(
            self,
            input_ids=function(self.input_ids),
            position_ids=function(self.position_ids),
            answer_remaining=function(self.answer_remaining),
            cu_seqlens=function(self.cu_seqlens),
        )


@dataclass(frozen=True, slots=True)
class TargetFeatures:
    """What the draft head reads of the frozen target for one batch.

    aux_hidden_states `[T, 3H]`: the states that enter the three aux layers, low to high;
    final_hidden `[T, H]`: the state behind the final norm, which the target's head reads.
    """

    aux_hidden_states: Tensor
    final_hidden: Tensor
