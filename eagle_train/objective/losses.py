"""The vocabulary part of the objective, on supervised rows only and chunk by chunk.

Shapes: R supervised (row, step) pairs, R0 rows supervised at step 0, C rows of a chunk, H hidden, V
vocabulary, V_d draft vocabulary. Sums only; nothing here divides by a count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
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


class Chunk(NamedTuple):
    """C supervised pairs: draft states behind the final norm `[C, H]`, their labels' rows of `TargetLabels`
    (`[C, V_d]`, `[C]`, `[C]`) and their weights in the loss `[C]`.
    """

    normed: Tensor
    draft_probs: Tensor
    inside_mass: Tensor
    argmax: Tensor
    row_weight: Tensor


def label_chunk(
    logits_of: Callable[[Tensor], Tensor], hidden_CH: Tensor, draft_token_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """draft_probs `[C, V_d]`, inside_mass `[C]` and argmax `[C]` of `TargetLabels`."""
    logits_CV = logits_of(hidden_CH)
    restricted_CVd = logits_CV[:, draft_token_ids].float()
    restricted_normalizer = torch.logsumexp(restricted_CVd, dim=-1)
    inside_mass = (restricted_normalizer - torch.logsumexp(logits_CV.float(), dim=-1)).exp()
    draft_probs = (restricted_CVd - restricted_normalizer[:, None]).exp().to(hidden_CH.dtype)
    return draft_probs, inside_mass, logits_CV.argmax(dim=-1)


def statistics_chunk(
    chunk: Chunk, weight_VdH: Tensor, draft_token_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy, acceptance `[C]` float32 and top-1 hits `[C]` bool."""
    logits = (chunk.normed @ weight_VdH.T).float()
    top1_hit = draft_token_ids[logits.argmax(-1)] == chunk.argmax
    cross_entropy, acceptance, _ = _pair_statistics(logits, chunk)
    return cross_entropy, acceptance, top1_hit


