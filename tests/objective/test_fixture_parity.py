"""The official EAGLE-3 implementation's numbers are met: logits, sums, counts, acceptance, gradients."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

from eagle_train.batch import PackedBatch, TargetFeatures
from eagle_train.data.samples import answer_remaining_from_spans, spans_from_mask
from eagle_train.model.eagle3 import Eagle3Config, Eagle3DraftHead
from eagle_train.objective.unroll import supervise, unroll_states, unrolled_sums

STEP_DECAY = 0.8


class Fixture:
    """The reference file as our own objects."""

    def __init__(self, path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            self.sizes = json.loads(file.metadata()["config"])
            self.tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        weights = {n.removeprefix("weights."): t for n, t in self.tensors.items() if n.startswith("weights.")}
        self.embedding_VH = weights.pop("embed_tokens.weight")
        self.head = Eagle3DraftHead(self.config())
        self.head.load_state_dict(weights)
        self.batch = self.packed_batch()
        self.ttt_steps = len(self.tensors["step_rows"])

    def config(self) -> Eagle3Config:
        sizes = self.sizes
        return Eagle3Config(
            hidden_size=sizes["hidden_size"],
            intermediate_size=sizes["intermediate_size"],
            num_attention_heads=sizes["num_attention_heads"],
            num_key_value_heads=sizes["num_key_value_heads"],
            head_dim=sizes["hidden_size"] // sizes["num_attention_heads"],
            vocab_size=sizes["vocab_size"],
            draft_vocab_size=sizes["draft_vocab_size"],
            rms_norm_eps=sizes["rms_norm_eps"],
            rope_theta=sizes["rope_theta"],
            max_position_embeddings=512,
            aux_layer_ids=None,
        )

    def packed_batch(self) -> PackedBatch:
        cu_seqlens = self.tensors["cu_seqlens"].int()
        offsets = tuple(cu_seqlens.tolist())
        documents = list(pairwise(offsets))
        mask = self.tensors["assistant_mask"]
        remaining = [
            answer_remaining_from_spans(b - a, spans_from_mask(mask[a:b].numpy())) for a, b in documents
        ]
        return PackedBatch(
            input_ids=self.tensors["input_ids"].long(),
            position_ids=torch.cat([torch.arange(b - a) for a, b in documents]),
            answer_remaining=torch.cat([torch.from_numpy(part) for part in remaining]),
            cu_seqlens=cu_seqlens,
            offsets=offsets,
            max_seqlen=max(b - a for a, b in documents),
            num_tokens=offsets[-1],
            num_rows=1,
            sources=(),
        )

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.embedding_VH)


@pytest.fixture
def fixture(shared: Path) -> Fixture:
    return Fixture(shared / "fixtures" / "eagle3_reference.safetensors")


def test_draft_logits_on_supervised_rows_equal_the_official_ones(fixture: Fixture) -> None:
    supervision = supervise(fixture.batch.answer_remaining, fixture.ttt_steps)
    rows_R0 = supervision.rows_R0
    aux = fixture.tensors["aux_hidden_states"]
    outs = unroll_states(fixture.head, fixture.embed, fixture.batch, rows_R0, aux, fixture.ttt_steps)
    for step in range(fixture.ttt_steps):
        index = (supervision.label_R - supervision.step_R)[supervision.step_R == step]
        assert len(index) == int(fixture.tensors["step_rows"][step]) > 0
        expected = fixture.tensors[f"draft_logits.{step}"][rows_R0[index]]
        torch.testing.assert_close(fixture.head.logits(outs[step][index]), expected, rtol=1e-4, atol=2e-5)


def test_sums_loss_and_gradients_equal_the_official_ones(fixture: Fixture) -> None:
    tensors = fixture.tensors
    decay = STEP_DECAY ** torch.arange(fixture.ttt_steps)
    # The "final hidden state" of the fixture's target is its row index: its logits are looked up, not
    # computed.
    row_index = torch.arange(fixture.batch.num_slots, dtype=torch.float32)[:, None]
    sums = unrolled_sums(
        fixture.head,
        fixture.embed,
        lambda hidden: tensors["target_logits"][hidden[:, 0].long()],
        fixture.batch,
        supervise(fixture.batch.answer_remaining, fixture.ttt_steps),
        TargetFeatures(tensors["aux_hidden_states"], row_index),
        decay / tensors["step_rows"],
    )
    sums.loss.backward()
    assert sums.supervised_rows.tolist() == tensors["step_rows"].tolist()
    assert sums.loss_rows.tolist() == tensors["step_loss_rows"].tolist()
    assert sums.top1_hits.tolist() == tensors["step_top1_hits"].tolist()
    assert sums.prefix_hits.tolist() == tensors["step_prefix_hits"].tolist()
    assert 0 < sums.loss_rows[0] < sums.supervised_rows[0], "the fixture has out-of-vocabulary rows"
    torch.testing.assert_close(sums.loss_sum.float(), tensors["step_loss_sum"].float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        sums.acceptance_sum.float(), tensors["step_acceptance_sum"].float(), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(sums.loss.detach(), tensors["loss"].float().squeeze(), rtol=1e-6, atol=1e-6)
    compared = 0
    for name, parameter in fixture.head.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(
            parameter.grad, tensors[f"grads.{name}"], rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
        compared += 1
    assert compared == sum(name.startswith("grads.") for name in tensors)
