"""Packed rows through transformers models: every family equals separate eager runs of the same weights."""

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

from eagle_train.errors import InputError
from eagle_train.model import target_attention
from eagle_train.model.attention import DocumentLayout
from eagle_train.model.target_attention import check_target, document_layout, register_target_attention

LENGTHS = (1, 3, 1, 6, 1, 50)  # five documents, then the bucket's tail of pad tokens
LAYOUT = DocumentLayout.from_offsets([sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)])
OTHER_DOCUMENT = slice(5, 11)  # the one whose token is changed
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4, "head_dim": 8, "attn_logit_softcapping": 0.5},
    "gemma3_text": {"sliding_window": 4, "head_dim": 8},
    "phi3": {},
    "gpt_oss": {"sliding_window": 4, "head_dim": 8, **EXPERTS},
    "cohere": {},
    "granite": {"attention_multiplier": 0.3},
    "olmo2": {},
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
    # These ask for a window in their mask but do not pass it to the attention function.
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3, **EXPERTS},
    "phimoe": {"sliding_window": 4, **EXPERTS},
    # Query and value heads of different sizes.
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        **EXPERTS,
        **LATENT,
    },
}
# An expert's matrix product has as many rows as the whole row routes to it, so others may move by a rounding.
MIXTURES = {"gpt_oss", "mixtral", "qwen3_moe", "qwen2_moe", "phimoe", "deepseek_v3"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are tiny; on a busy machine a second thread makes these tests several times slower."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def build(family: str, attention: str, **options: Any) -> Any:
    config = AutoConfig.for_model(family, **(SMALL | FAMILIES.get(family, {}) | options))
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval().float()


@cache
def models(family: str) -> tuple[Any, Any]:
    """(eager, ours) with one set of random weights; every parameter moves off its initial zero or one."""
    eager, ours = build(family, "eager"), build(family, register_target_attention())
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in eager.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours.load_state_dict(eager.state_dict())
    return eager, ours


def packed_ids() -> Tensor:
    ids = torch.randint(3, 96, (1, LAYOUT.num_rows), generator=torch.Generator().manual_seed(1))
    ids[:, -LENGTHS[-1] :] = SMALL["pad_token_id"]
    return ids


@torch.no_grad()
def states(model: Any, ids: Tensor, **options: Any) -> list[Tensor]:
    """Logits, then the hidden state after each layer."""
    output = model(input_ids=ids, use_cache=False, output_hidden_states=True, **options)
    return [output.logits, *output.hidden_states]


def packed_states(model: Any, ids: Tensor) -> list[Tensor]:
    position_ids = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with document_layout(LAYOUT):
        return states(model, ids, position_ids=position_ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_equal_separate_eager_runs(family: str) -> None:
    eager, ours = models(family)
    check_target(ours)
    ids = packed_ids()
    separate = [states(eager, ids[:, start:stop]) for start, stop in LAYOUT.documents]
    for got, *want in zip(packed_states(ours, ids), *separate, strict=True):
        expected = torch.cat(want, dim=1)
        scale = expected.abs().max().clamp_min(1.0)
        assert (got - expected).abs().max() / scale <= 1e-5


def test_without_a_layout_documents_of_a_packed_row_leak() -> None:
    """The control: what the tests above compare does differ when nothing isolates the documents."""
    ours = models("llama")[1]
    position_ids = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    leaking, isolated = (
        states(ours, packed_ids(), position_ids=position_ids)[0],
        packed_states(ours, packed_ids())[0],
    )
    assert (leaking - isolated)[:, LENGTHS[0] :].abs().max() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_of_another_document_changes_nothing(family: str) -> None:
    ours = models(family)[1]
    ids = packed_ids()
    others = torch.ones(LAYOUT.num_rows, dtype=torch.bool)
    others[OTHER_DOCUMENT] = False
    changed_ids = ids.clone()
    changed_ids[0, OTHER_DOCUMENT.start] = 3 + (ids[0, OTHER_DOCUMENT.start] - 2) % 93
    for before, after in zip(packed_states(ours, ids), packed_states(ours, changed_ids), strict=True):
        assert not torch.equal(before[:, OTHER_DOCUMENT], after[:, OTHER_DOCUMENT])
        before, after = before[:, others], after[:, others]
        if family in MIXTURES:
            assert (before - after).abs().max() <= 1e-5
        else:
            assert torch.equal(before, after)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
def test_windows_caps_and_sinks_are_exact_across_row_blocks(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_attention, "_BLOCK_ROWS", 3)
    test_packed_documents_equal_separate_eager_runs(family)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_right_padded_rows_equal_eager(family: str) -> None:
    eager, ours = models(family)
    ids = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    want = states(eager, ids, attention_mask=mask)[0]
    for options in ({}, {"attention_mask": mask}):
        got = states(ours, ids, **options)[0]
        assert (got - want)[mask.bool()].abs().max() <= 1e-5


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
@torch.no_grad()
def test_several_tokens_on_a_growing_cache_equal_eager(family: str) -> None:
    """As a decoder verifies a draft: a prompt, then five tokens at once behind it, past the window."""
    eager, ours = models(family)
    ids = torch.randint(3, 96, (1, 12), generator=torch.Generator().manual_seed(3))
    want = states(eager, ids)[0]
    cache, got = None, []
    for start, stop in pairwise((0, 6, 11, 12)):
        output = ours(input_ids=ids[:, start:stop], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        got.append(output.logits)
    assert (torch.cat(got, dim=1) - want).abs().max() <= 1e-5


@pytest.mark.parametrize("family", ["bloom", "falcon", "jamba"])
def test_families_beyond_the_interface_are_refused_by_name(family: str) -> None:
    model = build(family, "eager")
    with pytest.raises(InputError, match=type(model).__name__):
        check_target(model)


def test_a_model_that_bypasses_the_interface_cannot_run_without_a_mask() -> None:
    with pytest.raises(TypeError, match="MaskRule"):
        packed_states(build("bloom", register_target_attention()), packed_ids())


def test_chunked_attention_is_refused_beyond_one_chunk() -> None:
    small = {"head_dim": 8, "intermediate_size_mlp": 48, "num_hidden_layers": 4, **EXPERTS}
    with pytest.raises(InputError, match="llama4_text uses attention in chunks of 4 on 62 tokens"):
        packed_states(
            build("llama4_text", register_target_attention(), attention_chunk_size=4, **small), packed_ids()
        )


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_masks_that_a_window_does_not_describe_are_refused() -> None:
    ours = models("llama")[1]
    ids = packed_ids()[:, :12]
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with pytest.raises(InputError, match="llama uses padding before real tokens"):
        states(ours, ids, attention_mask=mask)
    with pytest.raises(
        InputError, match=r"LlamaAttention uses an attention mask of its own \[1, 1, 12, 12\]"
    ):
        states(ours, ids, attention_mask=torch.zeros(1, 1, 12, 12))
    with pytest.raises(InputError, match="llama uses a preallocated cache of 32 tokens"):
        ours(input_ids=ids, past_key_values=StaticCache(config=ours.config, max_cache_len=32), use_cache=True)


def test_a_layout_of_another_row_is_an_error_and_does_not_outlive_its_block() -> None:
    ours = models("llama")[1]
    ids = packed_ids()
    with (
        pytest.raises(ValueError, match="a document layout describes one row of 62 tokens"),
        document_layout(LAYOUT),
    ):
        states(ours, ids[:, :12])
    assert states(ours, ids[:, :12])[0].shape == (1, 12, 96)


def test_registering_twice_gives_the_same_name() -> None:
    assert register_target_attention() == register_target_attention() == "eagle_train"
