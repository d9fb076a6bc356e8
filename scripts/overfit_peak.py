"""Over-train a head on a handful of conversations and see the run keep its peak and stop behind it.

    python scripts/overfit_peak.py

The training loss goes on falling when the held-out acceptance length no longer rises. The head that is kept
is the one of the acceptance peak, and --patience ends the run a few validations later.
"""

import argparse
import json
import tempfile
from pathlib import Path

from eagle_train.config import TrainConfig
from eagle_train.train.loop import train
from eagle_train.train.output import METRICS
from eagle_train.train.report import format_table

TTT_STEPS = 3


def overfit(args: argparse.Namespace, output_dir: Path) -> None:
    train(
        TrainConfig(
            target="demo",
            data=("eagle_train/demo/train.jsonl",),
            eval_data=("eagle_train/demo/heldout.jsonl",),
            max_samples=args.num_samples,
            max_eval_samples=args.num_heldout,
            training_seq_len=1024,
            bucket_granularity=256,
            ttt_steps=TTT_STEPS,
            dtype="float32",
            # Constant and without decay, so that the head goes on memorising.
            learning_rate=args.learning_rate,
            min_lr_ratio=1.0,
            weight_decay=0.0,
            max_steps=args.steps,
            eval_every=args.eval_every,
            log_every=args.eval_every,
            patience=args.patience,
            torch_compile=False,
            num_threads=args.num_threads,
            output_dir=str(output_dir),
        )
    )


def format_course(output_dir: Path) -> str:
    """Losses and held-out acceptance length at each validation, and which head was kept."""
    events = [json.loads(line) for line in (output_dir / METRICS).read_text().splitlines()]
    train_loss = {event["step"]: event["loss"] for event in events if event["event"] == "train"}
    best_step = events[-1]["best_step"]
    rows = []
    for event in events:
        if event["event"] == "validation":
            step, length = event["step"], event["eval_acceptance_length"][str(TTT_STEPS)]
            loss = f"{train_loss[step]:.2f}" if step in train_loss else "-"
            kept = "kept" if step == best_step else ""
            rows.append([str(step), loss, f"{event['eval_loss']:.2f}", f"{length:.3f}", kept])
    header = ["step", "training loss", "held-out loss", f"acceptance length, n = {TTT_STEPS}", ""]
    return format_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_samples", type=int, default=20)
    parser.add_argument("--num_heldout", type=int, default=24)
    parser.add_argument("--learning_rate", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=200, help="at most")
    parser.add_argument("--eval_every", type=int, default=10, help="steps")
    parser.add_argument("--patience", type=int, default=4, help="validations")
    parser.add_argument("--num_threads", type=int, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        overfit(args, Path(directory) / "run")
        print(format_course(Path(directory) / "run"))


if __name__ == "__main__":
    main()
