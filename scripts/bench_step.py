"""Where a training step's time goes, beside the time that its matrix products alone take.

    python scripts/bench_step.py --target DIR --draft_vocab_size 8192 --dtype float32 --num_threads 2
    python scripts/bench_step.py --mock_target 4096,32,128256 --compiled --json step.json
    python scripts/bench_step.py --random_target llama.json --device cuda --dtype bfloat16 --compiled

Any other flag is one of training's (python -m eagle_train --help): --ttt_steps, --training_seq_len (T),
--gradient_checkpointing, ... The batch is mock data: one packed row of documents of --mock_len tokens, of
which --mock_loss_share is the answer; the same batch at each step.

How it is measured. The step is the training loop's own `train_step`: target forward, unroll, loss, backward,
clipping, AdamW, and its host reads. Each repeat takes, one after the other: the next batch from the loader
("data"), a step without timers, a step with timers around its parts (step_parts.py: forward by wrapping the
functions, backward by what autograd runs between a part's outputs and its inputs), and every distinct product
of the step alone (step_products.py). Times are medians over the repeats.

Which products. One eager step under a recorder gives every matrix product and flash attention kernel that
runs, forward and backward, with shapes, strides and types; so those of chunks are chunks, and attention is as
the package calls it, documents of one length as a batch. "alone" is sum(times called x median seconds).
"by formula" counts what the maths needs: no padding, no rows that only fill up, nothing made twice; for
targets whose layers are plain linear maps. "ratio" is the step without timers, and "data", over "alone".
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from bench_packing import cpu_name
from step_parts import ATTENTION, DATA, HEAD, LABELS, LOSS, PARTS, TARGET, Clock, wrapped_parts
from step_products import Bench, Product, Recorder
from torch import nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from eagle_train.batch import PackedBatch
from eagle_train.config import TrainConfig
from eagle_train.errors import InputError
from eagle_train.files import write_json
from eagle_train.flags import parse
from eagle_train.model.target import FrozenTarget
from eagle_train.model.target_attention import register_target_attention
from eagle_train.train import prepare as prepare_module
from eagle_train.train.distributed import Ranks
from eagle_train.train.lock import OutputLock
from eagle_train.train.loop import Run, compile_run, train_step
from eagle_train.train.report import format_table
from eagle_train.train.schedule import Position
from eagle_train.train.start import start

DEFAULTS = ("--mock_data", "--mock_len", "256", "--mock_num_samples", "256", "--eval_fraction", "0")


def main() -> None:
    args, flags = parse_args()
    try:
        results = bench(flags, args)
    except InputError as error:
        raise SystemExit(f"error: {error}") from error
    print(report(results))
    if args.json:
        write_json(args.json, results)


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--repeats", type=int, default=5, help="of which times are the median")
    parser.add_argument("--compiled", action="store_true", help="as under --torch_compile; else eager")
    parser.add_argument(
        "--random_target", metavar="FILE", help="config.json of a target whose weights are random numbers"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    args, flags = parser.parse_known_args()
    if args.repeats < 1:
        parser.error(f"--repeats is {args.repeats}; it must be at least 1")
    return args, flags


@contextmanager
def open_run(flags: list[str], *, compiled: bool, random_target: str | None = None) -> Iterator[Run]:
    """A training run of mock data, ready for its first step, in a directory that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="bench_step_") as directory, ExitStack() as stack:
        words = [*DEFAULTS, *flags, "--output_dir", directory, "--max_steps", "100"]
        words += ["--torch_compile", "true" if compiled else "false"]
        if random_target:
            words += ["--target", random_target]
            stack.enter_context(random_weights(random_target))
        config = parse(TrainConfig, words, command="train", description="bench_step")
        lock = stack.enter_context(closing(OutputLock(Path(directory))))
        run = start(config, Ranks(), lock)
        if compiled:
            compile_run(run)
        yield run


@contextmanager
def random_weights(path: str) -> Iterator[None]:
    """Let `prepare` make a target of a config.json's sizes in place of loading one."""
    config = AutoConfig.from_pretrained(path)

    def open_target(
        name: str, train: TrainConfig, device: torch.device, dtype: torch.dtype, aux_layer_ids: Any
    ) -> FrozenTarget:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=register_target_attention()
            )
        return FrozenTarget(model, aux_layer_ids)

    with (
        patch.object(prepare_module, "read_target_config", lambda *_: config.get_text_config()),
        patch.object(prepare_module, "open_target", open_target),
    ):
        yield


