"""The chunked vocabulary loss against plain PyTorch, the target's labels against direct computation."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from eagle_train.objective.losses import (
    ChunkFunctions,
    RowStatistics,
    TargetLabels,
    target_labels,
    vocabulary_loss,
    vocabulary_loss_reference,
)

R, R0, H, V, V_D = 23, 12, 8, 20, 9


class Case:
    """Random inputs of fixed seed; rows with weight zero; several rows share a label."""

    def __init__(self, num_rows: int = R, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(num_rows)
        self.weight_VdH = torch.randn(V_D, H, generator=generator)
        self.ids = torch.randperm(V, generator=generator)[:V_D].sort().values
        t2d = torch.zeros(V, dtype=torch.bool)
        t2d[self.ids] = True
        # The draft nearly knows the target: same rows of the head, states a little off, so that hits occur.
        target_weight_VH = torch.randn(V, H, generator=generator)
        target_weight_VH[self.ids] = self.weight_VdH
        final_R0H = torch.randn(R0, H, generator=generator)
        self.labels = target_labels(
            lambda hidden: hidden @ target_weight_VH.to(dtype).T, final_R0H.to(dtype), self.ids, t2d
        )
        self.index_R = torch.randint(0, R0, (num_rows,), generator=generator)
        noise_RH = torch.randn(num_rows, H, generator=generator)
        self.normed_RH = (final_R0H[self.index_R] + 0.7 * noise_RH).to(dtype)
        self.row_weight_R = torch.rand(num_rows, generator=generator)
        self.row_weight_R[::3] = 0.0

    def run(
        self, reference: bool = False, chunk_rows: int = 4, scale: float = 1.0
    ) -> tuple[Tensor, RowStatistics, Tensor, Tensor]:
        """Loss, statistics, and the gradients of scale * loss for the states and the head's weight."""
        function = vocabulary_loss_reference if reference else vocabulary_loss
        states = self.normed_RH.clone().requires_grad_()
        weight = self.weight_VdH.clone().requires_grad_()
        loss, rows = function(
            states, weight, self.labels, self.index_R, self.row_weight_R, self.ids, ChunkFunctions(chunk_rows)
        )
        (scale * loss).backward()
        assert states.grad is not None
        assert weight.grad is not None
        return loss.detach(), rows, states.grad, weight.grad


def assert_same(case: Case, chunk_rows: int, scale: float, tolerance: float) -> None:
    loss, rows, grad_states, grad_weight = case.run(chunk_rows=chunk_rows, scale=scale)
    expected_loss, expected, expected_states, expected_weight = case.run(reference=True, scale=scale)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(loss, expected_loss, **close)
    torch.testing.assert_close(rows.cross_entropy, expected.cross_entropy, **close)
    torch.testing.assert_close(rows.acceptance, expected.acceptance, **close)
    assert torch.equal(rows.top1_hit, expected.top1_hit)
    torch.testing.assert_close(grad_states, expected_states, **close)
    torch.testing.assert_close(grad_weight, expected_weight, **close)


@pytest.mark.parametrize("scale", [1.0, 0.25, -3.0])
@pytest.mark.parametrize("chunk_rows", [1, 4, R, R + 1, 1000])
def test_chunks_change_nothing_in_float32(chunk_rows: int, scale: float) -> None:
    """Values, statistics and gradients to 1e-5."""
    case = Case()
    assert_same(case, chunk_rows, scale, tolerance=1e-5)
    _, rows, grad_states, _ = case.run(chunk_rows=chunk_rows)
    assert 0 < rows.top1_hit.sum() < R
    assert (case.row_weight_R == 0).sum() == 8
    assert ((grad_states == 0).all(1) == (case.row_weight_R == 0)).all(), "weight 0, gradient 0; no other row"


@pytest.mark.parametrize("chunk_rows", [1, 4, 1000])
def test_chunks_agree_with_autograd_in_bfloat16(chunk_rows: int) -> None:
    """To 3e-2, about four roundings of bf16; statistics are float32 either way and agree to 1e-5."""
    case = Case(dtype=torch.bfloat16)
    assert_same(case, chunk_rows, 1.0, tolerance=3e-2)
    _, rows, grad_states, grad_weight = case.run(chunk_rows=chunk_rows)
    _, expected, _, _ = case.run(reference=True)
    assert (grad_states.dtype, grad_weight.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(rows.cross_entropy, expected.cross_entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows.acceptance, expected.acceptance, rtol=1e-5, atol=1e-5)


def test_no_rows_give_zero_loss_and_zero_gradients() -> None:
    for reference in (False, True):
        loss, rows, grad_states, grad_weight = Case(num_rows=0).run(reference)
        assert loss == 0.0
        assert len(rows.cross_entropy) == len(rows.acceptance) == len(rows.top1_hit) == 0
        assert grad_states.shape == (0, H)
        assert torch.equal(grad_weight, torch.zeros(V_D, H))


def test_gradients_equal_finite_differences() -> None:
    """Independent of autograd: central differences in float32, to 1e-2 relative."""
    case = Case()
    _, _, grad_states, grad_weight = case.run()
    for tensor, grad in ((case.normed_RH, grad_states), (case.weight_VdH, grad_weight)):
        direction = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3))
        losses = []
        for sign in (1, -1):
            tensor += sign * 1e-2 * direction
            losses.append(case.run()[0])
            tensor -= sign * 1e-2 * direction
        slope = (losses[0] - losses[1]) / 2e-2
        assert abs(slope) > 0.1
        torch.testing.assert_close(slope, (grad * direction).sum(), rtol=1e-2, atol=1e-3)


