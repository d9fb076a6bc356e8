"""What each rank of tests/train/test_ranks_exactly.py does: one start of the processes, many measurements.

    python -c "from tests.train.rank_cases import main; main()" DIRECTORY FLAG ...

FLAG ...: options of every training run. Rank r of R leaves R-r.json and R-r.safetensors in DIRECTORY.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle_train.__main__ import main as command
from eagle_train.config import TrainConfig
from eagle_train.data.collator import BucketingCollator
from eagle_train.data.samples import Sample, answer_remaining_from_spans
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.target import FrozenTarget
from eagle_train.model.target_config import draft_config
from eagle_train.objective.acceptance import AcceptanceTotals
from eagle_train.objective.losses import PLAIN_CHUNKS
from eagle_train.objective.unroll import UnrolledSums
from eagle_train.train import loop
from eagle_train.train.distributed import Ranks, data_parallel, join, leave
from eagle_train.train.evaluate import evaluate, walk_lengths
from eagle_train.train.state import RunState
from tests.tiny import tiny_target

K = 3
# Supervised rows of each document of each micro-batch of a global batch; micro-batch i goes to rank i % R.
GLOBAL_BATCHES: dict[str, list[tuple[int, ...]]] = {
    "uneven micro-batches": [(1,), (120, 80), (3,), (50,), (7, 0, 2), ()],
    "one rank is empty": [(9, 4), (), ()],
    "one rank has nothing supervised": [(0, 0), (6, 1), (2,)],
    "a window that ends unsupervised": [(5, 30), (1,), (2,), (0,), (), (0, 0)],
}
VALIDATION_LENGTHS = (60, 7, 31, 12, 5, 40, 9)
FAULTY_STEP = 3


def document(number: int, length: int, num_supervised: int) -> Sample:
    """Random tokens that end in an answer with so many rows supervised at step 0."""
    ids = np.random.default_rng(number).integers(3, 90, length).astype(np.int32)
    spans = [(length - num_supervised - 1, length)] if num_supervised else []
    return Sample(ids, answer_remaining_from_spans(length, spans), f"s:{number}")


def new_head(target: FrozenTarget) -> Eagle3DraftHead:
    """The draft vocabulary leaves a part of the target's out, so that not every supervised row is trained."""
    torch.manual_seed(0)
    head = Eagle3DraftHead(draft_config(target, 80))
    head.set_vocabulary(torch.arange(8, 88))
    return head


