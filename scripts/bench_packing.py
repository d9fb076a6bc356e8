"""Batch form against batch form: the same samples trained once under each, in real tokens per second.

    python scripts/bench_packing.py                                       # four minutes on two idle cores
    python scripts/bench_packing.py --data train.jsonl --data_target DIR  # eight

A step is the target's forward, the unrolled loss, its backward, clipping and AdamW, as in training; batches
are made before the clock starts. Dropped tokens do not count. "padded": rows as long as the step's longest
sample; "buckets": rounded up to --bucket_granularity; "flat": laid end to end, nothing rounded; "packed":
rows of --training_seq_len tokens. The ranks of a step have rows of one length. Forms differ in samples per
optimizer step too: set a packed row beside the flat batch of about as many tokens to see the plan alone. On
one rank v1 and v2 make the same plan, so what they differ by there is noise.

Two ranks are replayed: one machine runs every rank's batch of a step in turn, and the step lasts as long as
the slowest of them and one optimizer step. Communication is not counted.

Data sets. "flan-like": random tokens; lengths are lognormal, sigma 1.0, mean 250 before they are clipped to
--training_seq_len (median 150, p95 780). There is no FLAN here; known of it are short samples of very unlike
lengths, and what padding cost: 1.8x to 2.0x at batch 4, 2.5x to 2.8x at batch 8 in the padding-free pull
request (foundation-model-stack/fms-hf-tuning#280). 6,000 of these lengths, clipped to 2048, fill padded
batches to 46 % and 33 % on one rank, which would bound the gain by 2.2x and 3.0x. They are like FLAN in that
shape only. "data": conversations; lengths and answers are theirs, but token ids are taken modulo the
target's vocabulary, because another model's tokenizer may have read them.

Noise: forms take turns, a few steps each; one warm-up step per form; each time is the median of --repeats.
"""

import argparse
import json
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from eagle_train.bundled import DEMO, DEMO_NAME
from eagle_train.config import TrainConfig
from eagle_train.data.collator import BucketingCollator
from eagle_train.data.loader import PlannedBatches
from eagle_train.data.packing import shuffled
from eagle_train.data.plan_figures import Floats, PlanFigures, plan_figures
from eagle_train.data.samples import Sample
from eagle_train.errors import InputError
from eagle_train.train.evaluate import micro_batch_sums
from eagle_train.train.loop import step_weights, supervised_counts
from eagle_train.train.optim import make_optimizer, peak_learning_rate
from eagle_train.train.plan import ANY_VOCABULARY
from eagle_train.train.prepare import Prepared, load_tokenizer, prepare
from eagle_train.train.report import format_table
from eagle_train.train.schedule import Schedule
from eagle_train.train.splits import prepare_data

WORLD_SIZES = (1, 2)
CHUNKS = 8  # turns in which a form takes its steps
PADDED: dict[str, Any] = {"packing": "none", "padding_free": False}
FLAT: dict[str, Any] = {"packing": "none", "bucket_granularity": 1}
FORMS: dict[str, dict[str, Any]] = {
    "padded 4": PADDED | {"batch_size": 4, "bucket_granularity": 1},
    "padded 8": PADDED | {"batch_size": 8, "bucket_granularity": 1},
    "padded 4, buckets": PADDED | {"batch_size": 4},
    "padded 8, buckets": PADDED | {"batch_size": 8},
    "flat 4": FLAT | {"batch_size": 4},
    "flat 8": FLAT | {"batch_size": 8},
    "packed, multipack v1": {"packing": "multipack_v1"},
    "packed, multipack v2": {"packing": "multipack_v2"},
    "packed, multipack": {"packing": "multipack"},
}
BASELINES = ("padded 4", "padded 8")
COLUMNS = {"steps": ",", "samples": ",", "tokens": ",", "fill": ".1%", "tokens_per_second": ",.0f",
           **{f"/ {name}": ".2f" for name in BASELINES},
           "seconds": ".1f", "waits": ".1%", "spread": ".1%"}  # fmt: skip
LEGEND = (
    "  fill: real tokens / computed slots. waits: of the ranks' time, for the slowest of a step.\n"
    "  spread: slowest less fastest repeat, as a share of the time shown."
)


