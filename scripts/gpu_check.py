"""What a CUDA GPU has to show, in one run of at most eight minutes and one JSON file.

    python scripts/gpu_check.py --json gpu_check.json
    python scripts/gpu_check.py --device cpu --small     # the same code at tiny sizes, as in the tests

Sections:
  attention   every backend against the dense reference in float64: outputs and gradients, over random layouts
  recompiles  random batches through a compiled step: no graph may be made after the warm-up
  step        bench_step.py at Llama-3.1-8B's shapes, a target of random weights, bfloat16, compiled
  buckets     bench_buckets.py's step with and without rounding lengths up: unpacked batches
  packing     bench_packing.py's forms: packed rows beside flat and padded batches

Each section runs in a process of its own and has its own seconds; one that fails, hangs or breaks the device
is recorded with its error and the others go on. The file is written after every section. Exit code 1 if a
section failed or a check in it did not hold.
"""

import argparse
import json
import multiprocessing
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_buckets
import bench_packing
import bench_step
import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from eagle_train.config import TrainConfig
from eagle_train.data.collator import BucketingCollator, round_up
from eagle_train.data.mock import MockSamples
from eagle_train.data.packing import Shape
from eagle_train.errors import InputError
from eagle_train.files import write_json
from eagle_train.model.attention import DocumentLayout, dense_attention, unrolled_attention
from eagle_train.train import compile as compile_module
from eagle_train.train.compile import Compiled, compile_objective, warm_up
from eagle_train.train.evaluate import micro_batch_sums
from eagle_train.train.prepare import Prepared, prepare

TOTAL_SECONDS = 480
LLAMA_8B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
SMALL_LLAMA = LLAMA_8B | {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
}  # fmt: skip
# (later steps k, query heads, key heads, head size)
HEADS = [(0, 4, 4, 32), (1, 6, 2, 64), (2, 4, 1, 80), (3, 32, 8, 128), (4, 9, 3, 64), (6, 8, 2, 128)]
# Largest error of the output, and of a gradient over its largest entry.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def attention(args: argparse.Namespace) -> dict[str, Any]:
    """Every backend that this device can run, in each dtype that it takes."""
    backends = ["flash_attn", "torch_cuda", "matmul"] if args.device == "cuda" else ["cpu", "matmul"]
    results: dict[str, Any] = {}
    for backend in backends:
        for dtype in BOUNDS:
            if dtype == torch.float32 and backend in ("flash_attn", "torch_cuda"):
                continue  # these kernels take 16-bit types only
            name = f"{backend}, {str(dtype).removeprefix('torch.')}"
            try:
                errors = [
                    attention_error(heads, seed, backend, dtype, args)
                    for seed in range(1 if args.small else 4)
                    for heads in (HEADS[1:4] if args.small else HEADS)
                ]
            except InputError as error:  # not installed
                results[name] = {"skipped": str(error)}
                continue
            out, grad = (max(values) for values in zip(*errors, strict=True))
            bound = BOUNDS[dtype]
            results[name] = {"cases": len(errors), "out_error": out, "grad_error": grad, "bound": bound,
                             "holds": out <= bound and grad <= bound}  # fmt: skip
    return results


def attention_error(
    heads: tuple[int, int, int, int], seed: int, backend: str, dtype: torch.dtype, args: argparse.Namespace
) -> tuple[float, float]:
    """Over a random layout with one-token documents and a long tail: (output's error, gradients' error)."""
    k, num_heads, num_kv_heads, head_size = heads
    generator = torch.Generator().manual_seed(seed)
    longest = 24 if args.small else 150
    lengths = torch.randint(1, longest, (8,), generator=generator).tolist()
    layout = DocumentLayout.from_offsets(
        [0, *np.cumsum([1, *lengths, 1, 2 * longest]).tolist()], device=args.device
    )
    inputs = [
        torch.randn(layout.num_rows, n, head_size, generator=generator).to(args.device, dtype)
        for n in (num_heads, *[num_kv_heads] * (2 + 2 * k))
    ]
    exact = [x.double().requires_grad_() for x in inputs]
    inputs = [x.requires_grad_() for x in inputs]

    def split(x: list[Tensor]) -> tuple[Any, ...]:
        return x[0], x[1], x[2], tuple(x[3 : 3 + k]), tuple(x[3 + k :]), layout

    out, wanted = unrolled_attention(*split(inputs), backend=backend), dense_attention(*split(exact))
    grad_out = torch.randn(out.shape, generator=generator).to(out)
    grads = torch.autograd.grad(out, inputs, grad_out)
    wanted_grads = torch.autograd.grad(wanted, exact, grad_out.double())
    grad_error = max(
        float((got - want).abs().max() / want.abs().max().clamp_min(1e-3))
        for got, want in zip(grads, wanted_grads, strict=True)
    )
    return float((out - wanted).abs().max()), grad_error