def gradients_of(
    ranks: Ranks, target: FrozenTarget, micro_batches: Sequence[tuple[int, ...]]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The loop's own optimizer step on a global batch: its sums over ranks, and the gradients that its
    optimizer is given (clipping is out of reach).
    """
    head = new_head(target)
    gradients: dict[str, Tensor] = {}

    def keep() -> None:
        for name, parameter in head.named_parameters():
            assert parameter.grad is not None
            gradients[name] = parameter.grad.clone()

    run: Any = SimpleNamespace(
        config=TrainConfig(ttt_steps=K, max_grad_norm=1e9),
        state=RunState(),
        prepared=SimpleNamespace(head=head, target=target),
        ranks=ranks,
        module=data_parallel(head, ranks),
        chunks=PLAIN_CHUNKS,
        compiled=None,
        optimizer=SimpleNamespace(param_groups=[{}], step=keep, zero_grad=lambda **_: head.zero_grad()),
        learning_rate=1e-3,
        num_steps=10,
    )
    padded = [*micro_batches, *[()] * (-len(micro_batches) % ranks.world_size)]
    documents = [
        [document(10 * place + i, count + 5, count) for i, count in enumerate(counts)]
        for place, counts in enumerate(padded)
    ]
    window = [BucketingCollator(16)(pack) for pack in documents[ranks.rank :: ranks.world_size]]
    totals, loss = AcceptanceTotals(K, walk_lengths(K)), 0.0
    for sums, batch in zip(loop.train_step(run, window), window, strict=True):
        totals.add(sums, batch.answer_remaining.numpy())
        loss += float(sums.loss) / ranks.world_size
    totals = totals.from_list(ranks.sum(totals.as_list()))
    measured = {
        "loss": ranks.sum([loss])[0],
        "micro_batches": len(window),
        "supervised_rows": ranks.gather(sum(batch.supervised_counts(K)[0] for batch in window)),
        "sums": {name: values.tolist() for name, values in totals.sums.items()},
        "metrics": totals.metrics(0.8),
    }
    return measured, gradients


def validations_of(ranks: Ranks, target: FrozenTarget) -> dict[str, Any]:
    """Four and seven documents at several capacities, and in padded rows."""
    head = new_head(target)
    samples = [document(i, length, length - 4) for i, length in enumerate(VALIDATION_LENGTHS)]
    return {
        f"{count} documents, {form}": evaluate(
            head,
            target,
            samples[:count],
            ttt_steps=K,
            bucket_granularity=32,
            ranks=ranks,
            progress=False,
            **options,
        )
        for count in (4, len(samples))
        for form, options in {
            "rows of 64": {"training_seq_len": 64},
            "rows of 128": {"training_seq_len": 128},
            "rows of 256": {"training_seq_len": 256},
            "padded": {"training_seq_len": 64, "padding_free": False, "batch_size": 2},
        }.items()
    }


def spoil_loss(sums: UnrolledSums) -> UnrolledSums:
    """The loss alone: gradients stay finite, so only the rank itself can see it."""
    return replace(sums, loss=sums.loss + float("nan"))


def spoil_gradient(sums: UnrolledSums) -> UnrolledSums:
    return replace(sums, loss=sums.loss * float("nan"))


@contextmanager
def fault_on_rank_1(spoil: Callable[[UnrolledSums], UnrolledSums]) -> Iterator[None]:
    """The loop's FAULTY_STEP with what `spoil` makes of rank 1's sums."""
    whole_step, whole_sums = loop.train_step, loop.micro_batch_sums

    def step(run: Any, window: Any) -> list[UnrolledSums]:
        if run.ranks.rank == 1 and run.state.step == FAULTY_STEP - 1:
            loop.micro_batch_sums = lambda *args, **options: spoil(whole_sums(*args, **options))
        try:
            return whole_step(run, window)
        finally:
            loop.micro_batch_sums = whole_sums

    loop.train_step = step
    try:
        yield
    finally:
        loop.train_step = whole_step


def measure(ranks: Ranks, directory: Path) -> None:
    """Everything that one process and several must agree on."""
    target = tiny_target()
    results: dict[str, Any] = {"steps": {}, "validation": validations_of(ranks, target)}
    gradients: dict[str, Tensor] = {}
    for name, micro_batches in GLOBAL_BATCHES.items():
        results["steps"][name], of_step = gradients_of(ranks, target, micro_batches)
        gradients |= {f"{name}/{parameter}": value for parameter, value in of_step.items()}
    stem = directory / f"{ranks.world_size}-{ranks.rank}"
    save_file(gradients, f"{stem}.safetensors")
    Path(f"{stem}.json").write_text(json.dumps(results))


def train_all(ranks: Ranks, directory: Path, flags: Sequence[str]) -> dict[str, int]:
    """The runs that directory/runs.json names, with their exit codes."""
    runs: dict[str, list[str]] = json.loads((directory / "runs.json").read_text())
    return {
        name: command([*flags, *own, "--output_dir", str(directory / f"{name}-{ranks.world_size}")])
        for name, own in runs.items()
    }


def main() -> None:
    """Of one rank. The process group stays the same over all runs; the last run, with a fault, ends it."""
    torch.set_num_threads(1)
    directory, *flags = sys.argv[1:]
    ranks = join(True, 60)
    measure(ranks, Path(directory))
    loop.join, loop.leave = lambda *_: ranks, lambda: None
    codes = train_all(ranks, Path(directory), flags)
    faulty = [*flags, "--data", f"{directory}/many.jsonl", "--tokens_per_step", "256"]
    with fault_on_rank_1(spoil_gradient):
        codes["gradient"] = command([*faulty, "--output_dir", f"{directory}/gradient-{ranks.world_size}"])
    Path(directory, f"{ranks.world_size}-{ranks.rank}-codes.json").write_text(json.dumps(codes))
    loop.leave = leave
    with fault_on_rank_1(spoil_loss):
        sys.exit(command([*faulty, "--output_dir", f"{directory}/loss-{ranks.world_size}"]))
