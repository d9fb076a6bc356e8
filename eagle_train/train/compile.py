"""torch.compile around the draft head and the vocabulary work, with every shape known before step 1.

What is compiled: a draft step's two halves around attention (`project`, `finish`), `fuse`, and the chunk
functions of the loss. The halves see as many rows as a row's bucket has, or as the size to which its
supervised rows are rounded up; the chunk functions see one shape. Attention stays outside: the number of
documents, the longest document and the TTT step never enter a graph. So there are two graphs for each length
in use and one more for each row length, whatever K is.

Every compiled function is a full graph, so nothing falls back to eager without an error; `Compiled.counts`
reads Dynamo's own counters.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters
from tqdm import tqdm

from eagle_train.batch import PackedBatch
from eagle_train.data.collator import BucketingCollator
from eagle_train.data.packing import Shape
from eagle_train.data.samples import Sample, answer_remaining_from_spans
from eagle_train.errors import InputError
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.target import Target
from eagle_train.objective.losses import ChunkFunctions, gradient_chunk, label_chunk, statistics_chunk
from eagle_train.train.evaluate import micro_batch_sums

HEAD_FUNCTIONS = ("fuse", "project", "finish")
MOST_LENGTHS = 24  # that are compiled without being asked for: each takes seconds
MOST_SHAPES_SHOWN = 6  # one by one
NO_LIMIT = 2**31 - 1  # of graphs


def why_not_compiled(device: torch.device, shapes: Iterable[Shape], *, asked_for: bool) -> str | None:
    """What speaks against compiling for these shapes on this device, with the remedy; None: nothing.

    Raises InputError where compiling was asked for and there is no compiler.
    """
    lengths = {length for shape in shapes for length in (shape.num_slots, shape.supervised_len)}
    if len(lengths) > MOST_LENGTHS and not asked_for:
        return (
            f"{len(lengths)} lengths would be compiled, more than {MOST_LENGTHS}; raise "
            "--bucket_granularity, or ask for it with --torch_compile"
        )
    fault = compiler_fault(device)
    if fault and asked_for:
        raise InputError(
            f"--torch_compile: nothing can be compiled here ({fault}), or use --torch_compile false"
        )
    return fault


def compiler_fault(device: torch.device) -> str | None:
    """Why nothing can be compiled here, with the remedy, or None: found by compiling a trifle."""
    try:
        graphs = graphs_so_far()
        trifle = torch.compile(lambda x: x.sin() + 1, fullgraph=True, dynamic=False)
        trifle(torch.zeros(8, device=device))
        if graphs_so_far() == graphs:
            return "torch.compile returns functions as they are; unset TORCHDYNAMO_DISABLE"
    except Exception as error:  # whatever the compiler's tool chain raises
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return f"{reason.strip()[:160]}; install a C++ compiler such as g++"
    return None


@dataclass(slots=True)
class Compiled:
    """The compiled functions of a run and what Dynamo did since they were made.

    chunks: for `unrolled_sums`; at_start, at_warm: Dynamo's number of graphs when compiling began and when
    the warm-up was over.
    """

    chunks: ChunkFunctions
    at_start: int
    at_warm: int | None = None
    fallbacks_at_start: int = 0
    warm_seconds: dict[str, float] = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        """graphs_compiled; recompiles_after_warmup; eager_fallbacks: graph breaks, which ran parts of a
        function uncompiled.
        """
        graphs = graphs_so_far()
        return {
            "graphs_compiled": graphs - self.at_start,
            "recompiles_after_warmup": 0 if self.at_warm is None else graphs - self.at_warm,
            "eager_fallbacks": fallbacks_so_far() - self.fallbacks_at_start,
        }


def graphs_so_far() -> int:
    return counters["stats"]["unique_graphs"]


def fallbacks_so_far() -> int:
    return sum(counters["graph_break"].values())


def compile_objective(head: Eagle3DraftHead, *, dynamic: bool = False) -> Compiled:
    """Replace the head's functions by compiled ones, from outside, and return the compiled chunk functions.

    dynamic: one graph for all lengths instead of one for each, for comparison.
    """
    torch._dynamo.reset()  # frees the graphs of an earlier head in this process
    dynamo: Any = torch._dynamo.config
    # At its own limits (8 graphs a function, 256 in all) Dynamo would refuse to compile. Graphs are counted
    # instead, so that unplanned shapes, however many, are a warning and not the end of a run.
    dynamo.recompile_limit = dynamo.accumulated_recompile_limit = NO_LIMIT
    # Would cut graphs at the borders of DistributedDataParallel's buckets, to overlap with its sums.
    dynamo.optimize_ddp = False
    at_start, fallbacks = graphs_so_far(), fallbacks_so_far()
    for name in HEAD_FUNCTIONS:
        setattr(head, name, _compiled(getattr(head, name), dynamic))
    chunks = ChunkFunctions(
        label=_compiled(label_chunk, dynamic),
        statistics=_compiled(statistics_chunk, dynamic),
        gradient=_compiled(gradient_chunk, dynamic),
    )
    return Compiled(chunks, at_start, fallbacks_at_start=fallbacks)


def _compiled(function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=dynamic)


def compile_target(target: Target) -> None:
    """Compile the MLP of each of the target's layers, which all share one graph for each row length.

    Raises InputError where the layers have no MLP of that name.
    """
    if not hasattr(target, "layers"):
        raise InputError("--compile_target: --mock_target has no layers to compile; drop one")
    for layer in target.layers:
        if not isinstance(getattr(layer, "mlp", None), nn.Module):
            raise InputError(
                f"--compile_target: the layers of {type(target.model).__name__} have no `mlp`; drop the flag"
            )
        layer.mlp.forward = _compiled(layer.mlp.forward, dynamic=False)


def try_compiled_target(target: Target, shapes: Iterable[Shape], granularity: int) -> None:
    """Run a compiled target once, on the smallest shape.

    Raises InputError where its MLP is no full graph, as with some mixtures of experts: which experts run
    depends on the data there.
    """
    try:
        target.features(_example(min(shapes), granularity).to(target.device))
    except TorchDynamoException as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InputError(
            f"--compile_target: the MLP of {type(target.model).__name__} does not compile as one graph "
            f"({reason.strip()[:160]}); drop --compile_target"
        ) from error


def shape_of(batch: PackedBatch) -> Shape:
    return Shape(batch.num_rows, batch.bucket_len, batch.supervised_len)


def warm_up(
    compiled: Compiled,
    head: Eagle3DraftHead,
    target: Target,
    shapes: Iterable[Shape],
    granularity: int,
    *,
    progress: bool = True,
    after_shape: Callable[[], object] = lambda: None,
) -> None:
    """Compile every planned shape, forward and backward, for training and for validation.

    Two TTT steps do: step 0 and any later one run the same graphs whatever K is. Graphs are of a row or of a
    size of supervised rows, so a shape whose two parts were met in other shapes has all of its own already.
    after_shape: called behind each shape.
    """
    rows, supervised_lens = set[tuple[int, int]](), set[int]()
    with tqdm(
        sorted(shapes, reverse=True), desc="compiling", unit="shape", disable=not progress, leave=False
    ) as bar:
        for shape in bar:
            bar.set_postfix_str(str(shape))
            started = time.perf_counter()
            row = (shape.num_rows, shape.bucket_len)
            if row not in rows or shape.supervised_len not in supervised_lens:
                batch = _example(shape, granularity)
                weights = torch.ones(2, device=target.device)
                micro_batch_sums(head, target, batch, weights, compiled.chunks).loss.backward()
                micro_batch_sums(head, target, batch, weights, compiled.chunks, differentiable=False)
                head.zero_grad(set_to_none=True)
            rows.add(row)
            supervised_lens.add(shape.supervised_len)
            compiled.warm_seconds[str(shape)] = time.perf_counter() - started
            after_shape()
    compiled.at_warm = graphs_so_far()


def _example(shape: Shape, granularity: int) -> PackedBatch:
    """A batch of a shape, nearly all padding: a short answer in the first row."""
    length = min(8, shape.bucket_len, shape.supervised_len + 1)
    ids = np.zeros(length, dtype=np.int32)
    answered = Sample(ids, answer_remaining_from_spans(length, [(min(1, length - 1), length)]), "warm-up")
    silent = Sample(ids, np.zeros(length, dtype=np.int32), "warm-up")
    collator = BucketingCollator(granularity, padding_free=shape.num_rows == 1)
    samples = [answered, *[silent] * (shape.num_rows - 1)]
    return collator(samples, shape.bucket_len, shape.supervised_len)


def describe_compiled(compiled: Compiled) -> str:
    """One line: how many graphs and shapes, and the seconds of each shape where they are few."""
    seconds = compiled.warm_seconds
    graphs = compiled.counts()["graphs_compiled"]
    start = f"compiled {graphs} graphs for {len(seconds)} shapes in {sum(seconds.values()):.0f} s"
    if len(seconds) <= MOST_SHAPES_SHOWN:
        return f"{start}: " + ", ".join(f"{shape} ({taken:.1f} s)" for shape, taken in seconds.items())
    largest, *_, smallest = seconds  # as `warm_up` sorts them
    slowest = max(seconds, key=lambda shape: seconds[shape])
    return f"{start}: smallest {smallest}, largest {largest}, slowest {slowest} ({seconds[slowest]:.1f} s)"
