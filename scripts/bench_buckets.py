"""What rounding lengths up to --bucket_granularity buys under torch.compile, on unpacked batches.

    python scripts/bench_buckets.py --json buckets.json

The same unpacked, padding-free batches are trained once under each setting: eager without buckets; compiled
for a granularity of 256, 512 and 1,024; compiled with every batch padded to --training_seq_len ("fixed", what
static shapes cost without buckets); and compiled with dynamic=True without buckets. A step is the target's
forward, the unrolled loss, its backward, clipping and AdamW. Compile seconds are those of the warm-up (all
planned shapes) or, with dynamic shapes, of the steps that compiled; the Inductor
cache is emptied first, unless --warm_cache.

"paid back": the step at which a compiled run has overtaken the eager one, compile seconds included.
"""

import argparse
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from tqdm import tqdm

from eagle_train.batch import PackedBatch
from eagle_train.config import TrainConfig
from eagle_train.train.compile import Compiled, compile_objective, graphs_so_far, warm_up
from eagle_train.train.evaluate import micro_batch_sums
from eagle_train.train.loop import step_weights, supervised_counts
from eagle_train.train.optim import make_optimizer, peak_learning_rate
from eagle_train.train.prepare import Prepared, choose_device, choose_dtype, prepare
from eagle_train.train.report import format_table
from eagle_train.train.schedule import Position, Schedule


@dataclass
class Setting:
    """One way to run. granularity 1: no buckets; dynamic: None is eager."""

    name: str
    granularity: int
    dynamic: bool | None
    compile_seconds: float = 0.0
    graphs: int = 0
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    slots: int = 0


def main() -> None:
    args = parse_args()
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    seq_len = args.training_seq_len
    settings = [
        Setting("eager, no buckets", 1, None),
        Setting("compiled, 256", 256, False),
        Setting("compiled, 512", 512, False),
        Setting("compiled, 1024", 1024, False),
        Setting(f"compiled, fixed {seq_len}", seq_len, False),
        Setting("compiled, dynamic=True", 1, True),
    ]
    rows = [measure(setting, args) for setting in tqdm(settings, desc="settings", unit="setting")]
    print(report(rows, args))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="steps that are timed under each setting")
    parser.add_argument("--batch_size", type=int, default=8, help="samples of a batch")
    parser.add_argument("--training_seq_len", type=int, default=4096, help="tokens")
    parser.add_argument("--ttt_steps", type=int, default=7)
    parser.add_argument("--mock_target", help="hidden,layers,vocab in place of the bundled demo target")
    parser.add_argument("--mock_len", default="lognormal:300:2048", help="with --mock_target: lengths")
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="as in training"
    )
    parser.add_argument("--num_threads", type=int)
    parser.add_argument("--warm_cache", action="store_true", help="keep Inductor's cache")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def make_config(setting: Setting, args: argparse.Namespace) -> TrainConfig:
    options: dict[str, Any] = {"target": "demo"}
    if args.mock_target:
        options = {"mock_data": True, "mock_target": args.mock_target, "mock_len": args.mock_len}
    return TrainConfig(
        training_seq_len=args.training_seq_len,
        bucket_granularity=setting.granularity,
        packing="none",
        batch_size=args.batch_size,
        ttt_steps=args.ttt_steps,
        max_steps=args.steps,
        **options,
    )


def measure(setting: Setting, args: argparse.Namespace) -> Setting:
    """Compile, then train; each setting starts from the same head and sees the same samples."""
    torch._dynamo.reset()
    if not args.warm_cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="bench_buckets_")
    config = make_config(setting, args)
    device = choose_device("auto")
    prepared = prepare(config, device, choose_dtype(args.dtype, device))
    schedule = Schedule(prepared.data.train_lengths, config, 1, prepared.data.train_supervised)
    compiled = compile_for(setting, prepared, schedule, config)
    optimizer = make_optimizer(
        prepared.head, config, peak_learning_rate(config, prepared.head.config.hidden_size)
    )
    before = graphs_so_far()
    windows = schedule.windows(prepared.data.train_samples, 0, Position(), args.steps)
    for window in tqdm(windows, desc=setting.name, total=args.steps, unit="step", leave=False):
        started, graphs = time.perf_counter(), graphs_so_far()
        train_step(prepared, window.batches, compiled, optimizer, config)
        seconds = time.perf_counter() - started
        if graphs_so_far() > graphs:
            setting.compile_seconds += seconds
            continue
        setting.seconds.append(seconds)
        setting.tokens += sum(batch.num_tokens for batch in window.batches)
        setting.slots += sum(batch.num_slots for batch in window.batches)
    setting.graphs += graphs_so_far() - before
    return setting


def compile_for(
    setting: Setting, prepared: Prepared, schedule: Schedule, config: TrainConfig
) -> Compiled | None:
    if setting.dynamic is None:
        return None
    schedule.choose_supervised_sizes()
    shapes = schedule.shapes(Position(), 0, config.max_steps or 1)
    compiled = compile_objective(prepared.head, dynamic=setting.dynamic)
    if not setting.dynamic:
        started = time.perf_counter()
        warm_up(compiled, prepared.head, prepared.target, shapes, config.granularity, progress=False)
        setting.compile_seconds = time.perf_counter() - started
        setting.graphs = compiled.counts()["graphs_compiled"]
    return compiled


def train_step(
    prepared: Prepared,
    batches: list[PackedBatch],
    compiled: Compiled | None,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
) -> None:
    weights = step_weights(supervised_counts(batches, config.ttt_steps), config.step_decay)
    chunks = {"chunks": compiled.chunks} if compiled else {}
    for batch in batches:
        sums = micro_batch_sums(
            prepared.head, prepared.target, batch, weights.to(prepared.target.device), **chunks
        )
        sums.loss.backward()
    torch.nn.utils.clip_grad_norm_(prepared.head.parameters(), config.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if prepared.target.device.type == "cuda":  # the clock is the host's
        torch.cuda.synchronize(prepared.target.device)


def report(rows: list[Setting], args: argparse.Namespace) -> str:
    eager = rows[0]
    eager_rate = rate(eager)
    table = []
    for row in rows:
        gain = seconds_per_step(eager) - seconds_per_step(row)
        paid = f"{row.compile_seconds / gain:,.0f}" if gain > 0 and row.compile_seconds else "-"
        table.append(
            [
                row.name,
                f"{row.tokens / row.slots:.1%}",
                f"{seconds_per_step(row):.3f}",
                f"{rate(row):,.0f}",
                f"{rate(row) / eager_rate:.2f}",
                f"{row.compile_seconds:.1f}",
                f"{row.graphs}",
                paid if row is not eager else "",
            ]
        )
    header = ["setting", "fill", "s/step", "tokens/s", "x eager", "compile s", "graphs", "paid back at step"]
    title = (
        f"{args.steps} steps of {args.batch_size} samples, K = {args.ttt_steps}, "
        f"{choose_dtype(args.dtype, choose_device('auto'))}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}"
    )
    return f"{title}\n{format_table(header, table)}"


def seconds_per_step(row: Setting) -> float:
    """Of the steady state: the mean over steps that compiled nothing."""
    return sum(row.seconds) / len(row.seconds)


def rate(row: Setting) -> float:
    return row.tokens / sum(row.seconds)


if __name__ == "__main__":
    main()
