"""The chain walk at a temperature: what a sampling decoder is expected to accept along answers that it gave.

The decoder emits token x with the target's probability p(x), whatever the draft does (Leviathan et al. 2023,
appendix A.1). So an answer tells nothing of how it was accepted but this, by Bayes' rule:

    sampled proposal:  P(x was drafted and accepted | x was emitted) = q(x) min(1, p(x) / q(x)) / p(x)
                                                                     = min(1, q(x) / p(x))
    greedy proposal:   d alone is drafted, accepted with p(d), and a refusal never emits it:
                       1 where x = d, 0 elsewhere

and what follows x in the answer is independent of it. The draft reads its own earlier tokens, which are the
answer's as long as they were accepted: teacher forcing is exact.

Shapes: T rows, K steps, R supervised (row, step) pairs, R0 rows supervised at step 0.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eagle_train.batch import PackedBatch, TargetFeatures
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.objective.acceptance import answer_starts
from eagle_train.objective.unroll import Supervision, unroll_states

CHUNK_ROWS = 512  # rows whose logits exist at a time

FloatArray = npt.NDArray[np.float64]


@dataclass(slots=True)
class ExpectedCounts:
    """Expectations, given the answers, of a decoder's counts at n drafted tokens: verify steps and accepted
    tokens a position `[n]`. emitted: tokens behind each answer's first, which are certain.
    """

    steps: float
    emitted: int
    accepted_per_position: FloatArray

    @property
    def acceptance_length(self) -> float | None:
        """Tokens emitted per expected verify step, with the bonus token: 1..n+1."""
        return self.emitted / self.steps if self.steps else None


@torch.no_grad()
def acceptance_probabilities(
    head: Eagle3DraftHead,
    embed: Callable[[Tensor], Tensor],
    target_logits_of: Callable[[Tensor], Tensor],
    batch: PackedBatch,
    supervision: Supervision,
    features: TargetFeatures,
    ttt_steps: int,
    *,
    temperature: float,
    samples_proposal: bool,
) -> Tensor:
    """Probability `[K, T]`, float64, that the data token at each step of each row was drafted and accepted,
    given that it was emitted; 0 where not supervised. p and q are softmax(logits / temperature), and q is 0
    outside the draft vocabulary.
    """
    rows_R0 = supervision.rows_R0
    tokens_R0 = batch.input_ids[rows_R0 + 2].long()
    outs_KR0H = unroll_states(head, embed, batch, rows_R0, features.aux_hidden_states, ttt_steps)
    normed_RH = head.norm(outs_KR0H[supervision.step_R, supervision.label_R - supervision.step_R])
    tokens_R = tokens_R0[supervision.label_R]
    if samples_proposal:
        log_p_R0 = _log_probs(target_logits_of, features.final_hidden[rows_R0 + 1], tokens_R0, temperature)
        # Index into the draft vocabulary; a token outside it stands at 0 and counts as impossible.
        index_V = torch.zeros(head.config.vocab_size, dtype=torch.long, device=tokens_R.device)
        index_V[head.draft_token_ids] = torch.arange(len(head.draft_token_ids), device=tokens_R.device)
        log_q_R = _log_probs(head.lm_head, normed_RH, index_V[tokens_R], temperature)
        accept_R = (log_q_R - log_p_R0[supervision.label_R]).clamp(max=0).exp() * head.t2d[tokens_R]
    else:
        drafted_R = torch.cat([head.lm_head(states).argmax(-1) for states in normed_RH.split(CHUNK_ROWS)])
        accept_R = (head.draft_token_ids[drafted_R] == tokens_R).double()
    accept_KT = torch.zeros(ttt_steps, batch.num_slots, dtype=torch.float64, device=tokens_R.device)
    accept_KT[supervision.step_R, supervision.row_R] = accept_R.double()
    return accept_KT


def sampled_walk(
    accept_KT: FloatArray, answer_remaining_T: npt.NDArray[np.int32], num_speculative_tokens: int
) -> list[ExpectedCounts]:
    """Visits of each row, propagated from each answer's first: a row with v expected verify steps hands
    v P(m accepted) on to row t + m + 1. With probabilities 0 and 1 it is `chain_walk`.

    accept_KT: from `acceptance_probabilities`, K >= num_speculative_tokens. One result an answer, in order.
    """
    walks = []
    for start in answer_starts(answer_remaining_T).tolist():
        length = int(answer_remaining_T[start])
        visits = np.zeros(length + 1)
        visits[0] = 1.0
        accepted_n = np.zeros(num_speculative_tokens)
        for offset in range(length - 1):
            num_drafts = min(num_speculative_tokens, length - offset - 1)
            # reached[m]: verify steps from this row whose first m tokens are accepted.
            accept = accept_KT[:num_drafts, start + offset]
            reached = visits[offset] * np.concatenate([[1.0], accept.cumprod()])
            accepted_n[:num_drafts] += reached[1:]
            visits[offset + 1 : offset + num_drafts + 1] += reached[:-1] - reached[1:]
            visits[offset + num_drafts + 1] += reached[-1]
        walks.append(ExpectedCounts(float(visits[: length - 1].sum()), length - 1, accepted_n))
    return walks


def pool_expected(walks: Iterable[ExpectedCounts], num_speculative_tokens: int) -> ExpectedCounts:
    """Expectations added up before any division."""
    total = ExpectedCounts(0.0, 0, np.zeros(num_speculative_tokens))
    for walk in walks:
        total.steps += walk.steps
        total.emitted += walk.emitted
        total.accepted_per_position += walk.accepted_per_position
    return total


def _log_probs(
    logits_of: Callable[[Tensor], Tensor], states_RH: Tensor, index_R: Tensor, temperature: float
) -> Tensor:
    """Log-probability `[R]` of one entry of each row's softmax(logits / temperature), chunk by chunk."""
    parts = [
        (logits_of(states).float() / temperature).log_softmax(-1).gather(1, index[:, None])[:, 0]
        for states, index in zip(states_RH.split(CHUNK_ROWS), index_R.split(CHUNK_ROWS), strict=True)
    ]
    return torch.cat(parts)
