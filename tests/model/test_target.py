"""The frozen target of several families: draft sizes, states, logits, and that training leaves it alone."""

import hashlib
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import eagle_train.model.target
from eagle_train.config import TrainConfig
from eagle_train.data.collator import BucketingCollator
from eagle_train.errors import InputError
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.target import FrozenTarget, probe_target
from eagle_train.model.target_config import check_rope, draft_config, resolve_aux_layer_ids
from eagle_train.train.evaluate import micro_batch_sums
from eagle_train.train.loop import step_weights, supervised_counts
from eagle_train.train.optim import make_optimizer
from tests.documents import documents_of, random_head
from tests.tiny import tiny_model, tiny_target

EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
# Scales and caps so strong that logits without them would be plainly wrong.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "granite": {"logits_scaling": 8.0},
    "cohere": {"logit_scale": 0.0625},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 2.0},
    "gpt_oss": {"head_dim": 16, **EXPERTS},
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
}
SCALED = ("granite", "cohere", "gemma2")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def target_of(family: str) -> FrozenTarget:
    return tiny_target(family, **FAMILIES[family])


def packed() -> Any:
    return BucketingCollator(16)(documents_of((11, [(3, 9)]), (1, []), (7, [(2, 7)])))


def own_outputs(target: FrozenTarget, batch: Any) -> list[Any]:
    """The model's own forward over each document (and the padded tail) alone."""
    with torch.no_grad():
        return [
            target.model(
                input_ids=batch.input_ids[None, a:b],
                position_ids=batch.position_ids[None, a:b],
                use_cache=False,
                output_hidden_states=True,
            )
            for a, b in pairwise(batch.offsets)
        ]


@pytest.mark.parametrize(
    ("family", "heads", "kv_heads", "head_dim", "intermediate"),
    [
        ("llama", 4, 2, 8, 48),
        ("qwen3", 4, 2, 16, 48),
        ("gpt_oss", 4, 2, 16, 48),
        ("mixtral", 4, 2, 8, 48),
        ("qwen3_moe", 4, 2, None, 48),
    ],
)
def test_u24_draft_shapes_follow_the_targets_head_size(
    family: str, heads: int, kv_heads: int, head_dim: int | None, intermediate: int
) -> None:
    target = target_of(family)
    # Where the test names no head size, the config class has one of its own, and the target's tensors tell.
    head_dim = head_dim or target.layers[0].self_attn.q_proj.weight.shape[0] // heads
    attention = Eagle3DraftHead(draft_config(target, 24)).midlayer.self_attn
    assert attention.q_proj.weight.shape == (heads * head_dim, 2 * 32)
    assert attention.k_proj.weight.shape == attention.v_proj.weight.shape == (kv_heads * head_dim, 2 * 32)
    assert attention.o_proj.weight.shape == (32, heads * head_dim)
    own = target.layers[0].self_attn
    assert own.q_proj.weight.shape[0] == attention.q_proj.weight.shape[0]
    assert own.k_proj.weight.shape[0] == attention.k_proj.weight.shape[0]
    assert draft_config(target, 24).intermediate_size == intermediate


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_u27_the_drafts_width_is_at_least_the_hidden_size_and_settable(family: str) -> None:
    narrow = FrozenTarget(tiny_model(family, **(FAMILIES[family] | {"intermediate_size": 16})))
    assert draft_config(narrow, 24).intermediate_size == 32
    assert draft_config(narrow, 24, 20).intermediate_size == 20
    assert Eagle3DraftHead(draft_config(narrow, 24, 20)).midlayer.mlp.up_proj.weight.shape == (20, 32)


def test_draft_config_takes_the_rest_from_the_target() -> None:
    rope = {"rope_type": "default", "rope_theta": 5e5}
    config = draft_config(tiny_target("llama", rms_norm_eps=1e-3, rope_parameters=rope), 24)
    assert (config.hidden_size, config.vocab_size, config.draft_vocab_size) == (32, 96, 24)
    assert (config.rms_norm_eps, config.rope_theta, config.max_position_embeddings) == (1e-3, 5e5, 512)
    assert config.aux_layer_ids == (2, 4, 5)


