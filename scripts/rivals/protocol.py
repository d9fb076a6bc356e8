"""How bench_rivals.py talks with the program that trains: one process a trainer, a line a step.

Needs the standard library and torch only, because it runs in the rivals' environments too.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Step = Callable[[list[dict[str, Any]]], float]
MARK = "@@ "  # begins each line that is an answer, as libraries print on their own


def serve(setup: Callable[[dict[str, Any]], Step]) -> None:
    """Read the job named by the first argument, set up, then do a step for each line of sample numbers.

    A step gets its samples, each {"input_ids", "loss_mask"}, and returns its loss.
    """
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["num_threads"])
    torch.manual_seed(0)
    step = setup(job)
    answer({"torch": torch.__version__})
    for line in sys.stdin:
        samples = [job["samples"][index] for index in json.loads(line)]
        cpu, wall = time.process_time(), time.perf_counter()
        loss = step(samples)
        answer(
            {
                "cpu_seconds": time.process_time() - cpu,
                "wall_seconds": time.perf_counter() - wall,
                "loss": loss,
                "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        )


def answer(values: dict[str, Any]) -> None:
    print(MARK + json.dumps(values), flush=True)


def optimizer_step(loss: torch.Tensor, parameters: list[torch.Tensor], optimizer: Any) -> float:
    """Backward, clipping and AdamW: the same for the rivals, which leave it to a trainer."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())
