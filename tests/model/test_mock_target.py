"""The mock target: everything that training asks of a target, without a forward."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle_train.batch import PackedBatch, TargetFeatures
from eagle_train.data.collator import BucketingCollator
from eagle_train.data.mock import MockSamples
from eagle_train.errors import InputError
from eagle_train.model.checkpoint import load_draft_head, save_draft_head
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.mock_target import LOGIT_SCALE, TABLE_ROWS, MockTarget, mock_config, parse_mock_target
from eagle_train.model.target_config import draft_config
from eagle_train.train.evaluate import micro_batch_sums

CPU = torch.device("cpu")


def mock_target(
    hidden_size: int = 64, vocab_size: int = 6000, dtype: torch.dtype = torch.float32
) -> MockTarget:
    return MockTarget(hidden_size, 8, vocab_size, dtype=dtype, device=CPU)


def batch_of(ids: list[int]) -> PackedBatch:
    return BucketingCollator(1)([{"input_ids": ids, "loss_mask": [0] + [1] * (len(ids) - 1)}])


def states(features: TargetFeatures) -> tuple[Tensor, Tensor]:
    return features.aux_hidden_states, features.final_hidden


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_and_dtypes_are_a_targets(dtype: torch.dtype) -> None:
    target = mock_target(dtype=dtype)
    features = target.features(batch_of([5, 6, 7]))
    assert features.aux_hidden_states.shape == (3, 3 * 64)
    assert features.final_hidden.shape == (3, 64)
    assert target.logits(features.final_hidden).shape == (3, 6000)
    assert target.embed(torch.tensor([1, 2])).shape == (2, 64)
    assert target.final_norm_weight().tolist() == [1.0] * 64
    tensors = (*states(features), target.logits(features.final_hidden), target.lm_head.weight)
    assert {tensor.dtype for tensor in tensors} == {dtype}
    assert not any(tensor.requires_grad for tensor in tensors)
    assert (target.dtype, target.device, target.vocab_size) == (dtype, CPU, 6000)
    assert target.aux_layer_ids == (2, 4, 5)
    assert type(target.model).__name__ == "MockTarget"


def test_features_depend_on_the_token_alone() -> None:
    features = mock_target().features(batch_of([5, 9, 5, 5 + TABLE_ROWS]))
    again = mock_target().features(batch_of([9, 5]))
    for rows, others in zip(states(features), states(again), strict=True):
        assert torch.equal(rows[0], rows[2])
        assert torch.equal(rows[0], rows[3])
        assert not torch.equal(rows[0], rows[1])
        assert torch.equal(rows[:2].flip(0), others)


def test_logits_are_neither_flat_nor_saturated() -> None:
    target = mock_target()
    logits = target.logits(target.features(batch_of(list(range(500)))).final_hidden)
    assert logits.std().item() == pytest.approx(LOGIT_SCALE, rel=0.05)


@pytest.mark.parametrize(
    ("hidden_size", "heads", "key_heads", "head_dim"),
    [
        (4096, 32, 8, 128),
        (2048, 16, 4, 128),
        (2112, 33, 33, 64),
        (1024, 16, 4, 64),
        (576, 9, 9, 64),
        (96, 3, 3, 32),
        (48, 3, 3, 16),
        (16, 1, 1, 16),
    ],
)
def test_heads_follow_from_the_hidden_size(
    hidden_size: int, heads: int, key_heads: int, head_dim: int
) -> None:
    config = mock_config(hidden_size, 8, 100)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (
        heads,
        key_heads,
        head_dim,
    )
    assert config.intermediate_size == 4 * hidden_size
    assert (config.num_hidden_layers, config.vocab_size) == (8, 100)


@pytest.mark.parametrize("hidden_size", [16, 96, 256])
def test_a_head_trains_on_a_mock_target_and_is_saved(hidden_size: int, tmp_path: Path) -> None:
    target = mock_target(hidden_size, vocab_size=500)
    samples = MockSamples(np.array([30, 17, 3]), target.vocab_size, 0.5, seed=0)
    torch.manual_seed(0)
    head = Eagle3DraftHead(draft_config(target, 200))
    batch = BucketingCollator(16)(samples[:])
    head.start_from_target(
        target.lm_head.weight, target.final_norm_weight(), target.features(batch).aux_hidden_states
    )
    sums = micro_batch_sums(head, target, batch, torch.ones(3) / batch.num_tokens)
    assert sums.supervised_rows.tolist() == batch.supervised_counts(3)
    sums.loss.backward()
    assert bool(sums.loss.isfinite())
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
        assert float(parameter.grad.abs().sum()) > 0, name

    save_draft_head(head, tmp_path, target_config=target.config, dtype=torch.float32)
    # A checkpoint leaves out aux layers that are the default.
    assert load_draft_head(tmp_path).config == replace(head.config, aux_layer_ids=None)


def test_aux_layers_are_checked_against_the_layers() -> None:
    with pytest.raises(InputError, match="the target has 3 layers"):
        MockTarget(16, 3, 10, dtype=torch.float32, device=CPU)
    target = MockTarget(16, 3, 10, dtype=torch.float32, device=CPU, aux_layer_ids=(0, 1, 2))
    assert target.aux_layer_ids == (0, 1, 2)


def test_sizes_are_read_from_text() -> None:
    assert parse_mock_target("4096,36,151936") == (4096, 36, 151936)
    assert parse_mock_target("64, 8, 500") == (64, 8, 500)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "give three whole numbers"),
        ("4096,36", "give three whole numbers"),
        ("4096,36,1000,2", "give three whole numbers"),
        ("4096,x,1000", "give three whole numbers"),
        ("4096,-36,1000", "give three whole numbers"),
        ("4096,36.0,1000", "give three whole numbers"),
        ("9" * 5000 + ",36,1000", "give three whole numbers"),
        ("0,36,1000", "its hidden size must lie between 1 and 65536"),
        ("65552,36,1000", "its hidden size must lie between 1 and 65536"),
        ("64,0,1000", "its number of layers must lie between 1 and 1000"),
        ("64,8,0", "its vocabulary must lie between 1 and 1048576"),
        ("100,8,1000", "its hidden size must be a multiple of 16, for example 112"),
    ],
)
def test_bad_sizes_are_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(InputError, match="--mock_target is ") as error:
        parse_mock_target(text)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