def trained_final_norm(family: str) -> FrozenTarget:
    target = target_of(family)
    generator = torch.Generator().manual_seed(0)
    target.decoder.norm.weight.data = torch.randn(32, generator=generator)
    return target


def test_the_final_norm_weight_is_the_scale_that_the_family_applies() -> None:
    """To 1e-5: the norm's epsilon. Gemma stores its scale minus one; Cohere's is no RMS norm."""
    llama, gemma = trained_final_norm("llama"), trained_final_norm("gemma2")
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(llama.final_norm_weight(), llama.decoder.norm.weight, **close)
    torch.testing.assert_close(gemma.final_norm_weight(), 1 + gemma.decoder.norm.weight, **close)
    assert torch.equal(trained_final_norm("cohere").final_norm_weight(), torch.ones(32))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_packed_row_equal_the_models_own(family: str) -> None:
    """Relative difference at most 1e-5 in float32."""
    target, batch = target_of(family), packed()
    ours = target.logits(target.features(batch).final_hidden)
    own = torch.cat([output.logits[0] for output in own_outputs(target, batch)])
    assert (ours - own).norm() <= 1e-5 * own.norm()
    raw = target.lm_head(target.features(batch).final_hidden)
    assert (family in SCALED) == bool((raw - own).norm() > 0.05 * own.norm())
    probe_target(target)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("aux_layer_ids", [None, (0, 3, 7)])
def test_aux_states_are_the_hidden_states_that_enter_the_layers(
    family: str, aux_layer_ids: tuple[int, int, int] | None
) -> None:
    """hidden_states[i] of transformers enters layer i; to 1e-5 of states of order 1."""
    model = tiny_model(family, **FAMILIES[family])
    target, batch = FrozenTarget(model, aux_layer_ids), packed()
    features = target.features(batch)
    outputs = own_outputs(target, batch)
    ids = aux_layer_ids or (2, 4, 5)
    assert target.aux_layer_ids == ids
    aux = torch.cat([torch.cat([out.hidden_states[i][0] for i in ids], -1) for out in outputs])
    scale = float(aux.abs().max())
    torch.testing.assert_close(features.aux_hidden_states, aux, rtol=0, atol=1e-5 * scale)
    final = torch.cat([output.hidden_states[-1][0] for output in outputs])
    torch.testing.assert_close(features.final_hidden, final, rtol=0, atol=1e-5 * float(final.abs().max()))
    assert len({float(part.sum()) for part in aux.chunk(3, -1)}) == 3, "three different states"
    assert not any(layer._forward_pre_hooks for layer in target.layers), "no hook is left behind"


def test_embeddings_are_the_raw_ones_even_where_the_family_scales_them() -> None:
    target = target_of("gemma2")
    ids = torch.tensor([5, 9])
    assert torch.equal(target.embed(ids), target.model.get_input_embeddings().weight[ids])
    entering = own_outputs(target, packed())[0].hidden_states[0][0, 0]
    assert not torch.allclose(entering, target.embed(packed().input_ids[:1])[0])


