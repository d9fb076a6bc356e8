"""How documents are packed, padded and accumulated changes no sum, no gradient and no weight."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

import eagle_train.objective.unroll as unroll
from eagle_train.batch import PackedBatch
from eagle_train.config import TrainConfig
from eagle_train.data.collator import BucketingCollator
from eagle_train.data.samples import Sample
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.target import FrozenTarget
from eagle_train.objective.acceptance import AcceptanceTotals
from eagle_train.objective.losses import RowStatistics
from eagle_train.objective.unroll import UnrolledSums, supervise
from eagle_train.train.distributed import Ranks, data_parallel
from eagle_train.train.evaluate import evaluate, micro_batch_sums
from eagle_train.train.loop import Run, step_weights, supervised_counts, train_step
from eagle_train.train.optim import make_optimizer
from eagle_train.train.prepare import Prepared
from eagle_train.train.report import MetricsLog
from eagle_train.train.schedule import Schedule
from eagle_train.train.splits import PreparedData, fit_length
from eagle_train.train.state import RunState
from tests.documents import (
    Spans,
    document,
    documents_of,
    fitted_head,
    random_head,
    supervised_pairs,
    with_own_tokens,
)
from tests.tiny import tiny_target

K = 4
# Lengths beside every bucket edge; two documents of one token; one without supervision; answers that begin at
# token 0, end with the document, touch each other, and have one or two tokens.
SHAPES: list[tuple[int, Spans]] = [
    (23, [(4, 9), (12, 20)]),
    (1, []),
    (37, [(3, 4), (8, 10), (10, 22), (30, 37)]),
    (13, []),
    (1, [(0, 1)]),
    (19, [(0, 6), (9, 19)]),
    (11, [(5, 9)]),
]
COUNTS = ("supervised_rows", "loss_rows", "top1_hits", "prefix_hits", "own_tokens", "own_token_rows")
SUMS = ("loss", "loss_sum", "acceptance_sum")
Form = tuple[BucketingCollator, list[list[int]]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return tiny_target()


@pytest.fixture(scope="module")
def samples(target: FrozenTarget) -> list[Sample]:
    return with_own_tokens(target, documents_of(*SHAPES))


@pytest.fixture(scope="module")
def head(target: FrozenTarget, samples: list[Sample]) -> Eagle3DraftHead:
    return fitted_head(target, 48, samples, K)


@dataclass(frozen=True)
class Measured:
    """Totals over micro-batches, the hits of each document, and the head's gradients."""

    totals: dict[str, Tensor]
    hits_of: dict[str, Tensor]
    grads: dict[str, Tensor]


def measure(
    head: Eagle3DraftHead, target: FrozenTarget, batches: list[PackedBatch], ttt_steps: int = K
) -> Measured:
    weights = step_weights(supervised_counts(batches, ttt_steps), 0.8)
    head.zero_grad()
    totals: dict[str, Tensor] = {}
    hits_of: dict[str, Tensor] = {}
    for batch in batches:
        sums = micro_batch_sums(head, target, batch, weights)
        sums.loss.backward()
        for name in (*COUNTS, *SUMS):
            value = torch.as_tensor(getattr(sums, name)).detach()
            totals[name] = totals.get(name, torch.zeros_like(value)) + value
        hits_of |= hits_by_document(sums, batch)
    grads = {name: cast(Tensor, parameter.grad).clone() for name, parameter in head.named_parameters()}
    return Measured(totals, hits_of, grads)


def hits_by_document(sums: UnrolledSums, batch: PackedBatch) -> dict[str, Tensor]:
    """`[K, L]` of each real document, found again by its restarting positions."""
    lengths = {f"document {seed}": length for seed, (length, _) in enumerate(SHAPES)}
    starts = batch.offsets if batch.num_rows == 1 else range(0, batch.num_slots, batch.bucket_len)
    return {
        source: sums.hits_KT[:, start : start + lengths[source]]
        for source, start in zip(batch.sources, starts, strict=False)
    }


def assert_same(measured: Measured, expected: Measured) -> None:
    """Counts and hits exactly; sums to 1e-5 relative; gradients to 1e-5 of each tensor's largest entry."""
    for name in COUNTS:
        torch.testing.assert_close(measured.totals[name], expected.totals[name], rtol=0, atol=0, msg=name)
    for name in SUMS:
        torch.testing.assert_close(measured.totals[name], expected.totals[name], rtol=1e-5, atol=1e-6)
    assert measured.hits_of.keys() == expected.hits_of.keys()
    for source, hits in expected.hits_of.items():
        assert torch.equal(measured.hits_of[source], hits), source
    for name, grad in expected.grads.items():
        limit = 1e-5 * grad.abs().max().item()
        torch.testing.assert_close(measured.grads[name], grad, rtol=0, atol=limit, msg=f"gradient of {name}")