def gradient_chunk(
    chunk: Chunk, weight_VdH: Tensor, draft_token_ids: Tensor, grad_weight_VdH: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `statistics_chunk`, and the weighted loss's gradient for `normed`; that for the weight is added to
    grad_weight_VdH, in place.
    """
    logits = (chunk.normed @ weight_VdH.T).float()
    top1_hit = draft_token_ids[logits.argmax(-1)] == chunk.argmax
    cross_entropy, acceptance, grad_logits = _pair_statistics(logits, chunk)
    grad_logits = grad_logits.mul_(chunk.row_weight[:, None]).to(weight_VdH.dtype)
    grad_weight_VdH += grad_logits.T @ chunk.normed
    return cross_entropy, acceptance, top1_hit, grad_logits @ weight_VdH


def _pair_statistics(logits_CVd: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy `[C]`, acceptance `[C]` and d cross_entropy / d logits `[C, V_d]`, all float32.

    The logits are overwritten by their probabilities and these by the gradient: passes over `[C, V_d]`
    dominate where products are fast.
    """
    probs = chunk.draft_probs.float()
    if chunk.draft_probs.dtype != torch.float32:
        # Rounding each entry to 8 bits moves the sum by up to a part in 500, which would bias loss and
        # gradient. Rows that only fill a chunk up sum to zero.
        probs = probs / probs.sum(dim=-1, keepdim=True).clamp(min=0.5)
    peak = logits_CVd.amax(dim=-1, keepdim=True)
    expected_logit = (probs * logits_CVd).sum(-1)
    draft = logits_CVd.sub_(peak).exp_()
    total = draft.sum(dim=-1, keepdim=True)
    draft.div_(total)
    cross_entropy = (peak + total.log()).squeeze(-1) - expected_logit
    acceptance = torch.minimum(probs * chunk.inside_mass[:, None], draft).sum(-1)
    return cross_entropy, acceptance, draft.sub_(probs)


class ChunkFunctions(NamedTuple):
    """The vocabulary work on chunks of `rows` rows. All chunks have one shape, so each function compiles to
    one graph for a whole run.
    """

    rows: int = DEFAULT_CHUNK_ROWS
    label: Callable[..., tuple[Tensor, Tensor, Tensor]] = label_chunk
    statistics: Callable[..., tuple[Tensor, ...]] = statistics_chunk
    gradient: Callable[..., tuple[Tensor, ...]] = gradient_chunk


PLAIN_CHUNKS = ChunkFunctions()


@torch.no_grad()
def target_labels(
    logits_of: Callable[[Tensor], Tensor],
    final_hidden_R0H: Tensor,
    draft_token_ids: Tensor,
    t2d: Tensor,
    chunks: ChunkFunctions = PLAIN_CHUNKS,
) -> TargetLabels:
    """Restrict the target's logits once for all steps; the full-vocabulary logits live for one chunk only."""
    num_rows, rows = len(final_hidden_R0H), chunks.rows
    draft_probs = final_hidden_R0H.new_empty(num_rows, len(draft_token_ids))
    inside_mass = torch.empty(num_rows, dtype=torch.float32, device=final_hidden_R0H.device)
    argmax = torch.empty(num_rows, dtype=torch.int64, device=final_hidden_R0H.device)
    for start in range(0, num_rows, rows):
        here = slice(start, min(start + rows, num_rows))
        count = here.stop - start
        hidden_CH = _fill_up(final_hidden_R0H[here], rows)
        probs, mass, largest = chunks.label(logits_of, hidden_CH, draft_token_ids)
        draft_probs[here], inside_mass[here], argmax[here] = probs[:count], mass[:count], largest[:count]
    return TargetLabels(draft_probs, inside_mass, argmax, t2d[argmax])


def vocabulary_loss(
    normed_RH: Tensor,
    head_weight_VdH: Tensor,
    labels: TargetLabels,
    label_index_R: Tensor,
    row_weight_R: Tensor,
    draft_token_ids: Tensor,
    chunks: ChunkFunctions = PLAIN_CHUNKS,
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
        chunks,
        torch.is_grad_enabled() and (normed_RH.requires_grad or head_weight_VdH.requires_grad),
    )
    return loss, RowStatistics(cross_entropy, acceptance, top1_hit)


def vocabulary_loss_reference(
    normed_RH: Tensor,
    head_weight_VdH: Tensor,
    labels: TargetLabels,
    label_index_R: Tensor,
    row_weight_R: Tensor,
    draft_token_ids: Tensor,
    chunks: ChunkFunctions = PLAIN_CHUNKS,
) -> tuple[Tensor, RowStatistics]:
    """`vocabulary_loss` in plain PyTorch, all rows at once (`chunks` is not used)."""
    draft_logits = (normed_RH @ head_weight_VdH.to(normed_RH.dtype).T).float()
    restricted_probs = labels.draft_probs[label_index_R].float()
    restricted_probs = restricted_probs / restricted_probs.sum(-1, keepdim=True)
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
        chunks: ChunkFunctions,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # Detached, because a compiled chunk function would be compiled again for one that requires gradients.
        normed_RH = normed_RH.detach()
        weight = head_weight_VdH.detach().to(normed_RH.dtype)
        num_rows = len(normed_RH)
        cross_entropy = torch.empty(num_rows, dtype=torch.float32, device=normed_RH.device)
        acceptance = torch.empty_like(cross_entropy)
        top1_hit = torch.empty(num_rows, dtype=torch.bool, device=normed_RH.device)
        grad_normed = torch.empty_like(normed_RH) if needs_grad else None
        grad_weight = torch.zeros_like(head_weight_VdH) if needs_grad else None
        for start in range(0, num_rows, chunks.rows):
            here = slice(start, min(start + chunks.rows, num_rows))
            count, index = here.stop - start, label_index_R[here]
            chunk = Chunk(
                *(
                    _fill_up(x, chunks.rows)
                    for x in (
                        normed_RH[here],
                        labels.draft_probs[index],
                        labels.inside_mass[index],
                        labels.argmax[index],
                        row_weight_R[here],
                    )
                )
            )
            if grad_normed is None or grad_weight is None:
                parts = list(chunks.statistics(chunk, weight, draft_token_ids))
            else:
                *parts, grad = chunks.gradient(chunk, weight, draft_token_ids, grad_weight)
                grad_normed[here] = grad[:count]
            for values, part in zip((cross_entropy, acceptance, top1_hit), parts, strict=True):
                values[here] = part[:count]
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


def _fill_up(x: Tensor, num_rows: int) -> Tensor:
    """x with zero rows behind it, so that every chunk has one shape."""
    return x if len(x) == num_rows else F.pad(x, [0, 0] * (x.ndim - 1) + [0, num_rows - len(x)])
