"""The vocabulary part of the objective, on supervised rows only and chunk by chunk.

Shapes: R supervised (row, step) pairs, R0 rows supervised at step 0, C rows of a chunk, H hidden, V
vocabulary, V_d draft vocabulary. Sums only; nothing here divides by a count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DEFAULT_CHUNK_ROWS = 512


@dataclass(frozen=True, slots=True)
class TargetLabels:
    """The target's distribution at the position after each row supervised at step 0.

    draft_probs `[R0, V_d]`: restricted to the draft vocabulary and renormalised, in the target's dtype;
    inside_mass `[R0]` float32: its probability, over the **full** vocabulary, of the draft vocabulary;
    argmax `[R0]` int64: arg-max over the full vocabulary; in_draft_vocab `[R0]` bool: whether that arg-max
    can be drafted.
    """

    draft_probs: Tensor
    inside_mass: Tensor
    argmax: Tensor
    in_draft_vocab: Tensor


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """What each supervised pair contributed, detached: cross_entropy, acceptance `[R]` float32, top1_hit
    `[R]` bool.
    """

    cross_entropy: Tensor
    acceptance: Tensor
    top1_hit: Tensor


@torch.no_grad()
def target_labels(
    logits_of: Callable[[Tensor], Tensor],
    final_hidden_R0H: Tensor,
    draft_token_ids: Tensor,
    t2d: Tensor,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
) -> TargetLabels:
    """Restrict the target's logits once for all steps; the full-vocabulary logits live for one chunk only."""
    restricted_probs, inside_masses, argmaxes = [], [], []
    for hidden_CH in final_hidden_R0H.split(chunk_rows):
        logits_CV = logits_of(hidden_CH)
        restricted_CVd = logits_CV[:, draft_token_ids].float()
        restricted_normalizer = torch.logsumexp(restricted_CVd, dim=-1)
        inside_masses.append((restricted_normalizer - torch.logsumexp(logits_CV.float(), dim=-1)).exp())
        probs_CVd = restricted_CVd.sub_(restricted_normalizer[:, None]).exp_()
        restricted_probs.append(probs_CVd.to(logits_CV.dtype))
        argmaxes.append(logits_CV.argmax(dim=-1))
    argmax = torch.cat(argmaxes)
    return TargetLabels(torch.cat(restricted_probs), torch.cat(inside_masses), argmax, t2d[argmax])


def vocabulary_loss(
    normed_RH: Tensor,
    head_weight_VdH: Tensor,
    labels: TargetLabels,
    label_index_R: Tensor,
    row_weight_R: Tensor,
    draft_token_ids: Tensor,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
) -> tuple[Tensor, RowStatistics]:
    """sum_r weight_r * cross_entropy_r against the restricted, renormalised target, and the rows' statistics.

    normed_RH: draft states behind the final norm, in compute dtype; label_index_R: each pair's row in
    `labels`; row_weight_R float32: zero where the target's arg-max cannot be drafted. cross_entropy
    (unweighted) is -sum_v softmax(target)_v log softmax(draft)_v; acceptance is sum_v min(target_prob_v over
    the full vocabulary, draft_prob_v) (Leviathan et al. 2023, eq. 2); a top-1 hit has the draft's arg-max
    equal to the target's.

    The gradients are made in the forward pass, while a chunk's logits exist, so that no `[R, V_d]` tensor is
    kept.
    """
    loss, cross_entropy, acceptance, top1_hit = _ChunkedVocabularyLoss.apply(
        normed_RH,
        head_weight_VdH,
        labels,
        label_index_R,
        row_weight_R,
        draft_token_ids,
        chunk_rows,
        torch.is_grad_enabled(),
    )
    return loss, RowStatistics(cross_entropy, acceptance, top1_hit)


