"""A pair that does not belong together, prompts that do not fit and options out of range: one clear line."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from eagle_train.decode.chain import decode_plain, measure_acceptance
from eagle_train.decode.check import check_pair, draft_aux_layer_ids, is_embedding_of
from eagle_train.decode.results import Prompt
from eagle_train.errors import InputError
from eagle_train.model.eagle3 import Eagle3Config, Eagle3DraftHead
from eagle_train.model.target import FrozenTarget
from eagle_train.model.target_config import draft_config
from tests.tiny import tiny_model, tiny_target

PROMPT = Prompt((4, 5, 6), "questions.jsonl:3")


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return tiny_target()


def head_with(target: FrozenTarget, **changes: Any) -> Eagle3DraftHead:
    config: Eagle3Config = replace(draft_config(target, 24), **changes)
    return Eagle3DraftHead(config)


def test_a_pair_that_belongs_together_passes(target: FrozenTarget) -> None:
    check_pair(target, head_with(target))
    assert draft_aux_layer_ids(target, head_with(target, aux_layer_ids=None)) == (2, 4, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "hidden size is 64, the target's is 32"),
        ({"vocab_size": 97}, "vocabulary size is 97, the target's is 96"),
        ({"vocab_size": 95}, "vocabulary size is 95, the target's is 96"),
        ({"aux_layer_ids": (2, 6, 8)}, "aux layers 2 6 8, but the target has layers 0 to 7"),
    ],
)
def test_a_draft_of_another_target_is_refused_by_name(
    target: FrozenTarget, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as error:
        measure_acceptance(target, head_with(target, **changes), [PROMPT], progress=False)
    assert "use the target that the draft was trained for" in str(error.value)
    assert "\n" not in str(error.value)


def test_default_aux_layers_need_seven_layers() -> None:
    shallow = FrozenTarget(tiny_model(num_hidden_layers=6), aux_layer_ids=(1, 3, 5))
    check_pair(shallow, head_with(shallow))
    with pytest.raises(InputError, match="needs at least 7, but the target has 6"):
        check_pair(shallow, head_with(shallow, aux_layer_ids=None))


def test_a_draft_with_a_nan_is_refused_with_the_tensors_name(target: FrozenTarget) -> None:
    head = head_with(target)
    with torch.no_grad():
        head.midlayer.mlp.up_proj.weight[3, 4] = float("nan")
    with pytest.raises(InputError, match=r"a NaN or an infinity in midlayer\.mlp\.up_proj\.weight;"):
        measure_acceptance(target, head, [PROMPT], progress=False)


def test_embeddings_are_compared_in_chunks_up_to_the_first_difference(
    target: FrozenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_train.decode.check.EMBEDDING_ROWS", 10)
    own_VH = target.embed(torch.arange(96)).clone()
    embed, asked_for = target.embed, list[list[int]]()

    def counted(ids: torch.Tensor) -> torch.Tensor:
        asked_for.append(ids.tolist())
        return embed(ids)

    monkeypatch.setattr(target, "embed", counted)
    assert is_embedding_of(target, own_VH)
    assert is_embedding_of(target, own_VH.bfloat16())
    assert max(map(len, asked_for)) == 10
    assert [token for ids in asked_for for token in ids] == [*range(96)] * 2
    for row, chunks in ((95, 10), (12, 2)):
        asked_for.clear()
        changed = own_VH.clone()
        changed[row] += 1
        assert not is_embedding_of(target, changed)
        assert len(asked_for) == chunks
    assert not is_embedding_of(target, own_VH[:95])
    assert not is_embedding_of(target, own_VH[:, :16])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "there are no prompts"),
        ([PROMPT, Prompt((), "questions.jsonl:4")], r"questions\.jsonl:4: the prompt has no tokens"),
        ([Prompt((1, 96), "q:1")], "q:1: token id 96 lies outside the target's vocabulary of 96"),
        (
            [PROMPT, Prompt((1,) * 500, "q:2")],
            "q:2: the prompt's 500 tokens and 16 new ones exceed the target's context of 512 tokens; "
            "shorten the prompt or lower --max_new_tokens to 12",
        ),
        ([Prompt((1,) * 512, "q:2")], "context of 512 tokens; shorten the prompt$"),
    ],
)
def test_prompts_that_do_not_fit_are_refused_by_source(
    target: FrozenTarget, prompts: list[Prompt], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        measure_acceptance(target, head_with(target), prompts, max_new_tokens=16, progress=False)
    with pytest.raises(InputError, match=message):
        decode_plain(target, prompts, max_new_tokens=16, progress=False)


def test_a_rotary_embedding_that_changes_with_length_bounds_the_context() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    target = tiny_target(rope_parameters=rope)
    with pytest.raises(InputError, match="context of 64 tokens; shorten the prompt or lower"):
        decode_plain(target, [Prompt((1,) * 60, "q:1")], max_new_tokens=5, progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": 0}, "--num_speculative_tokens is 0"),
        ({"max_new_tokens": 0}, "--max_new_tokens is 0"),
        ({"batch_size": -1}, "--batch_size is -1"),
        ({"temperature": -0.5}, r"--temperature is -0\.5"),
        ({"temperature": 1e-40}, "--temperature is 1e-40; it must be 0 .* or at least 1e-06"),
        ({"seed": -1}, "--seed is -1"),
        ({"temperature": float("nan")}, "--temperature is nan"),
        ({"proposal": "best"}, "--proposal is 'best'; it must be one of greedy, sampled"),
    ],
)
def test_options_out_of_range_are_refused(
    target: FrozenTarget, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        measure_acceptance(target, head_with(target), [PROMPT], progress=False, **options)
