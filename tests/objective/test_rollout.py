"""The unroll over a packed row equals what a serving engine does: one document, one row, one token at a time.

For each row t the engine prefills the draft on rows 0..t (tokens x_1..x_{t+1}, fused target states) into a
key/value cache; then it drafts on: each further step is a single token at position t + k that reads the
step's own output and appends its key and value to the cache.
"""

import math

import pytest
import torch
from torch import Tensor

from eagle_train.data.collator import BucketingCollator
from eagle_train.data.samples import Sample
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.target import FrozenTarget
from eagle_train.objective.unroll import supervise, unroll_states
from tests.documents import Spans, documents_of, random_head, supervised_pairs
from tests.tiny import tiny_target

K = 5
SHAPES: list[tuple[int, Spans]] = [
    (17, [(4, 13)]),
    (6, []),
    (26, [(0, 6), (6, 9), (12, 22)]),
    (11, [(3, 11)]),
]


class Cache:
    """Keys and values of one document so far, and plain softmax attention of new rows over them."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        first = len(self.keys)
        self.keys += key.unbind()
        self.values += value.unbind()
        group = query.shape[1] // key.shape[1]
        rows = []
        for index, query_Nd in enumerate(query):
            seen = first + index + 1
            keys_SNd = torch.stack(self.keys[:seen]).repeat_interleave(group, dim=1)
            values_SNd = torch.stack(self.values[:seen]).repeat_interleave(group, dim=1)
            probs_SN = ((keys_SNd * query_Nd).sum(-1) / math.sqrt(query.shape[-1])).softmax(0)
            rows.append((probs_SN[..., None] * values_SNd).sum(0))
        return torch.stack(rows)


def rollout(
    head: Eagle3DraftHead, target: FrozenTarget, sample: Sample, aux: Tensor, row: int, num_steps: int
) -> list[Tensor]:
    """Draft logits `[V_d]` of steps 0..num_steps-1 from one row, fed with the document's own tokens."""
    tokens = torch.from_numpy(sample.input_ids).long()
    cache = Cache()
    prefill = slice(1, row + 2)
    states = head.step(
        target.embed(tokens[prefill]), head.fuse(aux[: row + 1]), torch.arange(row + 1), cache.attend
    )
    hidden = states[-1:]
    logits = [head.logits(hidden)[0]]
    for step in range(1, num_steps):
        token = tokens[row + 1 + step]
        hidden = head.step(target.embed(token[None]), hidden, torch.tensor([row + step]), cache.attend)
        logits.append(head.logits(hidden)[0])
    assert len(cache.keys) == row + num_steps
    return logits


def own_aux_states(target: FrozenTarget, sample: Sample) -> Tensor:
    ids = torch.from_numpy(sample.input_ids).long()[None]
    states = target.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([states[layer_id][0] for layer_id in target.aux_layer_ids], dim=-1)


@pytest.mark.parametrize("granularity", [1, 32])
@pytest.mark.parametrize("padding_free", [True, False])
@torch.no_grad()
def test_every_supervised_row_and_step_equals_a_rollout_with_a_growing_cache(
    granularity: int, padding_free: bool
) -> None:
    """To 1e-5 of logits that spread over several units, in float32."""
    torch.set_num_threads(1)
    target = tiny_target()
    head = random_head(target, draft_vocab_size=48)
    samples = documents_of(*SHAPES)
    batch = BucketingCollator(granularity, padding_free)(samples)
    rows_R0 = supervise(batch.answer_remaining, K).rows_R0
    index_of = {row: index for index, row in enumerate(rows_R0.tolist())}
    states = unroll_states(head, target.embed, batch, rows_R0, target.features(batch).aux_hidden_states, K)
    compared = 0
    for index, sample in enumerate(samples):
        start = sum(map(len, samples[:index])) if padding_free else index * batch.bucket_len
        aux = own_aux_states(target, sample)
        pairs = set(supervised_pairs(*SHAPES[index], K))
        for row in sorted({row for row, _ in pairs}):
            num_steps = sum((row, step) in pairs for step in range(K))
            for step, expected in enumerate(rollout(head, target, sample, aux, row, num_steps)):
                ours = head.logits(states[step, index_of[start + row]])
                torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
                assert expected.std() > 0.3
                compared += 1
    # Answers of m tokens have m - 1 + m - 2 + ... pairs, one row fewer where they begin at token 0.
    assert compared == (8 + 7 + 6 + 5 + 4) + (4 + 3 + 2 + 1) + (2 + 1) + (9 + 8 + 7 + 6 + 5) + (
        7 + 6 + 5 + 4 + 3
    )