def separately() -> Form:
    return BucketingCollator(1), [[index] for index in range(len(SHAPES))]


FORMS: dict[str, Form] = {
    f"{name}-{granularity}": (BucketingCollator(granularity, padding_free), groups)
    for granularity in (1, 16, 64)
    for name, padding_free, groups in (
        ("one pack", True, [[0, 1, 2, 3, 4, 5, 6]]),
        ("two packs", True, [[6, 3, 1, 5], [2, 0, 4]]),
        ("alone", True, [[index] for index in range(len(SHAPES))]),
        ("one padded batch", False, [[0, 1, 2, 3, 4, 5, 6]]),
        ("two padded batches", False, [[6, 3, 1, 5], [2, 0, 4]]),
    )
}
del FORMS["alone-1"]  # what all others are compared with


def batches_of(form: Form, samples: list[Sample]) -> list[PackedBatch]:
    collator, groups = form
    return [collator([samples[index] for index in group]) for group in groups]


def test_the_documents_hold_every_case_that_matters(samples: list[Sample], each_alone: Measured) -> None:
    batches = batches_of(separately(), samples)
    totals = each_alone.totals
    pairs = Counter(step for length, spans in SHAPES for _, step in supervised_pairs(length, spans, K))
    assert totals["supervised_rows"].tolist() == [pairs[step] for step in range(K)]
    assert sum(batch.supervised_counts(K)[0] == 0 for batch in batches) == 3
    assert (totals["loss_rows"] > 0).all(), "some arg-maxes can be drafted"
    assert (totals["loss_rows"] < totals["supervised_rows"]).all(), "some cannot"
    assert (totals["top1_hits"] > 1).all(), "hits"
    assert totals["top1_hits"].sum() < totals["loss_rows"].sum(), "and misses within the vocabulary"
    assert (totals["prefix_hits"] > 0).sum() >= 2
    assert 0 < totals["own_tokens"] < totals["own_token_rows"]


@pytest.fixture(scope="module")
def each_alone(target: FrozenTarget, head: Eagle3DraftHead, samples: list[Sample]) -> Measured:
    return measure(head, target, batches_of(separately(), samples))


@pytest.mark.parametrize("form", FORMS)
def test_batching_changes_no_sum_no_hit_and_no_gradient(
    target: FrozenTarget, head: Eagle3DraftHead, samples: list[Sample], each_alone: Measured, form: str
) -> None:
    batches = batches_of(FORMS[form], samples)
    assert all(batch.bucket_len % FORMS[form][0].bucket_granularity == 0 for batch in batches)
    assert_same(measure(head, target, batches), each_alone)


