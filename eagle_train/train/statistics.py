"""Speed of a run: moving averages for what is shown now, totals for the summary. Both are saved with the
state, so that a resumed run goes on reporting what the uninterrupted one would have.
"""

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from eagle_train.batch import PackedBatch

COUNTS = ("samples", "tokens", "supervised_tokens", "slots")


@dataclass(slots=True)
class Statistics:
    """Counts and seconds of optimizer steps, over all ranks.

    averages: exponential moving averages that start at zero; weight: what the steps in them weigh together,
    1 - alpha^updates while alpha stays the same. Divided by it they are unbiased (Kingma and Ba 2015, section
    3). Updates are counted and not steps, because steps that compiled are left out.
    totals: sums over all steps, compiled ones too.
    """

    updates: int = 0
    weight: float = 0.0
    averages: dict[str, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)

    def add(
        self,
        counts: dict[str, int],
        *,
        seconds: float,
        data_seconds: float,
        alpha: float,
        compiled: bool = False,
    ) -> None:
        """One optimizer step. seconds: of the whole step, waiting for data included; data_seconds: of that
        wait; alpha: weight of the past, 0..1; compiled: the step compiled something, so its time says
        nothing about the next.
        """
        step = counts | {"seconds": seconds, "data_seconds": data_seconds}
        for name, value in step.items():
            self.totals[name] = self.totals.get(name, 0) + value
        if compiled:
            return
        self.updates += 1
        self.weight = alpha * self.weight + (1 - alpha)
        for name, value in step.items():
            self.averages[name] = alpha * self.averages.get(name, 0.0) + (1 - alpha) * value

    def rates(self, steps_per_epoch: int) -> Mapping[str, float | None]:
        """What a log line says. Averages divide averages, so long steps weigh as much as they last; None
        before the first step that counts.
        """
        seconds = self.averages.get("seconds", 0.0)
        named = [f"{name}_per_second" for name in COUNTS]
        if not seconds:
            return dict.fromkeys([*named, "step_seconds", "epoch_seconds", "data_wait_share"])
        step_seconds = seconds / self.weight
        return {f"{name}_per_second": self.averages[name] / seconds for name in COUNTS} | {
            "step_seconds": step_seconds,
            "epoch_seconds": step_seconds * steps_per_epoch,
            "data_wait_share": self.averages["data_seconds"] / seconds,
        }

    def overall(self) -> dict[str, float]:
        """The same rates over the whole run, for the summary."""
        seconds = max(self.totals.get("seconds", 0.0), 1e-9)
        rates = {f"{name}_per_second": self.totals.get(name, 0) / seconds for name in COUNTS}
        slots = self.totals.get("slots", 0)
        return rates | {
            "fill": self.totals.get("tokens", 0) / slots if slots else 0.0,
            "data_wait_share": self.totals.get("data_seconds", 0.0) / seconds,
        }


def batch_counts(batches: Sequence[PackedBatch]) -> dict[str, int]:
    """What one rank's micro-batches hold, under the names of COUNTS; supervised: at TTT step 0."""
    return {
        "samples": sum(len(batch.sources) for batch in batches),
        "tokens": sum(batch.num_tokens for batch in batches),
        "supervised_tokens": sum(batch.supervised_counts(1)[0] for batch in batches),
        "slots": sum(batch.num_slots for batch in batches),
    }


def peak_memory_gib(device: torch.device) -> float:
    """The most memory that was in use so far: of the GPU, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
