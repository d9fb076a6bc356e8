"""Draw one packed, bucketed step: which documents share a row, what is supervised, where the padding lies.

    python scripts/draw_batch.py --out scripts/packed_batch.png

Takes the bundled demo's conversations; needs the extra `plot`.
"""

import argparse
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from transformers import AutoTokenizer

from eagle_train.batch import PackedBatch
from eagle_train.bundled import DEMO
from eagle_train.data.collator import BucketingCollator
from eagle_train.data.loader import PlannedBatches
from eagle_train.data.loading import load_samples
from eagle_train.data.packing import Plan, plan_multipack

DOCUMENT_COLOURS = ("#cfd8e3", "#b4c3d6")
SUPERVISED, PADDING = "#e07a3f", "#ffffff"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("packed_batch.png"))
    parser.add_argument("--training_seq_len", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--bucket_granularity", type=int, default=256, help="tokens")
    parser.add_argument("--world_size", type=int, default=4, help="ranks")
    parser.add_argument("--samples", type=int, default=300, help="conversations that are planned")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(str(DEMO / "target"))
    samples, _ = load_samples(
        [DEMO / "train.jsonl"],
        tokenizer,
        vocab_size=len(tokenizer),
        max_rows=args.samples,
    )
    plan = plan_multipack(
        [len(sample) for sample in samples],
        args.training_seq_len,
        world_size=args.world_size,
        granularity=args.bucket_granularity,
    )
    collator = BucketingCollator(args.bucket_granularity)
    figure, rows = plt.subplots(2, 1, figsize=(11, 4.6), layout="constrained")
    for axes, step, title in zip(
        rows, (0, plan.num_steps - 1), ("A full step", "The epoch's last step"), strict=True
    ):
        batches = [PlannedBatches(samples, plan, collator, rank)[step] for rank in range(args.world_size)]
        draw_step(axes, batches, args.training_seq_len)
        axes.set_title(describe(title, plan, step, batches), loc="left", fontsize=10)
    figure.legend(
        handles=[
            Patch(color=DOCUMENT_COLOURS[1], label="documents, end to end"),
            Patch(color=SUPERVISED, label="supervised rows"),
            Patch(facecolor=PADDING, edgecolor="#888888", hatch="////", label="padding up to the bucket"),
        ],
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    figure.savefig(args.out, dpi=110)


def draw_step(axes: Axes, batches: list[PackedBatch], row_len: int) -> None:
    """One bar a rank: documents in two shades, supervised rows over them, the padded tail hatched."""
    for rank, batch in enumerate(batches):
        for number, (start, stop) in enumerate(pairwise(batch.offsets)):
            is_padding = start >= batch.num_tokens
            axes.broken_barh(
                [(start, stop - start)],
                (rank - 0.4, 0.8),
                facecolor=PADDING if is_padding else DOCUMENT_COLOURS[number % 2],
                edgecolor="#888888" if is_padding else "#5b6b7d",
                hatch="////" if is_padding else None,
                linewidth=0.6,
            )
        supervised = (batch.answer_remaining >= 2).nonzero().squeeze(1).tolist()
        axes.broken_barh([(row, 1) for row in supervised], (rank - 0.4, 0.3), facecolor=SUPERVISED)
    axes.set_yticks(range(len(batches)), [f"rank {rank}" for rank in range(len(batches))])
    axes.invert_yaxis()
    axes.set_xlim(0, row_len)
    axes.set_xlabel("slot")
    axes.spines[["top", "right"]].set_visible(False)


def describe(title: str, plan: Plan, step: int, batches: list[PackedBatch]) -> str:
    tokens, slots = sum(b.num_tokens for b in batches), sum(b.num_slots for b in batches)
    return (
        f"{title}: bucket {plan.bucket_lens[step]:,}, {sum(len(b.sources) for b in batches)} documents, "
        f"fill {tokens / slots:.1%}"
    )


if __name__ == "__main__":
    main()