def bench(flags: list[str], args: argparse.Namespace) -> dict[str, Any]:
    with open_run(flags, compiled=args.compiled, random_target=args.random_target) as run:
        device = run.prepared.target.device
        windows = run.schedule.windows(run.prepared.data.train_samples, 0, Position(), args.repeats + 1)
        batches = next(windows).batches
        clock = Clock(device)
        products = record(run, batches, clock)
        alone = Bench(products, device)
        train_step(run, batches)  # warm: optimizer state, compiled backward
        steps, data, parts, calls = [], [], [], []
        for _ in tqdm(range(args.repeats), desc="repeats", unit="repeat", leave=False):
            started = time.perf_counter()
            next(windows)
            data.append(time.perf_counter() - started)
            steps.append(plain_step(run, batches))
            with wrapped_parts(run, clock.timed):
                clock.start()
                train_step(run, batches)
                parts.append(clock.stop())
            calls.append(alone.seconds())
        return figures(run, batches, products, steps, data, parts, calls) | {
            "compiled": args.compiled,
            "repeats": args.repeats,
            "recompiles": run.compiled.counts()["recompiles_after_warmup"] if run.compiled else 0,
        }


def record(run: Run, batches: list[PackedBatch], clock: Clock) -> list[Product]:
    """The products of one eager step."""
    recorder = Recorder(lambda: clock.part)
    with wrapped_parts(run, clock.timed), torch.compiler.set_stance("force_eager"), recorder:
        train_step(run, batches)
    return list(recorder.products.values())


def plain_step(run: Run, batches: list[PackedBatch]) -> float:
    """Seconds of a step without timers."""
    started = time.perf_counter()
    train_step(run, batches)
    if run.prepared.target.device.type == "cuda":
        torch.cuda.synchronize(run.prepared.target.device)
    return time.perf_counter() - started


