"""Peak memory of a training step against the row length T, and its calculation for large sizes.

    python scripts/bench_memory.py --json memory.json
    python scripts/bench_memory.py --calculate 4096,128256,32000,8192

Measured: each T runs in a process of its own, on the CPU, with a target of random features, so that what
grows is the step's. "vocabulary": target labels and vocabulary loss with gradients, on supervised rows of
random states. "step": the whole of it, with backward and AdamW. The figure is the largest resident memory
during the step less the resident memory before it; a small step comes first, so that libraries and optimizer
state are not counted. Linux only (/proc).

Calculated: every tensor that is alive at once in the vocabulary work, for hidden size H, vocabulary V, draft
vocabulary V_d and row length T, beside what tensors of T x V would take; weights, which are there anyway, and
states that the draft layer keeps for its backward are not in it. For each measured T the same list at its
sizes stands beside the measurement.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from eagle_train.batch import PackedBatch
from eagle_train.config import TrainConfig
from eagle_train.data.collator import BucketingCollator
from eagle_train.files import write_json
from eagle_train.objective.losses import DEFAULT_CHUNK_ROWS, target_labels, vocabulary_loss
from eagle_train.objective.unroll import supervise
from eagle_train.train.evaluate import micro_batch_sums, step_weights
from eagle_train.train.optim import make_optimizer
from eagle_train.train.prepare import Prepared, prepare
from eagle_train.train.report import format_table

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True, slots=True)
class Live:
    """A tensor, or several alike. linear: its size grows with T; when: "labels", "loss" or "both"."""

    name: str
    shape: str
    num_bytes: int
    linear: bool
    when: str


def vocabulary_memory(
    hidden: int,
    vocab: int,
    draft_vocab: int,
    row_len: int,
    *,
    ttt_steps: int = 7,
    supervised_share: float = 0.5,
    element_bytes: int = 2,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
) -> list[Live]:
    """The tensors of the vocabulary work: while labels are made, and while a chunk's loss and gradient are.

    element_bytes: of the compute dtype; chunks hold float32 beside it.
    """
    rows_R0 = round(row_len * supervised_share)
    pairs = rows_R0 * ttt_steps

    def live(name: str, shape: str, elements: int, size: int, linear: bool, when: str = "both") -> Live:
        return Live(name, shape, elements * size, linear, when)

    e, chunk = element_bytes, min(chunk_rows, pairs)
    return [
        live("features: aux and final states", "T x 4H", row_len * 4 * hidden, e, True),
        live("draft states of all steps", "K x R0 x H", pairs * hidden, e, True),
        live("target restricted to the draft vocabulary", "R0 x V_d", rows_R0 * draft_vocab, e, True),
        live("a chunk of full logits, float32 passes", "C x V", chunk * vocab, e + 8, False, "labels"),
        live("a chunk of them restricted", "3 x C x V_d", 3 * chunk * draft_vocab, 4, False, "labels"),
        live("draft states, chosen and normed", "R x H", pairs * hidden, e, True, "loss"),
        live("their gradients", "R x H", pairs * hidden, e, True, "loss"),
        live("head weight, compute dtype", "V_d x H", draft_vocab * hidden, e % 4, False, "loss"),
        live("head weight's gradient, float32", "V_d x H", draft_vocab * hidden, 4, False, "loss"),
        live("a chunk of logits and target", "2 x C x V_d", 2 * chunk * draft_vocab, e, False, "loss"),
        live("the same and a product, float32", "3 x C x V_d", 3 * chunk * draft_vocab, 4, False, "loss"),
    ]  # fmt: skip


def peak(parts: list[Live]) -> int:
    """Bytes at the larger of the two moments."""
    moments = [[p.num_bytes for p in parts if p.when in (when, "both")] for when in ("labels", "loss")]
    return max(map(sum, moments))


def calculation(sizes: list[int]) -> str:
    hidden, vocab, draft_vocab, row_len = sizes
    parts = vocabulary_memory(hidden, vocab, draft_vocab, row_len)
    rows = [
        [part.name, part.shape, part.when, "yes" if part.linear else "no", f"{part.num_bytes / GIB:.2f}"]
        for part in parts
    ]
    rows.append(["peak", "", "", "", f"{peak(parts) / GIB:.2f}"])
    full, drafted = row_len * vocab * 4, round(row_len * 0.5) * 7 * draft_vocab * 4
    rows.append(["to compare: full logits, float32", "T x V", "", "yes", f"{full / GIB:.2f}"])
    rows.append(["to compare: draft logits, float32", "R x V_d", "", "yes", f"{drafted / GIB:.2f}"])
    title = (
        f"H = {hidden:,}, V = {vocab:,}, V_d = {draft_vocab:,}, T = {row_len:,}, K = 7, half of the rows "
        f"supervised (R0 = T / 2, R = K x R0), bfloat16, chunks of C = {DEFAULT_CHUNK_ROWS} rows"
    )
    return f"{title}\n{format_table(['tensor', 'shape', 'during', 'grows with T', 'GiB'], rows)}"


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (largest since the last reset), in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def make_batch(prepared: Prepared, row_len: int) -> PackedBatch:
    samples = prepared.data.train_samples
    return BucketingCollator(row_len)([samples[i] for i in range(row_len // 256)])


def child(args: argparse.Namespace) -> None:
    """Measure one T and print its bytes."""
    torch.set_num_threads(args.num_threads)
    hidden, vocab, draft_vocab = args.sizes
    config = TrainConfig(
        mock_data=True,
        mock_target=f"{hidden},8,{vocab}",
        mock_len="256",
        mock_num_samples=max(args.child // 256, 1),
        eval_fraction=0.0,
        draft_vocab_size=draft_vocab,
        training_seq_len=args.child,
        dtype=args.dtype,
        device="cpu",
    )
    prepared = prepare(config)
    optimizer = make_optimizer(prepared.head, config, 1e-4)
    work = whole_step if args.work == "step" else vocabulary_work
    for row_len in (256, args.child):
        batch = make_batch(prepared, row_len)
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew from what is resident now
        before = resident("VmRSS")
        work(prepared, batch, optimizer, config.ttt_steps)
    print(json.dumps({"bytes": resident("VmHWM") - before}))


def whole_step(
    prepared: Prepared, batch: PackedBatch, optimizer: torch.optim.Optimizer, ttt_steps: int
) -> None:
    weights = step_weights(batch.supervised_counts(ttt_steps), 0.8)
    micro_batch_sums(prepared.head, prepared.target, batch, weights).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def vocabulary_work(
    prepared: Prepared, batch: PackedBatch, optimizer: torch.optim.Optimizer, ttt_steps: int
) -> None:
    head, target = prepared.head, prepared.target
    supervision = supervise(batch.answer_remaining, ttt_steps)
    features = target.features(batch)
    labels = target_labels(
        target.logits, features.final_hidden[supervision.rows_R0 + 1], head.draft_token_ids, head.t2d
    )
    shape = (ttt_steps, len(supervision.rows_R0), head.config.hidden_size)
    states_KR0H = torch.randn(shape, dtype=target.dtype)
    normed_RH = states_KR0H[supervision.step_R, supervision.label_R - supervision.step_R].requires_grad_()
    weights = torch.full((len(normed_RH),), 1 / len(normed_RH))
    loss, _ = vocabulary_loss(
        normed_RH, head.lm_head.weight, labels, supervision.label_R, weights, head.draft_token_ids
    )
    loss.backward()
    head.zero_grad(set_to_none=True)


def measure(work: str, row_len: int, args: argparse.Namespace) -> int:
    """Bytes that the work adds at its peak, in a fresh process."""
    command = [sys.executable, __file__, "--child", str(row_len), "--work", work, "--dtype", args.dtype]
    command += ["--sizes", *map(str, args.sizes), "--num_threads", str(args.num_threads)]
    # Freed memory goes back at once, so that resident memory is what is in use.
    env = os.environ | {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(f"error: T = {row_len}, {work}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])["bytes"]


def measured(args: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {"sizes": args.sizes, "dtype": args.dtype, "rows": []}
    hidden, vocab, draft_vocab = args.sizes
    element_bytes = 2 if args.dtype == "bfloat16" else 4
    for row_len in tqdm(args.row_lens, desc="row lengths", unit="length", leave=False):
        parts = vocabulary_memory(hidden, vocab, draft_vocab, row_len, element_bytes=element_bytes)
        results["rows"].append(
            {
                "row_len": row_len,
                "vocabulary": measure("vocabulary", row_len, args),
                "vocabulary_calculated": peak(parts),
                "step": measure("step", row_len, args),
            }
        )
    return results


def report(results: dict[str, Any]) -> str:
    table, last = [], None
    for row in results["rows"]:
        cells = [f"{row[name] / MIB:,.0f}" for name in ("vocabulary", "vocabulary_calculated", "step")]
        slopes = [
            f"{(row[name] - last[name]) / (row['row_len'] - last['row_len']) / 1024:.1f}" if last else ""
            for name in ("vocabulary", "step")
        ]
        table.append([f"{row['row_len']:,}", *cells, *slopes])
        last = row
    header = ["T", "vocabulary MiB", "calculated MiB", "step MiB", "vocabulary KiB/row", "step KiB/row"]
    title = "H, V, V_d = {}, {}, {}; {}, K = 7, half of the rows supervised, eager, CPU".format(
        *results["sizes"], results["dtype"]
    )
    note = "  KiB/row: what each row beyond the line above adds; the same on every line is linear."
    return f"{title}\n{format_table(header, table)}\n{note}"


def main() -> None:
    args = parse_args()
    if args.child:
        child(args)
        return
    if args.calculate:
        print(calculation(args.calculate))
        return
    results = measured(args)
    print(report(results))
    print(calculation([4096, 128_256, 32_000, 8192]))
    if args.json:
        write_json(args.json, results)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--row_lens", type=int, nargs="+", default=[2048, 4096, 8192, 16384], help="T, multiples of 256")
    add("--sizes", type=int, nargs=3, default=[256, 8192, 2048], help="H, V, V_d of the measured runs")
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add("--num_threads", type=int, default=1)
    add("--json", type=Path, metavar="FILE", help="write the figures there, too")
    add(
        "--calculate",
        type=lambda text: [int(part) for part in text.split(",")],
        metavar="H,V,V_d,T",
        help="only calculate, for these sizes",
    )
    add("--child", type=int, help=argparse.SUPPRESS)
    add("--work", choices=("vocabulary", "step"), default="step", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if wrong := [row_len for row_len in args.row_lens if row_len < 256 or row_len % 256]:
        parser.error(f"--row_lens has {wrong[0]}; give multiples of 256")
    return args


if __name__ == "__main__":
    main()
