"""An oracle head through the real path scores its known, exact value.

The oracle's draft state at (row t, step k) is the target's own final state at t + 1 + k, and its head is the
target's, cut to the draft vocabulary. Everything else (packing, collating, supervision, labels, losses, the
walk, pooling) is the product's own. What it must score is worked out here from plain runs of the target over
each document alone, in float64.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eagle_train.objective.unroll as unroll
from eagle_train.batch import PackedBatch
from eagle_train.data.samples import Sample
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.target import FrozenTarget
from eagle_train.train.evaluate import evaluate
from tests.documents import Spans, documents_of, fitted_head, random_head, supervised_pairs, with_own_tokens
from tests.tiny import tiny_target

K = 5
# Seven documents: one without answer, one of one token; answers at either end, touching, of 1 and 2 tokens.
SHAPES: list[tuple[int, Spans]] = [
    (40, [(5, 18), (21, 30)]),
    (1, []),
    (33, [(0, 9), (12, 13), (15, 17), (20, 33)]),
    (17, []),
    (29, [(3, 12), (12, 25)]),
    (48, [(10, 47)]),
    (21, [(7, 14)]),
]
CAPACITIES = (48, 64, 192)
CELLS = [*product(CAPACITIES, (1, 16, 48))]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return tiny_target()


@pytest.fixture(scope="module")
def samples(target: FrozenTarget) -> list[Sample]:
    return with_own_tokens(target, documents_of(*SHAPES))


def oracle_head(target: FrozenTarget, draft_vocab_size: int) -> Eagle3DraftHead:
    head = random_head(target, draft_vocab_size)
    head.norm = nn.Identity()  # type: ignore[assignment]
    with torch.no_grad():
        head.lm_head.weight.copy_(target.lm_head.weight[head.draft_token_ids])
    return head


def make_oracle(monkeypatch: pytest.MonkeyPatch, target: FrozenTarget) -> None:
    def oracle_states(
        head: Eagle3DraftHead,
        embed: Callable[..., Any],
        batch: PackedBatch,
        rows_R0: Tensor,
        aux: Tensor,
        ttt_steps: int,
    ) -> Tensor:
        final_TH = target.features(batch).final_hidden
        return torch.stack([final_TH.roll(-1 - step, 0)[rows_R0] for step in range(ttt_steps)])

    monkeypatch.setattr(unroll, "unroll_states", oracle_states)


def measure(
    head: Eagle3DraftHead,
    target: FrozenTarget,
    samples: list[Sample],
    capacity: int = 64,
    granularity: int = 16,
) -> dict[str, Any]:
    return evaluate(
        head,
        target,
        samples,
        ttt_steps=K,
        training_seq_len=capacity,
        bucket_granularity=granularity,
        progress=False,
    )


@dataclass
class Expected:
    """What a brute-force walk over the target's own distributions gives, per step or per n."""

    rows: list[int]
    in_vocab: list[int]
    mass: list[float]
    entropy: list[float]  # of the restricted target, over rows whose arg-max can be drafted
    prefix: list[int]  # rows whose steps 0..k can all be drafted
    own_tokens: int = 0

    @classmethod
    def of(cls, target: FrozenTarget, samples: list[Sample], head: Eagle3DraftHead) -> "Expected":
        expected = cls([0] * K, [0] * K, [0.0] * K, [0.0] * K, [0] * K)
        for sample, (length, spans) in zip(samples, SHAPES, strict=True):
            probs = own_probabilities(target, sample)
            for row, step in supervised_pairs(length, spans, K):
                label = probs[row + 1 + step]
                so_far = probs[row + 1 : row + 2 + step].argmax(-1)
                expected.prefix[step] += bool(head.t2d[so_far].all())
                inside = label[head.draft_token_ids]
                drafted = bool(head.t2d[label.argmax()])
                expected.rows[step] += 1
                expected.own_tokens += step == 0 and int(label.argmax()) == sample.input_ids[row + 2]
                expected.in_vocab[step] += drafted
                expected.mass[step] += float(inside.sum())
                expected.entropy[step] += drafted * entropy(inside / inside.sum())
        return expected


def own_probabilities(target: FrozenTarget, sample: Sample) -> Tensor:
    """`[L, V]` float64, by the model's own forward over the document alone."""
    ids = torch.from_numpy(sample.input_ids).long()[None]
    with torch.no_grad():
        return target.model(input_ids=ids, use_cache=False).logits[0].double().softmax(-1)


