"""A trace of a few training steps that opens in Perfetto (https://ui.perfetto.dev) or chrome://tracing.

    python scripts/profile_step.py --target DIR --draft_vocab_size 8192 --trace step_trace.json
    python scripts/profile_step.py --mock_target 4096,32,128256 --compiled --device cuda

Any other flag is one of training's; the batch is that of bench_step.py. Beside PyTorch's operators (and CUDA
kernels) the trace has ranges for the batch, the target, each draft step's projections and attention, the
vocabulary's labels and loss, the backward and the optimizer. They are put around the package's functions
from here.
"""

import argparse
import os
from collections.abc import Callable
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from bench_step import open_run
from step_parts import ATTENTION, DATA, HEAD, wrapped_parts
from torch.profiler import ProfilerActivity, profile, record_function
from tqdm import tqdm

from eagle_train.errors import InputError
from eagle_train.train.loop import Run, train_step
from eagle_train.train.schedule import Position


def main() -> None:
    args, flags = parse_args()
    try:
        with open_run(flags, compiled=args.compiled) as run:
            write_trace(run, args.steps, args.trace)
    except InputError as error:
        raise SystemExit(f"error: {error}") from error
    size_mib = args.trace.stat().st_size / 2**20
    print(f"{args.trace}: {args.steps} steps, {size_mib:,.1f} MiB; open it in https://ui.perfetto.dev")


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=2, help="steps in the trace, behind two of warm-up")
    parser.add_argument("--compiled", action="store_true", help="as under --torch_compile; else eager")
    parser.add_argument("--trace", type=Path, default=Path("step_trace.json"), metavar="FILE")
    args, flags = parser.parse_known_args()
    if args.steps < 1:
        parser.error(f"--steps is {args.steps}; it must be at least 1")
    return args, flags


def write_trace(run: Run, steps: int, path: Path) -> None:
    """Two steps of warm-up, then `steps` under the profiler."""
    on_cuda = run.prepared.target.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    windows = run.schedule.windows(run.prepared.data.train_samples, 0, Position(), steps + 2)
    for _ in range(2):
        train_step(run, next(windows).batches)
    backward = named("backward", torch.Tensor.backward)
    with (
        wrapped_parts(run, ranges()),
        patch.object(torch.Tensor, "backward", backward),
        profile(activities=activities) as profiler,
    ):
        for index in tqdm(range(steps), desc="traced", unit="step", leave=False):
            with record_function(f"step {index}"):
                with record_function(DATA):
                    batches = next(windows).batches
                train_step(run, batches)
            if on_cuda:
                torch.cuda.synchronize()
    temporary = path.with_name(f"{path.name}.part.json")  # the exporter compresses by the name's ending
    profiler.export_chrome_trace(str(temporary))
    os.replace(temporary, path)


def ranges() -> Callable[[str, Callable[..., Any]], Callable[..., Any]]:
    """A wrapper for `wrapped_parts`: draft steps carry their number, counted from the step's `fuse`."""
    draft_steps = count()

    def wrap(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal draft_steps, label
            name = getattr(function, "__name__", "")
            if part == HEAD and name == "fuse":
                draft_steps, label = count(), "fc"
            elif part == HEAD and name == "project":
                label = f"draft step {next(draft_steps)}"
            in_step = part in (HEAD, ATTENTION)
            with record_function(f"{label}: {name if part == HEAD else part}" if in_step else part):
                return function(*args, **kwargs)

        return call

    label = ""
    return wrap


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return call


if __name__ == "__main__":
    main()