def vocabulary_loss_reference(
    normed_RH: Tensor,
    head_weight_VdH: Tensor,
    labels: TargetLabels,
    label_index_R: Tensor,
    row_weight_R: Tensor,
    draft_token_ids: Tensor,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
) -> tuple[Tensor, RowStatistics]:
    """`vocabulary_loss` in plain PyTorch, all rows at once (`chunk_rows` is not used)."""
    draft_logits = (normed_RH @ head_weight_VdH.to(normed_RH.dtype).T).float()
    restricted_probs = _label_probs(labels, label_index_R)
    cross_entropy = -(restricted_probs * draft_logits.log_softmax(-1)).sum(-1)
    target_probs = restricted_probs * labels.inside_mass[label_index_R, None]
    acceptance = torch.minimum(target_probs, draft_logits.softmax(-1)).sum(-1)
    top1_hit = draft_token_ids[draft_logits.argmax(-1)] == labels.argmax[label_index_R]
    loss = (row_weight_R * cross_entropy).sum()
    return loss, RowStatistics(cross_entropy.detach(), acceptance.detach(), top1_hit)


class _ChunkedVocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        normed_RH: Tensor,
        head_weight_VdH: Tensor,
        labels: TargetLabels,
        label_index_R: Tensor,
        row_weight_R: Tensor,
        draft_token_ids: Tensor,
        chunk_rows: int,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        weight = head_weight_VdH.to(normed_RH.dtype)
        num_rows = len(normed_RH)
        cross_entropy = torch.empty(num_rows, dtype=torch.float32, device=normed_RH.device)
        acceptance = torch.empty_like(cross_entropy)
        top1_hit = torch.empty(num_rows, dtype=torch.bool, device=normed_RH.device)
        grad_normed = torch.empty_like(normed_RH) if needs_grad else None
        grad_weight = torch.zeros_like(head_weight_VdH) if needs_grad else None
        for start in range(0, num_rows, chunk_rows):
            rows = slice(start, min(start + chunk_rows, num_rows))
            index = label_index_R[rows]
            draft_logits = (normed_RH[rows] @ weight.T).float()
            top1_hit[rows] = draft_token_ids[draft_logits.argmax(-1)] == labels.argmax[index]
            cross_entropy[rows], acceptance[rows], grad_logits = _chunk_statistics(
                draft_logits, _label_probs(labels, index), labels.inside_mass[index]
            )
            if grad_normed is not None and grad_weight is not None:
                grad_logits = grad_logits.mul_(row_weight_R[rows, None]).to(weight.dtype)
                grad_normed[rows] = grad_logits @ weight
                grad_weight += grad_logits.T @ normed_RH[rows]
        ctx.grad_normed, ctx.grad_weight = grad_normed, grad_weight
        ctx.mark_non_differentiable(cross_entropy, acceptance, top1_hit)
        return (row_weight_R * cross_entropy).sum(), cross_entropy, acceptance, top1_hit

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        grad_loss = grad_outputs[0]
        grad_normed, grad_weight = ctx.grad_normed, ctx.grad_weight
        # Freed with the graph, not kept for a second backward.
        ctx.grad_normed = ctx.grad_weight = None
        assert grad_normed is not None, "vocabulary_loss supports one backward pass"
        return grad_normed.mul_(grad_loss), grad_weight.mul_(grad_loss), None, None, None, None, None, None


def _label_probs(labels: TargetLabels, index_C: Tensor) -> Tensor:
    """The labels' restricted distributions of chosen pairs, `[C, V_d]` float32, each summing to 1."""
    probs_CVd = labels.draft_probs[index_C].float()
    if labels.draft_probs.dtype != torch.float32:
        # Rounding each entry to 8 bits moves the sum by up to a part in 500, which would bias loss and
        # gradient.
        probs_CVd.div_(probs_CVd.sum(dim=-1, keepdim=True))
    return probs_CVd


def _chunk_statistics(
    draft_logits: Tensor, restricted_probs: Tensor, inside_mass: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy `[C]`, acceptance `[C]` and d cross_entropy / d draft_logits `[C, V_d]`, all float32.

    Passes over `[C, V_d]` dominate on processors with fast products, so the logits are overwritten by their
    probabilities, with one exponential each, and these by the gradient.
    """
    peak = draft_logits.amax(dim=-1, keepdim=True)
    expected_logit = torch.linalg.vecdot(restricted_probs, draft_logits)
    draft_probs = draft_logits.sub_(peak).exp_()
    total = draft_probs.sum(dim=-1, keepdim=True)
    draft_probs.div_(total)
    cross_entropy = (peak + total.log()).squeeze(-1) - expected_logit
    acceptance = torch.minimum(restricted_probs * inside_mass[:, None], draft_probs).sum(-1)
    return cross_entropy, acceptance, draft_probs.sub_(restricted_probs)
