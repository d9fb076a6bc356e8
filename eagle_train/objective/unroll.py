"""Training-time test: K draft steps unrolled over a packed row, as sums.

Six tokens of one document, K = 2; row t at step k reads token x_{t+1+k} and predicts x_{t+2+k}:

    row t               0       1       2       3
    step 0  token in    x1      x2      x3      x4
            hidden in   fc(a0)  fc(a1)  fc(a2)  fc(a3)
            label       p1      p2      p3      p4        p_t: the target's distribution over x_{t+1}
    step 1  token in    x2      x3      x4      x5
            hidden in   out0    out1    out2    out3      the draft layer's own output at the same row
            label       p2      p3      p4      (p5)
            keys        step 0's keys of rows 0..t, and row t's own key of step 1; rotary position t + k

Shapes: T rows, K steps, R supervised (row, step) pairs, R0 rows supervised at step 0, H hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eagle_train.batch import PackedBatch, TargetFeatures, to_device
from eagle_train.model.attention import DocumentLayout, unrolled_attention
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.objective.losses import (
    PLAIN_CHUNKS,
    ChunkFunctions,
    RowStatistics,
    TargetLabels,
    target_labels,
    vocabulary_loss,
)

STEP_DECAY = 0.8  # w_k = 0.8^k (EAGLE-3, official training code)


@dataclass(frozen=True, slots=True)
class Supervision:
    """The supervised (row, step) pairs of a batch, known from its masks alone.

    rows_R0: rows supervised at step 0; row_R, step_R: row and step of each pair, step by step;
    label_R: index into rows_R0 of the row whose label the pair has (row + step); the pair's own row stands
    there at label_R - step_R. All int64.
    """

    rows_R0: Tensor
    row_R: Tensor
    step_R: Tensor
    label_R: Tensor

    def to(self, device: torch.device | str) -> "Supervision":
        return Supervision(
            *(to_device(t, device) for t in (self.rows_R0, self.row_R, self.step_R, self.label_R))
        )


@dataclass(frozen=True, slots=True)
class UnrolledSums:
    """Sums of one micro-batch; the division by global counts is the caller's.

    loss: scalar sum_k weight_k * loss_sum_k, differentiable; the rest detached, `[K]` float64 sums:
    loss_sum: cross-entropies; supervised_rows; loss_rows: those whose target arg-max can be drafted;
    acceptance_sum; top1_hits; prefix_hits: rows whose steps 0..k all hit. own_tokens, own_token_rows:
    scalars, data tokens that are the target's arg-max, of how many. hits_KT bool: the top-1 hit of each row
    and step.
    """

    loss: Tensor
    loss_sum: Tensor
    supervised_rows: Tensor
    loss_rows: Tensor
    acceptance_sum: Tensor
    top1_hits: Tensor
    prefix_hits: Tensor
    own_tokens: Tensor
    own_token_rows: int
    hits_KT: Tensor


def supervise(answer_remaining_T: Tensor, ttt_steps: int) -> Supervision:
    """List the pairs (t, k) with answer_remaining[t] >= k + 2. On the host, where the masks are."""
    rows_R0 = torch.nonzero(answer_remaining_T >= 2).squeeze(1)
    remaining_R0 = answer_remaining_T[rows_R0]
    row_parts, step_parts, label_parts = [], [], []
    for step in range(ttt_steps):
        index = torch.nonzero(remaining_R0 >= step + 2).squeeze(1)
        row_parts.append(rows_R0[index])
        step_parts.append(torch.full_like(index, step))
        # Within a turn answer_remaining falls by one a row, so row + step is `step` places further on in
        # rows_R0.
        label_parts.append(index + step)
    return Supervision(rows_R0, torch.cat(row_parts), torch.cat(step_parts), torch.cat(label_parts))


def unroll_states(
    head: Eagle3DraftHead,
    embed: Callable[[Tensor], Tensor],
    batch: PackedBatch,
    rows_R0: Tensor,
    aux_hidden_states_T3H: Tensor,
    ttt_steps: int,
    attention: Callable[..., Tensor] = unrolled_attention,
) -> Tensor:
    """The draft layer's un-normed outputs of all steps at the rows supervised at step 0, `[K, R0, H]`.

    Step 0 runs on every row, because later rows read its keys. A later step is read by its own row alone, so
    its projections and MLP run where something is supervised (the attention kernel still sees all rows).
    Rows near an answer's end then read a token behind it; they are not supervised at that step, and nothing
    else reads them.

    Between attentions a step sees T or `batch.supervised_len` rows, so that a compiled head meets few shapes;
    rows that only fill up are zero, and nothing reads them. Attention itself takes any layout and is not
    compiled.

    With `head.gradient_checkpointing`, what a step computes between attentions is computed again in the
    backward instead of being kept (Chen et al. 2016, arXiv:1604.06174); attention never runs twice.
    """
    project, finish = head.project, head.finish
    if head.gradient_checkpointing:
        # Nothing in a step is random, so there is no generator state to keep.
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        project, finish = partial(again, head.project), partial(again, head.finish)
    layout = DocumentLayout(batch.cu_seqlens, batch.offsets, batch.max_seqlen)
    num_slots, num_rows = batch.num_slots, len(rows_R0)
    assert batch.supervised_len in (0, max(batch.supervised_len, num_rows)), (
        f"{num_rows} supervised rows, but supervised_len is {batch.supervised_len}"
    )
    num_filled = max(batch.supervised_len - num_rows, 0)
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys.append(key)
        values.append(value)
        return attention(query, keys[0], values[0], tuple(keys[1:]), tuple(values[1:]), layout)

    def attend_from_rows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (
            x.new_zeros(num_slots, *x.shape[1:]).index_copy(0, rows_R0, x[:num_rows])
            for x in (query, key, value)
        )
        return fill_up(attend(query, key, value)[rows_R0])

    def fill_up(x: Tensor) -> Tensor:
        return F.pad(x, [0, 0] * (x.ndim - 1) + [0, num_filled])

    hidden = head.fuse(aux_hidden_states_T3H)
    embeds = embed(F.pad(batch.input_ids[1:], (0, 1))).to(hidden.dtype)
    hidden = finish(hidden, attend(*project(embeds, hidden, batch.position_ids)))
    hidden = fill_up(hidden[rows_R0])
    positions = fill_up(batch.position_ids[rows_R0])
    outs = [hidden[:num_rows]]
    for step in range(1, ttt_steps):
        tokens = fill_up(batch.input_ids[(rows_R0 + 1 + step).clamp(max=num_slots - 1)])
        embeds = embed(tokens).to(hidden.dtype)
        hidden = finish(hidden, attend_from_rows(*project(embeds, hidden, positions + step)))
        outs.append(hidden[:num_rows])
    return torch.stack(outs)


def unrolled_sums(
    head: Eagle3DraftHead,
    embed: Callable[[Tensor], Tensor],
    target_logits_of: Callable[[Tensor], Tensor],
    batch: PackedBatch,
    supervision: Supervision,
    features: TargetFeatures,
    step_weight_K: Tensor,
    chunks: ChunkFunctions = PLAIN_CHUNKS,
    *,
    differentiable: bool = True,
) -> UnrolledSums:
    """Unroll K = len(step_weight_K) steps and sum losses and acceptance over the supervised pairs.

    step_weight_K float32: weight_k of the loss, for example 0.8^k / N_k with N_k counted over the global
    batch. chunks: the vocabulary work on one chunk of rows, plain or compiled. differentiable: False spares
    the vocabulary's gradients, which are made beside its values.
    """
    ttt_steps = len(step_weight_K)
    rows_R0 = supervision.rows_R0
    outs_KR0H = unroll_states(head, embed, batch, rows_R0, features.aux_hidden_states, ttt_steps)
    labels = target_labels(
        target_logits_of, features.final_hidden[rows_R0 + 1], head.draft_token_ids, head.t2d, chunks
    )
    normed_RH = head.norm(outs_KR0H[supervision.step_R, supervision.label_R - supervision.step_R])
    head_weight: Tensor = head.lm_head.weight
    if not differentiable:
        normed_RH, head_weight = normed_RH.detach(), head_weight.detach()
    trained_R = labels.in_draft_vocab[supervision.label_R].float()
    loss, rows = vocabulary_loss(
        normed_RH,
        head_weight,
        labels,
        supervision.label_R,
        step_weight_K[supervision.step_R] * trained_R,
        head.draft_token_ids,
        chunks,
    )
    return _sum_by_step(loss, rows, labels, trained_R, batch, supervision, ttt_steps)


def _sum_by_step(
    loss: Tensor,
    rows: RowStatistics,
    labels: TargetLabels,
    trained_R: Tensor,
    batch: PackedBatch,
    supervision: Supervision,
    ttt_steps: int,
) -> UnrolledSums:
    def by_step(values_R: Tensor) -> Tensor:
        sums = torch.zeros(ttt_steps, dtype=torch.float64, device=values_R.device)
        return sums.index_add_(0, supervision.step_R, values_R.double())

    hits_KT = torch.zeros(ttt_steps, batch.num_slots, dtype=torch.bool, device=rows.top1_hit.device)
    hits_KT[supervision.step_R, supervision.row_R] = rows.top1_hit
    data_tokens_R0 = batch.input_ids[supervision.rows_R0 + 2]
    return UnrolledSums(
        loss=loss,
        loss_sum=by_step(rows.cross_entropy * trained_R),
        supervised_rows=by_step(torch.ones_like(trained_R)),
        loss_rows=by_step(trained_R),
        acceptance_sum=by_step(rows.acceptance),
        top1_hits=by_step(rows.top1_hit),
        prefix_hits=hits_KT.cumprod(0).sum(1).double(),
        own_tokens=(data_tokens_R0 == labels.argmax).sum().double(),
        own_token_rows=len(supervision.rows_R0),
        hits_KT=hits_KT,
    )