def recompiles(args: argparse.Namespace) -> dict[str, Any]:
    """Random batches in planned shapes: documents of any number and length, any share supervised."""
    num_batches, longest, granularity = (12, 128, 64) if args.small else (200, 2048, 1024)
    if args.small:  # Dynamo's graphs and guards without Inductor, which takes a minute on one core
        compile_module._compiled = lambda function, dynamic: torch.compile(
            function, backend="aot_eager", fullgraph=True, dynamic=dynamic
        )
    prepared, compiled = compiled_objective(args, longest, granularity)
    rng = np.random.default_rng(0)
    weights = torch.ones(2 if args.small else 7, device=args.device)
    started = time.perf_counter()
    for index in tqdm(range(num_batches), desc="recompiles", unit="batch", leave=False):
        lengths = random_lengths(rng, int(rng.integers(3, longest + 1)))
        share = float(rng.uniform(0.05, 1.0))
        samples = MockSamples(np.array(lengths), prepared.target.vocab_size, share, index)
        batch = BucketingCollator(granularity)(list(samples))
        rows = batch.supervised_counts(1)[0]
        batch = BucketingCollator(granularity)(list(samples), 0, round_up(rows, granularity))
        micro_batch_sums(prepared.head, prepared.target, batch, weights, compiled.chunks).loss.backward()
        prepared.head.zero_grad(set_to_none=True)
    counts = compiled.counts()
    holds = counts["recompiles_after_warmup"] == 0 and counts["eager_fallbacks"] == 0
    seconds = time.perf_counter() - started
    return counts | {"batches": num_batches, "seconds": seconds, "warm_up": compiled.warm_seconds,
                     "holds": holds}  # fmt: skip


def compiled_objective(args: argparse.Namespace, longest: int, granularity: int) -> tuple[Prepared, Compiled]:
    config = TrainConfig(
        mock_data=True,
        mock_target="64,8,160" if args.small else "1024,16,32000",
        training_seq_len=longest,
        bucket_granularity=granularity,
        mock_num_samples=4,
        mock_len=str(granularity),
        eval_fraction=0.0,
        draft_vocab_size=96 if args.small else 8192,
        device=args.device,
        dtype="float32" if args.small else "auto",
    )
    prepared = prepare(config)
    sizes = range(granularity, longest + 1, granularity)
    shapes = [Shape(1, slots, rows) for slots in sizes for rows in sizes if rows <= slots]
    compiled = compile_objective(prepared.head)
    warm_up(compiled, prepared.head, prepared.target, shapes, granularity, progress=False)
    return prepared, compiled


def random_lengths(rng: np.random.Generator, room: int) -> list[int]:
    """Documents that fill `room` tokens, from one to very many of them."""
    lengths = []
    largest = int(rng.integers(3, room + 1))
    while room:
        length = min(int(rng.integers(1, largest + 1)), room)
        lengths.append(length)
        room -= length
    return lengths