def kept_bytes(head: Eagle3DraftHead, target: FrozenTarget, batch: PackedBatch) -> int:
    """Bytes of distinct storages that the forward keeps for its backward, parameters aside."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in head.parameters()}
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        sums = micro_batch_sums(head, target, batch, torch.ones(K))
        del sums
    return sum(kept.values())


def test_gradient_checkpointing_keeps_less_and_changes_nothing(
    target: FrozenTarget, head: Eagle3DraftHead, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = batches_of(FORMS["two packs-16"], samples)
    expected, kept = measure(head, target, batches), kept_bytes(head, target, batches[0])
    monkeypatch.setattr(head, "gradient_checkpointing", True)
    assert_same(measure(head, target, batches), expected)
    assert kept_bytes(head, target, batches[0]) < 0.7 * kept


def new_run(
    target: FrozenTarget, head: Eagle3DraftHead, directory: Path, num_steps: int = 4, **changes: Any
) -> Run:
    config = TrainConfig(ttt_steps=K, learning_rate=1e-3, output_dir=str(directory), **changes)
    nothing = cast(Any, None)
    none = np.zeros(0, dtype=np.int64)
    data = PreparedData([], none, none, [], nothing, None)
    return Run(
        config=config,
        prepared=Prepared(target, "tiny", head, data, 1.0, 1.0),
        schedule=Schedule([16], config, world_size=1),
        ranks=Ranks(),
        module=data_parallel(head, Ranks()),
        optimizer=make_optimizer(head, config, 1e-3),
        learning_rate=1e-3,
        num_steps=num_steps,
        output_dir=directory,
        state=RunState(),
        log=MetricsLog(directory / "metrics.jsonl"),
        baseline={},
    )


def document_with_rows(num_rows: int, seed: int) -> Sample:
    """A document of which exactly `num_rows` rows are supervised at step 0: an answer of num_rows + 1."""
    return document(num_rows + 5, [(3, num_rows + 4)], seed)


def split_evenly(samples: Sequence[Sample], parts: int) -> list[list[Sample]]:
    size = math.ceil(len(samples) / parts)
    return [list(samples[start : start + size]) for start in range(0, len(samples), size)]


def weights_after_two_steps(target: FrozenTarget, directory: Path, accumulation: int) -> dict[str, Tensor]:
    head = random_head(target, draft_vocab_size=48)
    run = new_run(target, head, directory)
    for step in range(2):
        samples = [document_with_rows(rows, 10 * step + rows) for rows in (1, 200, 3, 50, 7)]
        window = [BucketingCollator(16)(part) for part in split_evenly(samples, accumulation)]
        assert len(window) == accumulation
        assert supervised_counts(window, K)[0] == 261
        train_step(run, window)
    return {name: parameter.detach().clone() for name, parameter in head.named_parameters()}


def test_accumulation_over_very_unequal_micro_batches_changes_no_weight(
    target: FrozenTarget, tmp_path: Path
) -> None:
    """U21, to 1e-6, where two steps at a rate of 1e-3 move every tensor by about 1e-3."""
    initial = dict(random_head(target, draft_vocab_size=48).named_parameters())
    expected = weights_after_two_steps(target, tmp_path, 1)
    assert all((expected[name] - initial[name]).abs().max() > 5e-4 for name in expected)
    for accumulation in (2, 5):
        weights = weights_after_two_steps(target, tmp_path, accumulation)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=f"{accumulation} {name}")


def optimizer_state(run: Run) -> list[Tensor]:
    return [value.clone() for state in run.optimizer.state.values() for value in state.values()]


def test_a_step_with_nothing_supervised_moves_nothing_and_is_counted(
    target: FrozenTarget, tmp_path: Path
) -> None:
    """U20: the run with an empty step in the middle equals, bit by bit, the run without it."""
    empty = [BucketingCollator(16)([document(9, [], 3), document(5, [(2, 3)], 4)])]
    full = [BucketingCollator(16)([document_with_rows(20, seed)]) for seed in (5, 6)]
    heads = [random_head(target, draft_vocab_size=48) for _ in range(2)]
    with_empty, without = (new_run(target, head, tmp_path, warmup_ratio=0.75) for head in heads)
    train_step(with_empty, full[:1])
    weights, moments = [p.clone() for p in heads[0].parameters()], optimizer_state(with_empty)
    rate = with_empty.optimizer.param_groups[0]["lr"]
    assert train_step(with_empty, empty) == []
    assert len(moments) == 3 * len(weights), "step and two moments of every tensor"
    assert all(map(torch.equal, weights, heads[0].parameters()))
    assert all(map(torch.equal, moments, optimizer_state(with_empty)))
    assert with_empty.optimizer.param_groups[0]["lr"] == rate
    assert (with_empty.state.step, with_empty.state.empty_steps) == (2, 1)
    train_step(with_empty, full[1:])
    for batch in full:
        train_step(without, [batch])
    assert without.state.empty_steps == 0
    assert with_empty.optimizer.param_groups[0]["lr"] == without.optimizer.param_groups[0]["lr"] != rate
    assert all(map(torch.equal, heads[0].parameters(), heads[1].parameters()))
    assert not all(map(torch.equal, weights, heads[0].parameters()))


def test_an_unsupervised_micro_batch_of_a_window_adds_exactly_nothing(
    target: FrozenTarget, tmp_path: Path
) -> None:
    empty, full = (
        BucketingCollator(16)([document(9, [], 3)]),
        BucketingCollator(16)([document_with_rows(9, 5)]),
    )
    heads = [random_head(target, draft_vocab_size=48) for _ in range(2)]
    for head, window in zip(heads, ([full], [empty, full, empty]), strict=True):
        sums = train_step(new_run(target, head, tmp_path), window)
        assert [float(s.loss_sum.sum()) > 0 for s in sums] == [batch is full for batch in window]
    assert all(map(torch.equal, heads[0].parameters(), heads[1].parameters()))


def test_steps_without_a_supervised_row_are_missing_and_never_nan(
    target: FrozenTarget, head: Eagle3DraftHead
) -> None:
    """U20: K = 7 and an answer of 7 tokens, whose last supervised step is k = 5."""
    figures = evaluate(
        head,
        target,
        [document(12, [(4, 11)], 0)],
        ttt_steps=7,
        training_seq_len=32,
        bucket_granularity=16,
        progress=False,
    )
    for name in ("loss_per_step", "acceptance_rate", "top1_agreement"):
        assert [value is None for value in figures[name]] == [False] * 6 + [True], name
        assert all(math.isfinite(value) for value in figures[name][:6])
    assert math.isfinite(figures["loss"])
    assert set(figures["acceptance_length"]) == {"3", "5", "7"}
    assert all(1 <= value <= 8 for value in figures["acceptance_length"].values())


def test_a_split_without_supervision_has_no_figures() -> None:
    figures = AcceptanceTotals(3, (3,)).metrics(0.8)
    for name in ("loss", "acceptance_length_row_mean", "draft_vocab_coverage", "target_own_token_share"):
        assert figures[name] is None
    assert figures["top1_agreement"] == figures["acceptance_rate"] == [None] * 3
    assert figures["supervised_rows"] == 0


# U11: A = prompt 3 + answer 4; B = 5 tokens, all of them answer; C = prompt 6 + answer 2.
U11: list[tuple[int, Spans]] = [(7, [(3, 7)]), (5, [(0, 5)]), (8, [(6, 8)])]
A, B, C = range(0, 7), range(7, 12), range(12, 20)


def pairs_of_pack(shapes: list[tuple[int, Spans]], ttt_steps: int) -> set[tuple[int, int]]:
    """(row of the flat pack, step), by brute force document by document."""
    pairs, start = set(), 0
    for length, spans in shapes:
        pairs |= {(start + row, step) for row, step in supervised_pairs(length, spans, ttt_steps)}
        start += length
    return pairs


def record(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """Keep what a function of the unroll returns, call by call."""
    results: list[Any] = []
    original: Callable[..., Any] = getattr(unroll, name)

    def recording(*args: Any, **kwargs: Any) -> Any:
        results.append(original(*args, **kwargs))
        return results[-1]

    monkeypatch.setattr(unroll, name, recording)
    return results


def test_u11_rows_are_counted_as_by_hand() -> None:
    batch = BucketingCollator(32)(documents_of(*U11))
    assert batch.supervised_counts(3) == [3 + 3 + 1, 2 + 2 + 0, 1 + 1 + 0]
    supervision = supervise(batch.answer_remaining, 3)
    pairs = list(zip(supervision.row_R.tolist(), supervision.step_R.tolist(), strict=True))
    assert set(pairs) == pairs_of_pack(U11, 3)
    assert len(pairs) == 13
    assert (A[2], 0) in pairs, "the row that serving drafts from first"
    assert (supervision.rows_R0[supervision.label_R] == supervision.row_R + supervision.step_R).all()


def test_u11_gradient_reaches_the_supervised_rows_and_no_other(
    target: FrozenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = random_head(target, draft_vocab_size=96)
    states = record(monkeypatch, "unroll_states")
    batch = BucketingCollator(32)(documents_of(*U11))
    loss = micro_batch_sums(head, target, batch, step_weights(batch.supervised_counts(3), 0.8)).loss
    (grad_KR0H,) = torch.autograd.grad(loss, states[0])
    rows = supervise(batch.answer_remaining, 3).rows_R0.tolist()
    touched = {(rows[int(index)], int(step)) for step, index in grad_KR0H.abs().sum(-1).nonzero()}
    assert touched == pairs_of_pack(U11, 3)
    assert grad_KR0H[0, rows.index(A[2])].abs().max() > 1e-4


def u11_statistics(
    target: FrozenTarget, head: Eagle3DraftHead, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> dict[int, RowStatistics]:
    """Statistics of the supervised pairs by document: 0, 1 and 2 for A, B and C."""
    with monkeypatch.context() as patch:
        results = record(patch, "vocabulary_loss")
        batch = BucketingCollator(32)(samples)
        micro_batch_sums(head, target, batch, torch.ones(3))
    _, rows = results[0]
    row_R = supervise(batch.answer_remaining, 3).row_R
    chosen = [torch.tensor([int(row) in members for row in row_R]) for members in (A, B, C)]
    return {
        index: RowStatistics(rows.cross_entropy[c], rows.acceptance[c], rows.top1_hit[c])
        for index, c in enumerate(chosen)
    }


def test_u11_no_token_of_b_touches_a_or_c(
    target: FrozenTarget, head: Eagle3DraftHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = documents_of(*U11)
    before = u11_statistics(target, head, samples, monkeypatch)
    b_moved = 0
    for position in range(len(B)):
        tokens = samples[1].input_ids.copy()
        tokens[position] = (tokens[position] + 41) % 96
        changed = [samples[0], replace(samples[1], input_ids=tokens), samples[2]]
        after = u11_statistics(target, head, changed, monkeypatch)
        for index in (0, 2):
            assert torch.equal(after[index].cross_entropy, before[index].cross_entropy)
            assert torch.equal(after[index].acceptance, before[index].acceptance)
            assert torch.equal(after[index].top1_hit, before[index].top1_hit)
        b_moved += not torch.equal(after[1].cross_entropy, before[1].cross_entropy)
    assert [len(before[index].acceptance) for index in range(3)] == [6, 6, 1]
    # B's last token is only ever predicted, and labels are the target's distribution, not the token.
    assert b_moved == len(B) - 1


def u07_samples(end_of_turn: int) -> list[Sample]:
    """Two rows of unequal length; the longer one's prompt holds the end-of-turn token twice."""
    samples = documents_of((27, [(12, 25)]), (14, [(5, 12)]))
    samples[0].input_ids[[3, 7, 24]] = end_of_turn
    samples[1].input_ids[[11]] = end_of_turn
    return samples


