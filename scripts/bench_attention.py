"""The CPU attention backend's ways of running documents through PyTorch's flash kernel, forward and backward.

    python scripts/bench_attention.py --num_threads 2 --json attention.json

"one by one": a call for each document. "equal lengths": documents of one length are a batch of one call,
which is what the package does. "like lengths": documents are sorted, and neighbours whose lengths differ by
at most --slack of the longer one are padded to it and form a batch. Padding is exact: it lies behind the real
rows, which causal attention never lets see it, and its rows get no gradient. Copies into and out of the
batches count. Variants take turns; times are medians; every result is compared with the package's.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_packing import cpu_name
from torch import Tensor
from tqdm import tqdm

from eagle_train.files import write_json
from eagle_train.model import attention
from eagle_train.model.attention import DocumentLayout
from eagle_train.train.report import format_table

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
Pass = Callable[[list[Tensor], Tensor, DocumentLayout], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Layout:
    """lengths: of the documents, in rows."""

    name: str
    lengths: Sequence[int]


def layouts(scale: float) -> list[Layout]:
    """Rows of about 4,096 x scale tokens."""
    rng = np.random.default_rng(0)

    def lognormal(mean: float, count: int) -> list[int]:
        lengths = rng.lognormal(np.log(mean) - 0.5, 1.0, count) * scale
        return np.clip(lengths, 1, 4096 * scale).astype(int).tolist()

    near = (rng.normal(256, 25, 16) * scale).clip(1).astype(int).tolist()
    return [
        Layout("16 of 256", [int(256 * scale)] * 16),
        Layout("16 of about 256", near),
        Layout("16 lognormal, mean 256", lognormal(256, 16)),
        Layout("64 lognormal, mean 64", lognormal(64, 64)),
        Layout("4 lognormal, mean 1,024", lognormal(1024, 4)),
        Layout("1 of 4,096", [int(4096 * scale)]),
    ]


def one_by_one(inputs: list[Tensor], grad_out: Tensor, layout: DocumentLayout) -> tuple[Tensor, ...]:
    query, key, value = inputs
    results = [torch.empty_like(x) for x in (query, query, key, value)]
    scale = query.shape[-1] ** -0.5
    for start, stop in layout.documents:
        rows = slice(start, stop)
        q, k, v, g = (x[None, rows].transpose(1, 2) for x in (query, key, value, grad_out))
        out, lse = flash(q, k, v, 0.0, True, scale=scale)
        parts = (out, *flash_backward(g, q, k, v, out, lse, 0.0, True, scale=scale))
        for result, part in zip(results, parts, strict=True):
            result[rows] = part.transpose(1, 2)[0]
    return tuple(results)


def equal_lengths(inputs: list[Tensor], grad_out: Tensor, layout: DocumentLayout) -> tuple[Tensor, ...]:
    kernels = attention._BACKENDS["cpu"]
    scale = inputs[0].shape[-1] ** -0.5
    out, lse = kernels.forward(*inputs, layout, scale)
    return out, *kernels.backward(grad_out, attention._Saved(*inputs, out, lse), layout, scale)


def like_lengths(slack: float) -> Pass:
    def run(inputs: list[Tensor], grad_out: Tensor, layout: DocumentLayout) -> tuple[Tensor, ...]:
        query, key, value = inputs
        results = [torch.empty_like(x) for x in (query, query, key, value)]
        scale = query.shape[-1] ** -0.5
        for length, rows, places in batches(layout, slack):
            q, k, v, g = (padded(x, rows, places, length) for x in (query, key, value, grad_out))
            out, lse = flash(q, k, v, 0.0, True, scale=scale)
            parts = (out, *flash_backward(g, q, k, v, out, lse, 0.0, True, scale=scale))
            for result, part in zip(results, parts, strict=True):
                flat = part.transpose(1, 2).flatten(0, 1)
                result[rows] = flat if places is None else flat[places]
        return tuple(results)

    return run


def padded(x: Tensor, rows: slice | Tensor, places: Tensor | None, length: int) -> Tensor:
    """Documents of a flat `[T, n, d]` as `[B, n, length, d]`."""
    if places is not None:
        batch = int(places[-1]) // length + 1
        return (
            x.new_zeros(batch * length, *x.shape[1:])
            .index_copy_(0, places, x[rows])
            .view(batch, length, *x.shape[1:])
            .transpose(1, 2)
        )
    return x[rows].view(-1, length, *x.shape[1:]).transpose(1, 2)


Batches = list[tuple[int, slice | Tensor, Tensor | None]]
_made: dict[tuple[tuple[int, ...], float], Batches] = {}


def batches(layout: DocumentLayout, slack: float) -> Batches:
    """(length, rows, their places in the padded batch) of each batch; made once a layout, as in a step."""
    if (layout.offsets, slack) in _made:
        return _made[layout.offsets, slack]
    groups: list[list[tuple[int, int]]] = []
    for start, stop in sorted(layout.documents, key=lambda d: d[0] - d[1]):
        if groups and stop - start >= (1 - slack) * (groups[-1][0][1] - groups[-1][0][0]):
            groups[-1].append((start, stop))
        else:
            groups.append([(start, stop)])
    made: Batches = []
    for group in groups:
        length = group[0][1] - group[0][0]
        rows = torch.cat([torch.arange(start, stop) for start, stop in group])
        places = torch.cat([i * length + torch.arange(stop - start) for i, (start, stop) in enumerate(group)])
        if len(group) == 1:
            made.append((length, slice(*group[0]), None))
        else:
            made.append((length, rows, None if len(rows) == length * len(group) else places))
    _made[layout.offsets, slack] = made
    return made


def measure(layout: Layout, args: argparse.Namespace) -> dict[str, Any]:
    documents = DocumentLayout.from_offsets([0, *np.cumsum(layout.lengths).tolist()])
    torch.manual_seed(0)
    heads, kv_heads, size = args.heads
    dtype = getattr(torch, args.dtype)
    inputs = [torch.randn(documents.num_rows, n, size, dtype=dtype) for n in (heads, kv_heads, kv_heads)]
    grad_out = torch.randn(documents.num_rows, heads, size, dtype=dtype)
    variants: dict[str, Pass] = {
        "one by one": one_by_one,
        "equal lengths": equal_lengths,
        "like lengths": like_lengths(args.slack),
    }
    wanted = equal_lengths(inputs, grad_out, documents)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for name, run in variants.items():
        for got, want in zip(run(inputs, grad_out, documents), wanted, strict=True):
            error = ((got - want).abs().max() / want.abs().max()).item()
            assert error < (1e-5 if dtype == torch.float32 else 2e-2), f"{name} is off by {error:.2g}"
    for _ in range(args.repeats):
        for name, run in variants.items():
            started = time.perf_counter()
            run(inputs, grad_out, documents)
            times[name].append(time.perf_counter() - started)
    rows = documents.num_rows
    slots = sum(
        length * (len(rows) if places is None else int(places[-1]) // length + 1) if places is not None else 0
        for length, rows, places in batches(documents, args.slack)
    )
    return {
        "layout": layout.name,
        "rows": rows,
        "padded_rows": slots,
        "seconds": {name: statistics.median(values) for name, values in times.items()},
    }


def main() -> None:
    args = parse_args()
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    results = [measure(layout, args) for layout in tqdm(layouts(args.scale), desc="layouts", leave=False)]
    names = list(results[0]["seconds"])
    table = [
        [r["layout"], f"{r['rows']:,}", *(f"{r['seconds'][n] * 1e3:.2f}" for n in names)] for r in results
    ]
    heads = "{} query heads, {} key heads of {}".format(*args.heads)
    place = f"{cpu_name()}, {torch.get_num_threads()} threads, {args.dtype}, torch {torch.__version__}"
    print(f"{place}; {heads}; forward + backward, ms")
    print(format_table(["documents", "rows", *names], table))
    if args.json:
        write_json(args.json, {"place": place, "heads": args.heads, "results": results})


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--heads", type=int, nargs=3, default=[4, 4, 64], help="query heads, key heads, head size")
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add(
        "--slack",
        type=float,
        default=0.25,
        help="padding that a document may get, share of its batch's length",
    )
    add("--scale", type=float, default=1.0, help="factor on all lengths")
    add("--repeats", type=int, default=20, help="of which times are the median")
    add("--num_threads", type=int, help="CPU threads; none: PyTorch's choice")
    add("--json", type=Path, metavar="FILE", help="write the figures there, too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