def figures(
    run: Run,
    batches: list[PackedBatch],
    products: list[Product],
    steps: list[float],
    data: list[float],
    parts: list[dict[str, float]],
    calls: list[list[float]],
) -> dict[str, Any]:
    """Medians over the repeats, and the recorded products by part."""
    of_call = [statistics.median(times) for times in zip(*calls, strict=True)]
    rows = {}
    for part in PARTS:
        times = data if part == DATA else [seconds.get(part, 0.0) for seconds in parts]
        timed = [(p.times[part], p, seconds) for p, seconds in zip(products, of_call, strict=True)]
        rows[part] = {
            "seconds": statistics.median(times),
            "flops": sum(count * p.flops for count, p, _ in timed),
            "alone_seconds": sum(count * seconds for count, _, seconds in timed),
        }
    step, waited = statistics.median(steps), statistics.median(data)
    alone = sum(row["alone_seconds"] for row in rows.values())
    done = sum(row["flops"] for row in rows.values())
    needed = formula_flops(run, batches)
    device, head = run.prepared.target.device, run.prepared.head.config
    return {
        "cpu": cpu_name(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": str(run.prepared.target.dtype).removeprefix("torch."),
        "target": run.prepared.target_name,
        "shapes": {
            "slots": sum(batch.num_slots for batch in batches),
            "tokens": sum(batch.num_tokens for batch in batches),
            "documents": sum(len(batch.sources) for batch in batches),
            "ttt_steps": run.config.ttt_steps,
            "supervised": supervised_per_step(run, batches),
            "hidden": head.hidden_size,
            "heads": [head.num_attention_heads, head.num_key_value_heads, head.head_dim],
            "vocabulary": [run.prepared.target.vocab_size, head.draft_vocab_size],
        },
        "parts": rows,
        "step_seconds": step,
        "step_spread": (max(steps) - min(steps)) / step,
        "timed_step_seconds": statistics.median(sum(seconds.values()) for seconds in parts),
        "alone_seconds": alone,
        "ratio": (step + waited) / alone,
        "flops": done,
        "formula_flops": needed,
        "distinct_products": len(products),
    }


def supervised_per_step(run: Run, batches: list[PackedBatch]) -> list[int]:
    counts = [batch.supervised_counts(run.config.ttt_steps) for batch in batches]
    return [sum(of_step) for of_step in zip(*counts, strict=True)]


def formula_flops(run: Run, batches: list[PackedBatch]) -> dict[str, float]:
    """What the maths needs, by part. A backward is two forwards, or one where the input has no gradient."""
    target, config, head = run.prepared.target, run.config, run.prepared.head.config
    hidden, attended = head.hidden_size, head.num_attention_heads * head.head_dim
    tokens, pairs = 0, 0.0
    for batch in batches:
        lengths = [stop - start for start, stop in pairwise(batch.offsets)][: len(batch.sources)]
        tokens += batch.num_tokens
        pairs += sum(length * (length + 1) / 2 for length in lengths)
    supervised = supervised_per_step(run, batches)
    qkv = attended + 2 * head.num_key_value_heads * head.head_dim
    layer = 2 * hidden * qkv + attended * hidden + 3 * hidden * head.intermediate_size
    target_weights = target_attention = 0
    if isinstance(target, FrozenTarget):
        linear = [module for module in target.decoder.modules() if isinstance(module, nn.Linear)]
        target_weights = sum(module.weight.numel() for module in linear)
        sizes = target.config
        head_dim = getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads
        target_attention = sizes.num_hidden_layers * sizes.num_attention_heads * head_dim
    return {
        TARGET: 2.0 * target_weights * tokens + 4 * target_attention * pairs,
        ATTENTION: 14.0 * attended * pairs * config.ttt_steps,
        HEAD: 6.0 * layer * (tokens + sum(supervised[1:])) + 4.0 * 3 * hidden * hidden * tokens,
        LABELS: 2.0 * hidden * target.vocab_size * supervised[0],
        LOSS: 6.0 * hidden * head.draft_vocab_size * sum(supervised),
    }


def report(results: dict[str, Any]) -> str:
    shapes, parts = results["shapes"], results["parts"]
    whole = results["step_seconds"] + parts[DATA]["seconds"]
    table = []
    for part, row in parts.items():
        cells = [row["seconds"], row["flops"], row["alone_seconds"], results["formula_flops"].get(part, 0.0)]
        table.append(line(part, *cells, share=row["seconds"] / whole))
    timed = results["timed_step_seconds"] + parts[DATA]["seconds"]
    needed = sum(results["formula_flops"].values())
    table.append(
        line("sum of parts", timed, results["flops"], results["alone_seconds"], needed, timed / whole)
    )
    table.append(
        line("step without timers + data", whole, results["flops"], results["alone_seconds"], needed, 1.0)
    )
    head = [
        "part",
        "ms",
        "share",
        "GFLOP",
        "GFLOP/s",
        "alone ms",
        "alone GFLOP/s",
        "ratio",
        "by formula GFLOP",
    ]
    sizes = (
        f"T = {shapes['slots']:,} ({shapes['tokens']:,} tokens, {shapes['documents']} documents), "
        f"K = {shapes['ttt_steps']}, supervised rows {shapes['supervised'][0]:,} at step 0 and "
        f"{sum(shapes['supervised']):,} in all, H = {shapes['hidden']}, V, V_d = {shapes['vocabulary']}"
    )
    place = (
        f"{results['target']}; {results['cpu'] if results['device'] == 'cpu' else results['device']}, "
        f"{results['threads']} threads, {results['dtype']}, torch {results['torch']}, "
        f"{'compiled' if results['compiled'] else 'eager'}, median of {results['repeats']}, spread "
        f"{results['step_spread']:.0%}, {results['recompiles']} recompiles"
    )
    verdict = (
        f"step / its products alone: {results['ratio']:.2f}; products done / needed by formula: "
        f"{results['flops'] / needed:.3f}; {results['distinct_products']} distinct products"
    )
    return "\n".join([place, sizes, format_table(head, table), verdict])


def line(part: str, seconds: float, flops: float, alone: float, needed: float, share: float) -> list[str]:
    def rate(over: float) -> str:
        return f"{flops / over / 1e9:,.0f}" if flops and over else ""

    return [
        part,
        f"{seconds * 1e3:,.1f}",
        f"{share:.1%}",
        f"{flops / 1e9:,.1f}" if flops else "",
        rate(seconds),
        f"{alone * 1e3:,.1f}" if flops else "",
        rate(alone),
        f"{seconds / alone:.2f}" if alone else "",
        f"{needed / 1e9:,.1f}" if needed else "",
    ]


if __name__ == "__main__":
    main()
