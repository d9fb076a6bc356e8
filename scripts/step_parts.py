"""The parts of a training step, wrapped from outside: what bench_step.py times and profile_step.py marks.

A part is one function of the package, replaced for as long as `wrapped_parts` is open. Its backward is found
by two identities, one around its inputs and one around its outputs: autograd runs nodes in the reverse order
of their making, so what runs between the two is the part's own backward. Parameters are not wrapped, so they
stay leaves, and compiled functions see inputs of the same kind as without.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from eagle_train.objective import unroll
from eagle_train.train.loop import Run

TARGET, ATTENTION, HEAD = "target forward", "attention", "projections, MLP, fc"
LABELS, LOSS, OPTIMIZER = "vocabulary labels", "vocabulary loss", "optimizer"
DATA, OTHER = "data", "other"
PARTS = (TARGET, ATTENTION, HEAD, LABELS, LOSS, OPTIMIZER, DATA, OTHER)

Wrap = Callable[[str, Callable[..., Any]], Callable[..., Any]]


@contextmanager
def wrapped_parts(run: Run, wrap: Wrap) -> Iterator[None]:
    """While open, each part's function is wrap(part, function)."""
    head, target = run.prepared.head, run.prepared.target
    places = [
        (target, "features", TARGET),
        (head, "fuse", HEAD),
        (head, "project", HEAD),
        (head, "finish", HEAD),
        (unroll, "target_labels", LABELS),
        (unroll, "vocabulary_loss", LOSS),
        (torch.nn.utils, "clip_grad_norm_", OPTIMIZER),
        (run.optimizer, "step", OPTIMIZER),
        (run.optimizer, "zero_grad", OPTIMIZER),
    ]
    # `unroll_states` bound its attention when it was defined.
    attend = wrap(ATTENTION, unroll.unrolled_attention)
    with ExitStack() as stack:
        for owner, name, part in places:
            stack.enter_context(patch.object(owner, name, wrap(part, getattr(owner, name))))
        stack.enter_context(
            patch.object(unroll, "unroll_states", partial(unroll.unroll_states, attention=attend))
        )
        yield


class Clock:
    """Gives all time between `start` and `stop` to one part after another.

    On CUDA the stamps are events on the current stream, so nothing waits for the device before `stop`.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.running = False
        self.part = OTHER
        self.stamps: list[tuple[str, Any]] = []

    def start(self) -> None:
        self.running, self.part = True, OTHER
        self.stamps = [("", self._now())]

    def switch(self, part: str) -> None:
        """What runs from now on belongs to `part`."""
        if self.running:
            self.stamps.append((self.part, self._now()))
        self.part = part

    def stop(self) -> dict[str, float]:
        """Seconds of each part."""
        self.switch(OTHER)
        self.running = False
        if self.on_cuda:
            torch.cuda.synchronize()
        seconds: dict[str, float] = defaultdict(float)
        for (_, before), (part, after) in zip(self.stamps, self.stamps[1:], strict=False):
            seconds[part] += before.elapsed_time(after) / 1e3 if self.on_cuda else after - before
        return dict(seconds)

    def _now(self) -> Any:
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its forward and its backward given to `part`."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            before = self.part
            self.switch(part)
            # Behind the part's backward comes what was made before it.
            args = mark(args, lambda: self.switch(OTHER))
            result = mark(function(*args, **kwargs), lambda: self.switch(part))
            self.switch(before)
            return result

        return call


def mark(values: Any, in_backward: Callable[[], None]) -> Any:
    """values, with `in_backward` called when autograd passes them; other than tensors and tuples as it is."""
    tensors: list[Tensor] = []

    def collect(value: Any) -> None:
        if type(value) is tuple:
            for part in value:
                collect(part)
        elif isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
            tensors.append(value)

    collect(values)
    if not tensors:
        return values
    marked = dict(zip(map(id, tensors), _Mark.apply(in_backward, *tensors), strict=True))

    def replaced(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(replaced(part) for part in value)
        return marked.get(id(value), value)

    return replaced(values)


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, in_backward: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.in_backward = in_backward
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        ctx.in_backward()
        return None, *grads