@pytest.mark.parametrize("padding_free", [True, False])
def test_u07_the_pad_token_is_known_by_position_alone(
    target: FrozenTarget, head: Eagle3DraftHead, padding_free: bool
) -> None:
    end_of_turn = 2
    samples = u07_samples(end_of_turn)
    alone = measure(head, target, [BucketingCollator(1)([sample]) for sample in samples])
    measured = []
    for pad_token_id in (end_of_turn, 0, 95):
        batch = BucketingCollator(16, padding_free, pad_token_id)(samples)
        assert batch.num_slots > batch.num_tokens, "there is padding"
        assert batch.supervised_counts(K) == [12 + 6, 11 + 5, 10 + 4, 9 + 3]
        measured.append(measure(head, target, [batch]))
    for other in measured:
        for name in COUNTS:
            assert torch.equal(other.totals[name], alone.totals[name]), name
        for name in SUMS:
            torch.testing.assert_close(other.totals[name], alone.totals[name], rtol=1e-6, atol=1e-6)
        for name, grad in alone.grads.items():
            torch.testing.assert_close(other.grads[name], grad, rtol=0, atol=1e-5 * float(grad.abs().max()))


def test_u09_a_cut_is_counted_and_is_no_end_of_turn(target: FrozenTarget, head: Eagle3DraftHead) -> None:
    """Limit 64: an answer that crosses it, a prompt of 70, an answer whose first token is the 64th."""
    samples = documents_of((80, [(50, 75)]), (90, [(70, 88)]), (70, [(63, 68)]))
    kept, report = fit_length(samples, 64, "truncate")
    assert (report.truncated_samples, report.unsupervised_samples) == (3, 2)
    assert report.truncated_tokens == 16 + 26 + 6
    assert [len(sample) for sample in kept] == [64]
    # Tokens 50..63 are left of the answer: 13 rows at step 0, one fewer each step.
    batch = BucketingCollator(64)(kept)
    assert batch.supervised_counts(14) == [13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    whole = BucketingCollator(64)(samples[:1]).supervised_counts(1)
    assert whole == [24]
    assert math.isfinite(float(measure(head, target, [batch]).totals["loss"]))
    assert np.array_equal(kept[0].input_ids, samples[0].input_ids[:64])


def test_u09_cut_and_whole_agree_on_every_row_that_both_supervise(
    target: FrozenTarget, head: Eagle3DraftHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 1e-5 relative: the whole document's attention adds up in other blocks."""
    results = record(monkeypatch, "vocabulary_loss")
    whole = document(80, [(50, 75)], 0)
    (cut,), _ = fit_length([whole], 64, "truncate")
    cross_entropy: list[dict[tuple[int, int], float]] = []
    for sample in (whole, cut):
        batch = BucketingCollator(16)([sample])
        micro_batch_sums(head, target, batch, torch.ones(K))
        pairs = supervise(batch.answer_remaining, K)
        keys = zip(pairs.row_R.tolist(), pairs.step_R.tolist(), strict=True)
        cross_entropy.append(dict(zip(keys, results[-1][1].cross_entropy.tolist(), strict=True)))
    assert [len(pairs) for pairs in cross_entropy] == [24 + 23 + 22 + 21, 13 + 12 + 11 + 10]
    for pair, value in cross_entropy[1].items():
        assert value == pytest.approx(cross_entropy[0][pair], rel=1e-5), pair