@dataclass(slots=True)
class Case:
    """One form on one number of ranks. repeats: seconds `[steps, ranks + 1]`, the optimizer's last."""

    form: str
    ranks: list[PlannedBatches]
    figures: PlanFigures
    repeats: list[Floats] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Trainer:
    """What a step needs. All forms train the same head: what it has learned does not change its speed."""

    prepared: Prepared
    config: TrainConfig
    optimizer: torch.optim.AdamW

    def step(self, ranks: Sequence[PlannedBatches], index: int) -> list[float]:
        """One optimizer step over the ranks' batches; seconds of each batch, then of the optimizer."""
        head, target, config = self.prepared.head, self.prepared.target, self.config
        batches = [rank[index] for rank in ranks]
        counts_K = supervised_counts(batches, config.ttt_steps)
        step_weight_K = step_weights(counts_K, config.step_decay).to(target.device)
        clock = [self._now()]
        for batch in batches:
            micro_batch_sums(head, target, batch, step_weight_K).loss.backward()
            clock.append(self._now())
        torch.nn.utils.clip_grad_norm_(head.parameters(), config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        clock.append(self._now())
        return np.diff(clock).tolist()

    def _now(self) -> float:
        if self.prepared.target.device.type == "cuda":
            torch.cuda.synchronize(self.prepared.target.device)
        return time.perf_counter()


def make_case(form: str, samples: Sequence[Sample], config: TrainConfig, world_size: int) -> Case:
    config = replace(config, **FORMS[form])
    schedule = Schedule([len(sample) for sample in samples], config, world_size)
    plan = schedule.epoch_plan(0)
    collator = BucketingCollator(config.granularity, config.padding_free)
    return Case(
        form=form,
        ranks=[PlannedBatches(samples, plan, collator, rank) for rank in range(world_size)],
        figures=plan_figures(plan, schedule.lengths, padding_free=config.padding_free),
    )


def measure(trainer: Trainer, cases: Sequence[Case], repeats: int, title: str) -> None:
    """Fill in the cases' times, all of them in turn."""
    slots = repeats * sum(case.figures.slots for case in cases)
    with tqdm(total=slots, desc=title, unit="slot", unit_scale=True, leave=False, dynamic_ncols=True) as bar:
        for case in cases:
            case.repeats = [np.zeros((case.figures.num_steps, len(case.ranks) + 1)) for _ in range(repeats)]
            if case.figures.num_steps:
                trainer.step(case.ranks, 0)  # warm-up
        for repeat in range(repeats):
            for chunk in range(CHUNKS):
                for case in cases:
                    bar.set_postfix_str(f"{case.form}, {len(case.ranks)} ranks", refresh=False)
                    for index in np.array_split(np.arange(case.figures.num_steps), CHUNKS)[chunk].tolist():
                        case.repeats[repeat][index] = trainer.step(case.ranks, index)
                        bar.update(case.figures.slots / case.figures.num_steps)


def elapsed(times: Floats) -> float:
    """Seconds of synchronous steps: each waits for its slowest rank."""
    return float(times[:, :-1].max(axis=1).sum() + times[:, -1].sum())


def all_figures(cases: Sequence[Case]) -> dict[str, dict[str, Any]]:
    """What each form trained, how fast, and that as a multiple of each baseline's speed."""
    forms: dict[str, dict[str, Any]] = {}
    for case in cases:
        median = np.median(case.repeats, axis=0)
        seconds = max(elapsed(median), 1e-9)  # a plan may drop everything
        runs = [elapsed(times) for times in case.repeats]
        busy = float(median[:, :-1].sum()) / len(case.ranks) + float(median[:, -1].sum())
        forms[case.form] = {
            "steps": case.figures.num_steps,
            "fill": case.figures.fill,
            "samples": len(case.ranks[0].plan.samples),
            "tokens": case.figures.tokens,
            "tokens_per_second": case.figures.tokens / seconds,
            "seconds": seconds,
            "waits": 1 - busy / seconds if busy else 0.0,
            "spread": (max(runs) - min(runs)) / seconds,
            "seconds_of_repeats": runs,
            "plan": asdict(case.figures),
        }
    for figures in forms.values():
        for name in BASELINES:
            figures[f"/ {name}"] = figures["tokens_per_second"] / forms[name]["tokens_per_second"]
    return forms


def compare(name: str, samples: list[Sample], trainer: Trainer, repeats: int) -> dict[str, Any]:
    """Measure and print the tables of one data set; returns its figures."""
    cases = [make_case(form, samples, trainer.config, ranks) for ranks in WORLD_SIZES for form in FORMS]
    measure(trainer, cases, repeats, name)
    lengths = np.array([len(sample) for sample in samples])
    facts = {"samples": len(lengths), "tokens": lengths.sum(), "mean": lengths.mean(), "max": lengths.max()}
    facts |= {f"p{share}": np.percentile(lengths, share) for share in (50, 95)}
    print(f"{name}: {', '.join(f'{key} {value:,.0f}' for key, value in facts.items())}")
    results: dict[str, Any] = {"lengths": {key: float(value) for key, value in facts.items()}, "ranks": {}}
    for ranks in WORLD_SIZES:
        forms = results["ranks"][ranks] = all_figures([case for case in cases if len(case.ranks) == ranks])
        rows = [[form, *(format(figures[key], spec) for key, spec in COLUMNS.items())]
                for form, figures in forms.items()]  # fmt: skip
        title = "1 rank" if ranks == 1 else f"{ranks} ranks, replayed, communication not counted"
        print(f"{name}, {title}\n{format_table(['form', *COLUMNS], rows)}\n", flush=True)
    return results


def read_data(path: Path, data_target: str, trainer: Trainer, num_samples: int) -> list[Sample]:
    """A random choice of the conversations as `data_target` tokenises them, ids within the vocabulary."""
    target, config = trainer.prepared.target, trainer.config
    path = path / "train.jsonl" if path.is_dir() else path
    config = TrainConfig(
        target=data_target, data=(str(path),), eval_fraction=0.0, seed=config.seed,
        training_seq_len=config.training_seq_len, bucket_granularity=config.bucket_granularity,
    )  # fmt: skip
    name = str(DEMO / "target") if data_target == DEMO_NAME else data_target
    longest = getattr(target.config, "max_position_embeddings", None)
    data = prepare_data(config, load_tokenizer(name, config), ANY_VOCABULARY, longest)
    chosen = shuffled(len(data.train_samples), config.seed, 0)[:num_samples].tolist()
    samples = [data.train_samples[index] for index in chosen]
    return [replace(sample, input_ids=sample.input_ids % target.vocab_size) for sample in samples]


def cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", path.read_text() if path.exists() else "")
    return found[1] if found else platform.processor()


def machine(prepared: Prepared) -> dict[str, Any]:
    device = prepared.target.device
    return {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "dtype": str(prepared.target.dtype).removeprefix("torch."),
        "target": prepared.target_name,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--target", help="Hugging Face id or directory; none: the bundled demo target")
    add("--mock_target", metavar="H,L,V", help="hidden,layers,vocab: random features, no target forward")
    add("--data", type=Path, help="JSONL file of conversations, or a directory with train.jsonl")
    add("--data_target", help="model whose tokenizer reads --data; none: the target's own, or the demo's")
    add("--samples", type=int, default=96, help="samples of each data set")
    add("--repeats", type=int, default=1, help="passes over them, of which times are the median")
    add("--mock_len", help="lengths of the first data set; none: lognormal:250:training_seq_len (tokens)")
    add("--training_seq_len", type=int, default=2048, help="longest sample, and a packed row (tokens)")
    add("--bucket_granularity", type=int, default=1024, help="buckets are multiples of it (tokens)")
    add("--ttt_steps", type=int, default=7, help="K, length of the unroll (steps)")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="as in training")
    add("--device", default="auto", help="as in training")
    add("--num_threads", type=int, help="CPU threads; none: PyTorch's choice")
    add("--seed", type=int, default=0, help="of samples and their order")
    add("--json", type=Path, metavar="FILE", help="write the figures there, too")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error(f"--repeats is {arguments.repeats}; it must be at least 1")
    return arguments


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.num_threads:
        torch.set_num_threads(arguments.num_threads)
    taken = ("mock_target", "training_seq_len", "bucket_granularity", "ttt_steps", "dtype", "device", "seed")
    config = TrainConfig(
        target=arguments.target or (None if arguments.mock_target else DEMO_NAME),
        mock_data=True,
        mock_num_samples=arguments.samples,
        mock_len=arguments.mock_len or f"lognormal:250:{arguments.training_seq_len}",
        eval_fraction=0.0,
        **{name: getattr(arguments, name) for name in taken},
    )
    prepared = prepare(config)
    learning_rate = peak_learning_rate(config, prepared.head.config.hidden_size)
    trainer = Trainer(prepared, config, make_optimizer(prepared.head, config, learning_rate))
    results = {"machine": machine(prepared), "settings": config.to_dict() | {"repeats": arguments.repeats}}
    print(", ".join(f"{name} {value}" for name, value in results["machine"].items()))
    sets = {"flan-like": list(prepared.data.train_samples)}
    if arguments.data:
        name = arguments.data_target or arguments.target or DEMO_NAME
        sets["data"] = read_data(arguments.data, name, trainer, arguments.samples)
    else:
        print("data: skipped, --data names no conversations")
    print(f"{LEGEND}\n", flush=True)
    for name, samples in sets.items():
        results[name] = compare(name, samples, trainer, arguments.repeats)
    return results


def main() -> None:
    arguments = parse_arguments()
    try:
        results = run(arguments)
    except InputError as error:
        raise SystemExit(f"error: {error}") from error
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