class Tampered(torch.nn.Module):
    """A head that scales what it says in a way that FrozenTarget does not know."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.forward_of_model = model.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.forward_of_model(*args, **kwargs)
        output.logits = output.logits * 1.01
        return output


def test_the_probe_refuses_unknown_scaling_by_class_name(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    probe_target(target)
    monkeypatch.setattr(target.model, "forward", Tampered(target.model).forward)
    with pytest.raises(InputError, match=r"LlamaForCausalLM gives other logits .* difference 0\.0099.*limit"):
        probe_target(target)


def test_the_probe_refuses_attention_that_reads_across_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("qwen3", head_dim=16)
    probe_target(target)
    monkeypatch.setattr(eagle_train.model.target, "document_layout", nullcontext)
    with pytest.raises(InputError, match="Qwen3ForCausalLM reads across the documents"):
        probe_target(target)


def test_the_probe_refuses_logits_that_are_not_numbers() -> None:
    target = tiny_target()
    target.lm_head.weight[3] = float("nan")
    with pytest.raises(InputError, match="LlamaForCausalLM"):
        probe_target(target)


@pytest.mark.parametrize(("num_layers", "expected"), [(7, (2, 3, 4)), (8, (2, 4, 5)), (32, (2, 16, 29))])
def test_default_aux_layers_are_low_middle_and_high(num_layers: int, expected: tuple[int, int, int]) -> None:
    assert resolve_aux_layer_ids(num_layers, None) == expected
    assert resolve_aux_layer_ids(num_layers, (0, 1, num_layers - 1)) == (0, 1, num_layers - 1)


def test_a_shallow_target_needs_named_layers() -> None:
    with pytest.raises(InputError, match=r"has 6 layers; .* at least 7.*--aux_layer_ids 0 1 2"):
        resolve_aux_layer_ids(6, None)
    assert resolve_aux_layer_ids(3, (0, 1, 2)) == (0, 1, 2)


@pytest.mark.parametrize("ids", [(2, 4, 8), (-1, 2, 4), (2, 2, 4), (4, 2, 5), (2, 4), (1, 2, 3, 4), ()])
def test_aux_layers_out_of_range_or_order_are_refused_with_the_limit(ids: Any) -> None:
    with pytest.raises(
        InputError, match=rf"--aux_layer_ids is {' '.join(map(str, ids))}; .* between 0 and 7"
    ):
        resolve_aux_layer_ids(8, ids)


def test_a_model_without_an_output_head_is_refused() -> None:
    model: Any = tiny_model()
    model.set_output_embeddings(None)
    with pytest.raises(InputError, match="LlamaForCausalLM has no output head"):
        FrozenTarget(model)


def digest(tensors: dict[str, Tensor]) -> str:
    hashed = hashlib.sha256()
    for name in sorted(tensors):
        hashed.update(name.encode() + tensors[name].numpy().tobytes())
    return hashed.hexdigest()


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_u27_training_moves_every_tensor_of_the_head_and_none_of_the_target(family: str) -> None:
    target = target_of(family)
    head = random_head(target, draft_vocab_size=96)
    optimizer = make_optimizer(head, TrainConfig(), 1e-2)
    before = {name: parameter.detach().clone() for name, parameter in head.named_parameters()}
    frozen = digest(target.model.state_dict())
    batch = packed()
    weights = step_weights(supervised_counts([batch], 3), 0.8)
    micro_batch_sums(head, target, batch, weights).loss.backward()
    optimizer.step()
    assert digest(target.model.state_dict()) == frozen
    assert not any(
        parameter.requires_grad or parameter.grad is not None for parameter in target.model.parameters()
    )
    assert not target.model.training
    moved = [name for name, parameter in head.named_parameters() if not torch.equal(parameter, before[name])]
    assert moved == list(before)


def test_u27_the_trained_tensors_are_those_of_the_formula() -> None:
    """H 32, I 48, 4 heads and 2 key/value heads of 16, V_d 24."""
    head = Eagle3DraftHead(draft_config(tiny_target("qwen3", head_dim=16), 24))
    fuse, norms, lm_head = 3 * 32 * 32, 4 * 32, 24 * 32
    attention = 2 * 32 * (4 * 16 + 2 * 16 + 2 * 16) + 4 * 16 * 32
    mlp = 3 * 32 * 48
    trainable = sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad)
    assert trainable == fuse + attention + mlp + norms + lm_head


@pytest.mark.parametrize(
    ("kind", "limit"), [("longrope", 4096), ("dynamic", 4096), ("default", None), ("yarn", None)]
)
def test_rotary_embeddings_that_change_with_the_row_are_refused_beyond_their_length(
    kind: str, limit: int | None
) -> None:
    """Phi-3 with long factors: on one row a document of 40 tokens changed another's logits by 39 %."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 4096}
    config = SimpleNamespace(rope_parameters=rope, max_position_embeddings=131072)
    check_rope(config, 4096)
    if limit is None:
        check_rope(config, 8192)
    else:
        with pytest.raises(InputError, match=f"8192.*{limit}.*{kind}"):
            check_rope(config, 8192)
