"""Which drafted tokens the target accepts, and the token that it adds: greedy, and exact rejection sampling.

Rejection sampling (Leviathan et al. 2023, algorithm 1): draft token x, drawn from q, is accepted with
probability min(1, p(x) / q(x)); after a rejection the token is drawn from max(p - q, 0), normalised. Then
what is emitted is distributed as p, whatever q is. A greedily drafted token is a draw from a point mass.

Shapes: B rows, n drafted tokens, T = n + 1 tokens read by the target, V vocabulary, V_d draft vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """num_accepted_B: leading accepted draft tokens; next_token_B: the target's own token behind them."""

    num_accepted_B: Tensor
    next_token_B: Tensor


def verify_greedily(logits_BTV: Tensor, drafts_Bn: Tensor, num_drafted_B: Tensor) -> Verdict:
    """Accept while the draft token is the target's arg-max. num_drafted_B: how many of the n count."""
    chosen_BT = logits_BTV.argmax(dim=-1)
    num_accepted_B = _leading(chosen_BT[:, :-1] == drafts_Bn, num_drafted_B)
    return Verdict(num_accepted_B, chosen_BT.gather(1, num_accepted_B[:, None])[:, 0])


def verify_by_sampling(
    logits_BTV: Tensor,
    drafts_Bn: Tensor,
    draft_probs_BnV: Tensor | None,
    num_drafted_B: Tensor,
    uniforms_BT: Tensor,
    temperature: float,
) -> Verdict:
    """Exact rejection sampling; draft_probs_BnV: q over the target's vocabulary, None for point masses.

    uniforms_BT: float64 draws of [0, 1): one for each acceptance, the last for the target's own token.
    """
    num_drafts = drafts_Bn.shape[1]
    probs_BTV = (logits_BTV.float() / temperature).softmax(dim=-1)
    accept_Bn = probs_BTV[:, :num_drafts].gather(2, drafts_Bn[..., None])[..., 0]
    if draft_probs_BnV is not None:
        accept_Bn = accept_Bn / draft_probs_BnV.gather(2, drafts_Bn[..., None])[..., 0]
    num_accepted_B = _leading(uniforms_BT[:, :num_drafts] < accept_Bn, num_drafted_B)
    rows_B = torch.arange(len(logits_BTV), device=logits_BTV.device)
    left_BV = probs_BTV[rows_B, num_accepted_B]
    if num_drafts:
        refused_B = num_accepted_B.clamp(max=num_drafts - 1)
        if draft_probs_BnV is None:
            proposal_BV = torch.zeros_like(left_BV).scatter_(1, drafts_Bn.gather(1, refused_B[:, None]), 1.0)
        else:
            proposal_BV = draft_probs_BnV[rows_B, refused_B]
        residual_BV = (left_BV - proposal_BV).clamp(min=0)
        # A refusal where p <= q everywhere is rounding: then p and q are equal.
        is_residual_B1 = (num_accepted_B < num_drafted_B)[:, None] & (residual_BV.sum(-1, keepdim=True) > 0)
        left_BV = torch.where(is_residual_B1, residual_BV, left_BV)
    return Verdict(num_accepted_B, draw(left_BV, uniforms_BT[:, -1]))


def draw(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """An index `[B]` in proportion to non-negative weights, by their inverse distribution function."""
    cumulative_BV = weights_BV.double().cumsum(dim=-1)
    threshold_B1 = uniform_B[:, None] * cumulative_BV[:, -1:]
    index_B1 = torch.searchsorted(cumulative_BV, threshold_B1, right=True)
    return index_B1[:, 0].clamp(max=weights_BV.shape[1] - 1)


def _leading(hits_Bn: Tensor, num_drafted_B: Tensor) -> Tensor:
    counts_Bn = torch.arange(hits_Bn.shape[1], device=hits_Bn.device) < num_drafted_B[:, None]
    return (hits_Bn & counts_Bn).long().cumprod(dim=1).sum(dim=1)