def step(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.json"
        path.write_text(json.dumps(SMALL_LLAMA if args.small else LLAMA_8B))
        flags = ["--device", args.device]
        if args.small:
            flags += ["--training_seq_len", "64", "--mock_len", "16", "--draft_vocab_size", "96"]
            flags += ["--ttt_steps", "2", "--dtype", "float32"]
        options = argparse.Namespace(
            repeats=1 if args.small else 5, compiled=not args.small, random_target=str(path)
        )
        results = bench_step.bench(flags, options)
    print(bench_step.report(results))
    return results | {"holds": results["recompiles"] == 0}


def buckets(args: argparse.Namespace) -> dict[str, Any]:
    options = argparse.Namespace(
        steps=2 if args.small else 30,
        batch_size=8,
        training_seq_len=64 if args.small else 4096,
        ttt_steps=2 if args.small else 7,
        mock_target="32,8,96" if args.small else "2048,16,128256",
        mock_len="lognormal:8:64" if args.small else "lognormal:300:4096",
        dtype="float32" if args.small else "auto",
        warm_cache=False,
    )
    settings = [
        bench_buckets.Setting("eager, no buckets", 1, None),
        bench_buckets.Setting("eager, buckets", 16, None)
        if args.small
        else bench_buckets.Setting("compiled, 1024", 1024, False),
    ]
    if not args.small:
        settings.append(bench_buckets.Setting("compiled, dynamic=True", 1, True))
    rows = [bench_buckets.measure(setting, options) for setting in settings]
    print(bench_buckets.report(rows, options))
    return {
        row.name: {
            "tokens_per_second": bench_buckets.rate(row),
            "fill": row.tokens / row.slots,
            "compile_seconds": row.compile_seconds,
            "graphs": row.graphs,
        }
        for row in rows
    }


def packing(args: argparse.Namespace) -> dict[str, Any]:
    options = argparse.Namespace(
        target=None,
        mock_target="32,8,96" if args.small else "2048,16,128256",
        data=None,
        data_target=None,
        samples=8 if args.small else 192,
        repeats=1,
        mock_len="lognormal:8:64" if args.small else None,
        training_seq_len=64 if args.small else 4096,
        bucket_granularity=32 if args.small else 1024,
        ttt_steps=2 if args.small else 7,
        dtype="float32" if args.small else "auto",
        device=args.device,
        num_threads=None,
        seed=0,
    )
    return bench_packing.run(options)


SECTIONS: dict[str, tuple[Callable[[argparse.Namespace], dict[str, Any]], int]] = {
    "attention": (attention, 60),
    "recompiles": (recompiles, 110),
    "step": (step, 120),
    "buckets": (buckets, 120),
    "packing": (packing, 60),
}


def fenced(name: str, args: argparse.Namespace, budget: float) -> dict[str, Any]:
    """A section's figures, or what went wrong with it, within `budget` seconds.

    The process is forked, so that nothing is imported anew; the parent must not have touched the device.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "section.json"
        process = multiprocessing.get_context("fork").Process(target=run_section, args=(name, args, path))
        process.start()
        process.join(budget)
        if process.is_alive():
            process.kill()
            process.join()
            outcome: dict[str, Any] = {"ok": False, "error": f"took longer than its {budget:.0f} seconds"}
        elif path.exists():
            outcome = json.loads(path.read_text())
        else:
            outcome = {"ok": False, "error": f"its process ended with exit code {process.exitcode}"}
    return outcome | {"wall_seconds": time.perf_counter() - started}


def run_section(name: str, args: argparse.Namespace, path: Path) -> None:
    try:
        figures = SECTIONS[name][0](args)
        outcome = {"ok": all_hold(figures), "figures": figures}
    except Exception as error:  # a failure is a result
        outcome = {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000],
                   "traceback": traceback.format_exc()[-4000:]}  # fmt: skip
    try:
        write_json(path, outcome)
    except ValueError:  # JSON has no NaN
        write_json(path, {"ok": False, "error": f"a figure is not finite: {outcome}"})


def all_hold(figures: Any) -> bool:
    """Whether no check, however deep, says that it does not hold."""
    if not isinstance(figures, dict):
        return True
    return figures.get("holds", True) and all(all_hold(value) for value in figures.values())


def describe_device(args: argparse.Namespace) -> dict[str, Any]:
    """In a forked process of its own, as a section is."""
    facts = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    if args.device == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(), "capability": list(torch.cuda.get_device_capability())}
    return facts


SECTIONS["device"] = (describe_device, 30)


def main() -> int:
    args = parse_args()
    started = time.perf_counter()
    results: dict[str, Any] = {"command": sys.argv[1:], "sections": {}}
    for name in tqdm(["device", *args.sections], desc="sections", unit="section"):
        left = args.seconds - (time.perf_counter() - started)
        outcome = fenced(name, args, min(SECTIONS[name][1], max(left, 0)))
        results["sections"][name] = outcome
        results["seconds"] = time.perf_counter() - started
        write_json(args.json, results)
        state = "ok" if outcome["ok"] else f"FAILED: {outcome.get('error', 'a check does not hold')}"
        tqdm.write(f"{name}: {state} ({outcome['wall_seconds']:.0f} s)")
    return 0 if all(outcome["ok"] for outcome in results["sections"].values()) else 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    names = [name for name in SECTIONS if name != "device"]
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny sizes, without Inductor")
    parser.add_argument("--sections", nargs="+", choices=names, default=names)
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="for all sections together")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
