"""Planner against planner: figures of one epoch on three length sets, and the time to plan a million lengths.

    python scripts/bench_plan.py                    # about two minutes on one core
    python scripts/bench_plan.py --json plan.json   # the same figures for machines

Plans only: no model, no data, no GPU. Times are CPU-seconds of this process, the median of `--repeats` runs,
for the plan of all ranks.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from eagle_train.data.packing import Ints
from eagle_train.data.plan_figures import PlanFigures, plan_figures
from eagle_train.train.report import format_table
from eagle_train.train.schedule import ROW_PLANNERS

# Clipped lognormals (median, sigma, longest, samples), in tokens, and the capacity of a rank. A: short chats,
# mean 591, 0.5 % at the longest; B: mean 1,282, 5 % at the longest; C: long tail, mean 1,755, p99 16.9k.
SETS = {
    "A": ((399, 0.90, 4096, 200_000), 8192),
    "B": ((932, 0.90, 4096, 120_000), 8192),
    "C": ((715, 1.35, 50_000, 60_000), 52_224),
}
SEED = 0
WORLD_SIZES, TIMED_WORLD_SIZES = (1, 8, 64), (8, 64)
HEADER = (
    "planner",
    "steps",
    "fill %",
    "utilisation %",
    "imbalance tokens",
    "imbalance cost",
    "shapes",
    "dropped samples",
    "dropped tokens",
)


def clipped_lognormal(median: float, sigma: float, longest: int, count: int) -> Ints:
    normal = np.random.default_rng(SEED).normal(np.log(median), sigma, count)
    return np.rint(np.exp(normal)).clip(1, longest).astype(np.int64)


def describe(lengths: Ints) -> dict[str, float]:
    """Count, mean, percentiles in tokens, and the share of samples as long as the longest."""
    return {
        "samples": len(lengths),
        "mean": round(float(lengths.mean()), 1),
        "median": float(np.median(lengths)),
        "p99": float(np.percentile(lengths, 99)),
        "longest": int(lengths.max()),
        "share_at_longest": round(float((lengths == lengths.max()).mean()), 5),
    }


def table_row(planner: str, figures: PlanFigures) -> list[str]:
    return [
        planner,
        f"{figures.num_steps:,}",
        f"{100 * figures.fill:.2f}",
        f"{100 * figures.utilisation:.2f}",
        f"{figures.imbalance_tokens:.3f}",
        f"{figures.imbalance_cost:.3f}",
        str(len(figures.shapes)),
        f"{figures.dropped_samples:,}",
        f"{figures.dropped_tokens:,}",
    ]


def compare(granularity: int) -> dict[str, Any]:
    """Prints a table for each set and world size; returns their figures."""
    results: dict[str, Any] = {}
    for name, (shape, capacity) in SETS.items():
        lengths = clipped_lognormal(*shape)
        facts = describe(lengths)
        results[name] = {"lengths": facts, "capacity": capacity, "plans": {}}
        for world_size in WORLD_SIZES:
            rows, plans = [], results[name]["plans"].setdefault(world_size, {})
            for planner, make in tqdm(ROW_PLANNERS.items(), f"{name}, {world_size} ranks", leave=False):
                plan = make(lengths, capacity, world_size=world_size, granularity=granularity, seed=SEED)
                figures = plan_figures(plan, lengths)
                plans[planner] = asdict(figures)
                rows.append(table_row(planner, figures))
            title = f"set {name}, mean {facts['mean']}, capacity {capacity:,}, world_size {world_size}"
            print(f"{title}\n{format_table(HEADER, rows)}\n", flush=True)
    return results


def measure_times(count: int, granularity: int, repeats: int) -> dict[str, dict[int, float]]:
    """CPU-seconds to plan `count` lengths of set B for all ranks, per planner and world size."""
    (median, sigma, longest, _), capacity = SETS["B"]
    lengths = clipped_lognormal(median, sigma, longest, count)
    times: dict[str, dict[int, float]] = {planner: {} for planner in ROW_PLANNERS}
    with tqdm(
        total=len(ROW_PLANNERS) * len(TIMED_WORLD_SIZES) * repeats, desc="times", leave=False
    ) as progress:
        for planner, make in ROW_PLANNERS.items():
            for world_size in TIMED_WORLD_SIZES:
                runs = []
                for _ in range(repeats):
                    start = time.process_time()
                    make(lengths, capacity, world_size=world_size, granularity=granularity, seed=SEED)
                    runs.append(time.process_time() - start)
                    progress.update()
                times[planner][world_size] = round(statistics.median(runs), 3)
    header = ["planner", *(f"world_size {world_size}" for world_size in TIMED_WORLD_SIZES)]
    rows = [[planner, *(f"{value:.2f}" for value in values.values())] for planner, values in times.items()]
    print(f"CPU-seconds to plan {count:,} lengths of set B\n{format_table(header, rows)}")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--granularity", type=int, default=1024, help="tokens; buckets are multiples of it")
    parser.add_argument("--timed_lengths", type=int, default=1_000_000, help="lengths planned for the times")
    parser.add_argument("--repeats", type=int, default=3, help="runs of which a time is the median")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    arguments = parser.parse_args()
    results = {
        "granularity": arguments.granularity,
        "seed": SEED,
        "sets": compare(arguments.granularity),
        "timed_lengths": arguments.timed_lengths,
        "cpu_seconds": measure_times(arguments.timed_lengths, arguments.granularity, arguments.repeats),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