def test_without_gradients_values_stay_and_no_graph_is_kept() -> None:
    case = Case()
    with torch.no_grad():
        loss, rows = vocabulary_loss(
            case.normed_RH,
            case.weight_VdH,
            case.labels,
            case.index_R,
            case.row_weight_R,
            case.ids,
            ChunkFunctions(4),
        )
    expected, expected_rows, _, _ = case.run()
    assert not loss.requires_grad
    assert torch.equal(loss, expected)
    assert torch.equal(rows.acceptance, expected_rows.acceptance)


@pytest.mark.parametrize("chunk_rows", [1, 3, R0, 100])
def test_labels_are_the_targets_distribution_cut_to_the_draft_vocabulary(chunk_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(R0, H, generator=generator), torch.randn(V, H, generator=generator)
    ids = torch.arange(1, V, 2)
    t2d = torch.arange(V) % 2 == 1
    rows_at_once: list[int] = []

    def logits_of(chunk: Tensor) -> Tensor:
        rows_at_once.append(len(chunk))
        return chunk @ weight.T

    labels = target_labels(logits_of, hidden, ids, t2d, ChunkFunctions(chunk_rows))
    logits = hidden @ weight.T
    probs = logits.softmax(-1)
    inside = probs[:, ids].sum(-1)
    torch.testing.assert_close(labels.draft_probs, probs[:, ids] / inside[:, None], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(labels.inside_mass, inside, rtol=1e-5, atol=1e-6)
    assert labels.argmax.tolist() == logits.argmax(-1).tolist()
    assert labels.in_draft_vocab.tolist() == [token % 2 == 1 for token in labels.argmax.tolist()]
    assert 0 < labels.in_draft_vocab.sum() < R0
    assert set(rows_at_once) == {chunk_rows}, "all chunks have one shape"
    assert len(rows_at_once) == -(-R0 // chunk_rows)


def test_labels_keep_no_tensor_of_full_vocabulary_width() -> None:
    labels = Case().labels
    kept = {field.name: getattr(labels, field.name) for field in fields(TargetLabels)}
    assert {name: tuple(tensor.shape) for name, tensor in kept.items()} == {
        "draft_probs": (R0, V_D),
        "inside_mass": (R0,),
        "argmax": (R0,),
        "in_draft_vocab": (R0,),
    }
    stored = kept["draft_probs"].untyped_storage().nbytes()
    assert stored == R0 * V_D * 4, "no view that keeps the full logits alive"


def by_hand(target_probs: list[float], draft_probs: list[float]) -> RowStatistics:
    """One row; the vocabulary has four tokens, of which 0, 1 and 3 can be drafted."""
    ids = torch.tensor([0, 1, 3])
    t2d = torch.tensor([True, True, False, True])
    labels = target_labels(lambda h: h.log(), torch.tensor([target_probs]), ids, t2d)
    weight = torch.tensor(draft_probs).log()[:, None]
    states, index = torch.ones(1, 1), torch.zeros(1, dtype=torch.int64)
    return vocabulary_loss(states, weight, labels, index, torch.ones(1), ids)[1]


def test_acceptance_and_cross_entropy_are_those_of_a_hand_example() -> None:
    """Target 0.5 0.1 0.2 0.2, draft 0.25 0.25 0.5 on tokens 0, 1, 3.

    Acceptance: 0.25 + 0.1 + 0.2 = 0.55. Inside mass 0.8, so the label is 0.625 0.125 0.25; cross-entropy
    0.75 ln 4 + 0.25 ln 2. The draft's arg-max is token 3, the target's 0: no hit.
    """
    rows = by_hand([0.5, 0.1, 0.2, 0.2], [0.25, 0.25, 0.5])
    assert rows.acceptance.tolist() == pytest.approx([0.55], abs=1e-6)
    assert rows.cross_entropy.tolist() == pytest.approx([1.75 * 0.6931472], abs=1e-6)
    assert rows.top1_hit.tolist() == [False]


def test_a_hit_compares_target_ids_and_not_places_in_the_draft_vocabulary() -> None:
    assert by_hand([0.1, 0.1, 0.2, 0.6], [0.2, 0.2, 0.6]).top1_hit.tolist() == [True]
    # The draft's best is place 2, token 3; the target's best is token 2, which cannot be drafted.
    assert by_hand([0.1, 0.1, 0.6, 0.2], [0.2, 0.2, 0.6]).top1_hit.tolist() == [False]