def entropy(probs: Tensor) -> float:
    return float(-(probs * probs.log()).sum())


def brute_force_length(
    target: FrozenTarget, samples: list[Sample], head: Eagle3DraftHead, n: int
) -> tuple[float, int]:
    """Tokens emitted per verify step, and the number of steps, when a draft hits exactly in-vocabulary."""
    emitted = steps = 0
    for sample, (_, spans) in zip(samples, SHAPES, strict=True):
        can_be_drafted = head.t2d[own_probabilities(target, sample).argmax(-1)].tolist()
        for start, stop in spans:
            # `known` is the last emitted token; the target's state at `known` foretells known + 1.
            known = max(start, 1)
            while known < stop - 1:
                accepted = 0
                while accepted < n and known + accepted + 1 < stop and can_be_drafted[known + accepted]:
                    accepted += 1
                gained = min(accepted + 1, stop - 1 - known)
                known, emitted, steps = known + gained, emitted + gained, steps + 1
    return emitted / steps, steps


def test_a_restricted_oracle_scores_exactly_what_its_vocabulary_allows(
    target: FrozenTarget, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agreement and counts exactly; masses, entropies and loss to 1e-5 relative (float32 against float64)."""
    head = oracle_head(target, 48)
    make_oracle(monkeypatch, target)
    figures = measure(head, target, samples)
    expected = Expected.of(target, samples, head)
    assert all(0.2 * n < hit < 0.8 * n for hit, n in zip(expected.in_vocab, expected.rows, strict=True))
    assert figures["supervised_rows"] == expected.rows[0]
    for step, rows in enumerate(expected.rows):
        assert figures["top1_agreement"][step] == expected.in_vocab[step] / rows
        assert figures["acceptance_rate"][step] == pytest.approx(expected.mass[step] / rows, rel=1e-5)
        assert figures["loss_per_step"][step] == pytest.approx(expected.entropy[step] / rows, rel=1e-5)
    assert figures["draft_vocab_coverage"] == expected.in_vocab[0] / expected.rows[0]
    assert figures["target_own_token_share"] == expected.own_tokens / expected.rows[0]
    assert 0.2 < figures["target_own_token_share"] < 0.5
    prefix_shares = [prefix / expected.rows[0] for prefix in expected.prefix]
    assert expected.prefix[-1] < expected.in_vocab[-1]
    assert figures["acceptance_length_row_mean"] == pytest.approx(1 + sum(prefix_shares), rel=1e-12)
    loss = sum(0.8**k * figures["loss_per_step"][k] for k in range(K))
    assert figures["loss"] == pytest.approx(loss, rel=1e-12)


def test_a_restricted_oracle_walks_as_far_as_its_vocabulary_allows(
    target: FrozenTarget, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    head = oracle_head(target, 72)
    make_oracle(monkeypatch, target)
    figures = measure(head, target, samples)
    assert set(figures["acceptance_length"]) == {"3", "5"}
    for n in (3, 5):
        length, steps = brute_force_length(target, samples, head, n)
        assert figures["acceptance_length"][str(n)] == length
        assert figures["verify_steps"][str(n)] == steps
        assert 1.3 < length < n, "neither all hits nor none"


def test_a_full_oracle_scores_one_and_the_length_that_arithmetic_gives(
    target: FrozenTarget, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer of m tokens leaves m - 1 to emit, n + 1 a step: ceil((m - 1) / (n + 1)) steps.

    The answers have 13, 9; 9, 1, 2, 13; 9, 13; 37; 7 tokens. The first of document 2 begins at token 0, which
    no row foretells: its first verify step stands on token 1, so 7 tokens are left. Emitted in all:
    12 + 8 + 7 + 0 + 1 + 12 + 8 + 12 + 36 + 6 = 102.
    Steps at n = 3: 3 + 2 + 2 + 0 + 1 + 3 + 2 + 3 + 9 + 2 = 27;
    at n = 5: 2 + 2 + 2 + 0 + 1 + 2 + 2 + 2 + 6 + 1 = 20.
    """
    head = oracle_head(target, 96)
    make_oracle(monkeypatch, target)
    figures = measure(head, target, samples)
    assert figures["top1_agreement"] == [1.0] * K
    assert figures["acceptance_rate"] == pytest.approx([1.0] * K, abs=1e-5)
    assert figures["verify_steps"] == {"3": 27, "5": 20}
    assert figures["acceptance_length"] == {"3": 102 / 27, "5": 102 / 20}
    assert figures["draft_vocab_coverage"] == 1.0
    expected = Expected.of(target, samples, head)
    entropies = [e / rows for e, rows in zip(expected.entropy, expected.rows, strict=True)]
    assert figures["loss_per_step"] == pytest.approx(entropies, rel=1e-5)
    # Rows near an answer's end have fewer steps that can hit at all.
    joint = [rows / expected.rows[0] for rows in expected.rows]
    assert figures["acceptance_length_row_mean"] == pytest.approx(1 + sum(joint), rel=1e-12)


def test_a_full_oracle_gains_n_plus_one_where_answers_end_on_a_step(
    target: FrozenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of 25 and 13 tokens: 24 and 12 to emit, in steps of 4 at n = 3 and of 6 at n = 5."""
    make_oracle(monkeypatch, target)
    whole_steps = documents_of((40, [(5, 30)]), (20, [(4, 17)]))
    figures = measure(oracle_head(target, 96), target, whole_steps)
    assert figures["acceptance_length"] == {"3": 4.0, "5": 6.0}


@pytest.mark.parametrize(("capacity", "granularity"), CELLS)
def test_the_oracle_scores_one_however_validation_is_batched(
    target: FrozenTarget,
    samples: list[Sample],
    monkeypatch: pytest.MonkeyPatch,
    capacity: int,
    granularity: int,
) -> None:
    """U21."""
    make_oracle(monkeypatch, target)
    figures = measure(oracle_head(target, 96), target, samples, capacity, granularity)
    assert figures["top1_agreement"] == [1.0] * K
    assert figures["acceptance_rate"] == pytest.approx([1.0] * K, abs=1e-5)
    assert figures["verify_steps"] == {"3": 27, "5": 20}


def flat(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for entry in value.values() for number in flat(entry)]
    return [number for entry in value for number in flat(entry)] if isinstance(value, list) else [value]


def test_validation_figures_do_not_depend_on_batching(target: FrozenTarget, samples: list[Sample]) -> None:
    """U21: a real head's figures, every one of them, to 1e-6 in all cells."""
    head = fitted_head(target, 48, samples, K)
    grid = [flat(measure(head, target, samples, *cell)) for cell in CELLS]
    assert len(grid) == len(CELLS) == 9
    per_position = 3 + 5  # of the walks at n = 3 and 5
    assert len(grid[0]) == 1 + 3 * K + 2 + per_position + 1 + 2 + 1 + 1 + 1
    assert all(0.1 < value < 0.6 for value in measure(head, target, samples)["top1_agreement"])
    for figures in grid[1:]:
        assert figures == pytest.approx(grid[0], rel=1e-6, abs=1e-6)


def test_out_of_vocabulary_is_a_miss_that_adds_nothing_to_the_loss(
    target: FrozenTarget, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary without any of the target's arg-maxes: no loss, no gradient, no hit, yet rows counted."""
    argmaxes = torch.cat([own_probabilities(target, sample).argmax(-1) for sample in samples]).unique()
    outside = torch.tensor(sorted(set(range(96)) - set(argmaxes.tolist())))
    assert len(outside) >= 8
    head = random_head(target, len(outside))
    head.set_vocabulary(outside)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.lm_head.weight[outside])
    head.norm = nn.Identity()  # type: ignore[assignment]
    make_oracle(monkeypatch, target)
    figures = measure(head, target, samples)
    assert figures["loss_per_step"] == [0.0] * K
    assert figures["top1_agreement"] == [0.0] * K
    assert figures["acceptance_length"] == {"3": 1.0, "5": 1.0}
    assert figures["draft_vocab_coverage"] == 0.0
    assert figures["supervised_rows"] > 50
    expected = Expected.of(target, samples, head)
    rates = [mass / rows for mass, rows in zip(expected.mass, expected.rows, strict=True)]
    assert figures["acceptance_rate"] == pytest.approx(rates, rel=1e-5)
    assert min(rates) > 0.01
