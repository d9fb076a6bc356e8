"""A draft head on disk has the layout that engines load, and a damaged one is refused by tensor."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle_train.batch import PackedBatch
from eagle_train.data.collator import BucketingCollator
from eagle_train.errors import InputError
from eagle_train.model.checkpoint import load_draft_head, save_draft_head
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.target import FrozenTarget, load_target
from eagle_train.model.target_config import draft_config, read_target_config
from tests.documents import document, random_head
from tests.tiny import tiny_model, tiny_target, write_target

H, WIDTH, HEADS, KV_HEADS, HEAD_DIM, V, V_D = 32, 48, 4, 2, 8, 96, 40
IDS_KEY = "eagle_aux_hidden_state_layer_ids"
# Layout A of the EAGLE-3 reference: every tensor with its shape.
LAYOUT = {
    "fc.weight": [H, 3 * H],
    "midlayer.input_layernorm.weight": [H],
    "midlayer.hidden_norm.weight": [H],
    "midlayer.post_attention_layernorm.weight": [H],
    "midlayer.self_attn.q_proj.weight": [HEADS * HEAD_DIM, 2 * H],
    "midlayer.self_attn.k_proj.weight": [KV_HEADS * HEAD_DIM, 2 * H],
    "midlayer.self_attn.v_proj.weight": [KV_HEADS * HEAD_DIM, 2 * H],
    "midlayer.self_attn.o_proj.weight": [H, HEADS * HEAD_DIM],
    "midlayer.mlp.gate_proj.weight": [WIDTH, H],
    "midlayer.mlp.up_proj.weight": [WIDTH, H],
    "midlayer.mlp.down_proj.weight": [H, WIDTH],
    "norm.weight": [H],
    "lm_head.weight": [V_D, H],
    "d2t": [V_D],
    "t2d": [V],
}
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_theta": 10_000.0,
    "vocab_size": V,
    "draft_vocab_size": V_D,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return tiny_target()


@pytest.fixture(scope="module")
def head(target: FrozenTarget) -> Eagle3DraftHead:
    return random_head(target, V_D)


@pytest.fixture
def saved(tmp_path: Path, target: FrozenTarget, head: Eagle3DraftHead) -> Path:
    return save(head, target, tmp_path / "head")


def save(
    head: Eagle3DraftHead, target: FrozenTarget, directory: Path, dtype: torch.dtype = torch.float32
) -> Path:
    save_draft_head(head, directory, target_config=target.config, dtype=dtype)
    return directory


def tensors_in(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def config_in(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def test_the_tensors_are_layout_a_exactly(saved: Path) -> None:
    tensors = tensors_in(saved)
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == LAYOUT
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert {t.dtype for name, t in tensors.items() if name not in ("d2t", "t2d")} == {torch.float32}


def test_the_config_is_flat_and_complete(saved: Path) -> None:
    assert config_in(saved) == CONFIG


def test_nothing_but_weights_and_config_is_written(saved: Path) -> None:
    assert {path.name for path in saved.iterdir()} == {"model.safetensors", "config.json"}


def test_d2t_holds_offsets_of_the_ids_in_t2d(saved: Path, head: Eagle3DraftHead) -> None:
    tensors = tensors_in(saved)
    ids = torch.arange(V_D) + tensors["d2t"]
    assert torch.equal(ids, torch.nonzero(tensors["t2d"]).squeeze(1))
    assert torch.equal(ids, head.draft_token_ids)
    assert not torch.equal(ids, torch.arange(V_D)), "the vocabulary of this test must not be the first ids"


def test_floats_are_saved_in_the_asked_dtype_and_maps_are_not(
    tmp_path: Path, target: FrozenTarget, head: Eagle3DraftHead
) -> None:
    directory = save(head, target, tmp_path, torch.bfloat16)
    tensors = tensors_in(directory)
    assert tensors["d2t"].dtype == torch.int64
    assert torch.equal(tensors["fc.weight"], head.fc.weight.detach().bfloat16())
    assert config_in(directory)["torch_dtype"] == "bfloat16"
    assert head.fc.weight.dtype == torch.float32


def test_a_full_vocabulary_has_no_maps(tmp_path: Path, target: FrozenTarget) -> None:
    full = Eagle3DraftHead(draft_config(target, V))
    directory = save(full, target, tmp_path)
    assert set(tensors_in(directory)) == set(LAYOUT) - {"d2t", "t2d"}
    assert config_in(directory)["draft_vocab_size"] == config_in(directory)["vocab_size"] == V
    assert torch.equal(load_draft_head(directory).draft_token_ids, torch.arange(V))


def test_only_unusual_aux_layers_are_written(tmp_path: Path) -> None:
    default = tiny_target()
    assert IDS_KEY not in config_in(save(random_head(default, V_D), default, tmp_path / "default"))
    other = FrozenTarget(tiny_model(), (0, 3, 7))
    directory = save(random_head(other, V_D), other, tmp_path / "other")
    assert config_in(directory) == CONFIG | {IDS_KEY: [0, 3, 7]}
    assert load_draft_head(directory).config.aux_layer_ids == (0, 3, 7)


def test_the_position_limit_is_the_target_s(tmp_path: Path) -> None:
    target = tiny_target(max_position_embeddings=1024)
    directory = save(random_head(target, V_D), target, tmp_path)
    assert config_in(directory)["max_position_embeddings"] == 1024


def test_a_head_size_that_is_not_hidden_by_heads_is_kept(tmp_path: Path) -> None:
    target = tiny_target("qwen3", head_dim=16)
    directory = save(random_head(target, V_D), target, tmp_path)
    assert config_in(directory)["head_dim"] == 16
    tensors = tensors_in(directory)
    assert list(tensors["midlayer.self_attn.q_proj.weight"].shape) == [HEADS * 16, 2 * H]
    assert list(tensors["midlayer.self_attn.o_proj.weight"].shape) == [H, HEADS * 16]
    assert config_in(directory)["attention_bias"] is False
    assert load_draft_head(directory).config.head_dim == 16


def test_the_rotary_base_is_the_target_s(tmp_path: Path) -> None:
    target = tiny_target(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    directory = save(random_head(target, V_D), target, tmp_path)
    assert config_in(directory)["rope_theta"] == 5e5
    assert load_draft_head(directory).config.rope_theta == 5e5


def test_a_round_trip_is_bitwise(
    saved: Path, head: Eagle3DraftHead, tmp_path: Path, target: FrozenTarget
) -> None:
    loaded = load_draft_head(saved)
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    again = save(loaded, target, tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (saved / name).read_bytes(), name


def test_saving_over_an_older_head_leaves_no_piece_of_it(
    saved: Path, head: Eagle3DraftHead, target: FrozenTarget
) -> None:
    save(Eagle3DraftHead(draft_config(target, V)), target, saved)
    assert set(tensors_in(saved)) == set(LAYOUT) - {"d2t", "t2d"}
    assert {path.name for path in saved.iterdir()} == {"model.safetensors", "config.json"}


def test_a_failed_save_keeps_the_older_head(
    saved: Path, head: Eagle3DraftHead, target: FrozenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        Path(args[1]).write_bytes(b"half")
        raise OSError("disk full")

    before = (saved / "model.safetensors").read_bytes()
    monkeypatch.setattr("eagle_train.model.checkpoint.save_file", fail)
    with pytest.raises(InputError, match=r"model\.safetensors cannot be written \(disk full\)"):
        save(head, target, saved)
    assert (saved / "model.safetensors").read_bytes() == before
    assert {path.name for path in saved.iterdir()} == {"model.safetensors", "config.json"}


Tensors = dict[str, Tensor]


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: value for name, value in tensors.items() if name not in names}


def with_nan(tensors: Tensors) -> Tensors:
    tensors["midlayer.mlp.up_proj.weight"][3, 4] = float("nan")
    return tensors


def prefixed(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {prefix + name: value for name, value in tensors.items()}


def with_absolute_ids(tensors: Tensors) -> Tensors:
    return tensors | {"d2t": tensors["d2t"] + torch.arange(V_D)}


def with_other_t2d(tensors: Tensors) -> Tensors:
    return tensors | {"t2d": tensors["t2d"].roll(1)}


DAMAGES: dict[str, tuple[Callable[[Tensors], Tensors], tuple[str, ...]]] = {
    "no lm_head": (without("lm_head.weight"), ("lm_head.weight is missing",)),
    "no d2t": (without("d2t"), ("d2t is missing",)),
    "no maps at all": (without("d2t", "t2d"), ("d2t is missing", "t2d is missing")),
    "an extra bias": (lambda t: t | {"fc.bias": torch.zeros(H)}, ("fc.bias is not part of the layout",)),
    "the prefix of torch.compile": (
        prefixed("_orig_mod."),
        ("_orig_mod.fc.weight is not part of the layout", "fc.weight is missing"),
    ),
    "the prefix of DDP": (
        prefixed("module."),
        ("module.lm_head.weight is not part", "lm_head.weight is missing"),
    ),
    "a NaN": (with_nan, ("midlayer.mlp.up_proj.weight holds a NaN",)),
    "an infinity": (
        lambda t: t | {"norm.weight": t["norm.weight"] / 0},
        ("norm.weight holds a NaN or an infinity",),
    ),
    "a tensor of another shape": (
        lambda t: t | {"fc.weight": t["fc.weight"][:, :-1].contiguous()},
        ("fc.weight has shape [32, 95]", "[32, 96]"),
    ),
    "ids instead of offsets": (with_absolute_ids, ("d2t holds absolute ids", "write offsets")),
    "maps that disagree": (with_other_t2d, ("d2t and t2d disagree",)),
}


@pytest.mark.parametrize(("damage", "parts"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_head_is_refused_by_tensor(
    saved: Path, damage: Callable[[Tensors], Tensors], parts: tuple[str, ...]
) -> None:
    save_file(damage(tensors_in(saved)), saved / "model.safetensors")
    with pytest.raises(InputError) as refusal:
        load_draft_head(saved)
    for part in (str(saved), *parts):
        assert part in str(refusal.value)


def test_another_hidden_size_in_the_config_is_refused(saved: Path) -> None:
    (saved / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 64}))
    with pytest.raises(InputError, match=r"fc\.weight has shape \[32, 96\], the config says \[64, 192\]"):
        load_draft_head(saved)


CONFIG_FAULTS = {
    "no config": (None, "does not exist"),
    "no JSON": ("{", "is not JSON"),
    "no object": ("[]", "no JSON object"),
    "no sizes": ('{"model_type": "llama"}', "lacks hidden_size"),
    "no number of layers": (json.dumps(CONFIG | {"num_hidden_layers": None}), "lacks num_hidden_layers"),
    "four aux layers": (json.dumps(CONFIG | {IDS_KEY: [1, 2, 3, 4]}), "three layers"),
}


@pytest.mark.parametrize(("text", "part"), CONFIG_FAULTS.values(), ids=CONFIG_FAULTS)
def test_a_bad_config_is_refused(saved: Path, text: str | None, part: str) -> None:
    (saved / "config.json").unlink()
    if text is not None:
        (saved / "config.json").write_text(text)
    with pytest.raises(InputError, match=part):
        load_draft_head(saved)


def test_pickled_or_broken_weights_are_refused(saved: Path) -> None:
    (saved / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(InputError, match="not a sound safetensors file"):
        load_draft_head(saved)
    (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
    with pytest.raises(InputError, match="not unpickled"):
        load_draft_head(saved)


def test_published_forms_of_the_same_head_load(saved: Path, head: Eagle3DraftHead) -> None:
    tensors = tensors_in(saved)
    embedding = {"embed_tokens.weight": torch.ones(V, H)}
    save_file(tensors | embedding | {"d2t": tensors["d2t"].int()}, saved / "model.safetensors")
    assert torch.equal(load_draft_head(saved).draft_token_ids, head.draft_token_ids)
    (saved / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:6]}, saved / "model-00001-of-00002.safetensors")
    save_file({name: tensors[name] for name in names[6:]}, saved / "model-00002-of-00002.safetensors")
    assert torch.equal(load_draft_head(saved).lm_head.weight, head.lm_head.weight)


def batch() -> PackedBatch:
    return BucketingCollator(8)([document(11, [(3, 9)], seed) for seed in range(2)])


def assert_same_features(directory: Path, model: torch.nn.Module) -> None:
    """What is read from disk gives bit for bit what the model in memory gives."""
    read_target_config(str(directory))
    loaded = load_target(str(directory), dtype=torch.float32, device=torch.device("cpu"))
    ours, own = loaded.features(batch()), FrozenTarget(model).features(batch())
    assert torch.equal(ours.aux_hidden_states, own.aux_hidden_states)
    assert torch.equal(ours.final_hidden, own.final_hidden)
    assert torch.equal(loaded.logits(ours.final_hidden), FrozenTarget(model).logits(own.final_hidden))


@pytest.mark.parametrize("tied", [False, True], ids=["its own head", "a tied head"])
@pytest.mark.parametrize("shard_size", ["1GB", "20KB"], ids=["one file", "shards"])
def test_a_target_gives_the_same_features_however_it_is_stored(
    tmp_path: Path, shard_size: str, tied: bool
) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    assert_same_features(tmp_path, model)


def test_a_stray_second_weight_file_beside_a_target_is_ignored(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    stray = {name: torch.zeros_like(value) for name, value in tensors_in(tmp_path).items()}
    save_file(stray, tmp_path / "consolidated.safetensors", metadata={"format": "pt"})
    assert_same_features(tmp_path, model)


def test_a_target_with_pickled_weights_only_is_refused(tmp_path: Path, target_dir: Path) -> None:
    directory = Path(shutil.copytree(target_dir, tmp_path / "target"))
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    with pytest.raises(InputError, match=r"not unpickled.*save_pretrained"):
        read_target_config(str(directory))
    with pytest.raises(InputError, match="could not be loaded"):
        load_target(str(directory), dtype=torch.float32, device=torch.device("cpu"))


def test_a_target_of_other_sizes_than_its_config_is_refused(tmp_path: Path) -> None:
    directory = write_target(tmp_path / "target")
    config = config_in(directory)
    (directory / "config.json").write_text(json.dumps(config | {"intermediate_size": 50}))
    with pytest.raises(InputError, match="could not be loaded"):
        load_target(str(directory), dtype=torch.float32, device=torch.device("cpu"))
