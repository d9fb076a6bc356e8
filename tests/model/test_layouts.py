"""Heads in other published layouts load weight for weight, and what our layer lacks is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle_train.errors import InputError
from eagle_train.model.checkpoint import load_draft_head, save_draft_head
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.layouts import aux_layer_ids
from tests.documents import random_head
from tests.tiny import tiny_target

IDS_KEY = "eagle_aux_hidden_state_layer_ids"
INDEX = "model.safetensors.index.json"
OUTER = ("architectures", "model_type", "draft_vocab_size", "torch_dtype", "tie_word_embeddings")


@pytest.fixture(scope="module")
def head() -> Eagle3DraftHead:
    return random_head(tiny_target(), 40)


@pytest.fixture
def saved(head: Eagle3DraftHead, tmp_path: Path) -> Path:
    save_draft_head(head, tmp_path, target_config=tiny_target().config, dtype=torch.float32)
    return tmp_path


def as_speculators(directory: Path, **changes: Any) -> None:
    """The same head as the speculators library writes it; a change to None takes the key out."""
    tensors, config = load_file(directory / "model.safetensors"), read(directory)
    layer = {key: value for key, value in config.items() if key not in (*OUTER, "rope_theta")}
    layer |= {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    outer: dict[str, Any] = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config["draft_vocab_size"],
        "target_hidden_size": None,
        "norm_before_residual": False,
        IDS_KEY: None,
    }
    values = outer | {"transformer_layer_config": layer | changes.pop("layer", {})} | changes
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    embedding = torch.ones(config["vocab_size"], config["hidden_size"])
    save_file(renamed | {"embed_tokens.weight": embedding}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(values))


def read(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def shard(directory: Path) -> dict[str, str]:
    """Split the weights over two files with an index, as large models are stored."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    parts: list[dict[str, Tensor]] = [{}, {}]
    weight_map = {}
    for position, name in enumerate(sorted(tensors)):
        parts[position % 2][name] = tensors[name]
        weight_map[name] = f"model-0000{position % 2 + 1}-of-00002.safetensors"
    for number, part in enumerate(parts):
        save_file(part, directory / f"model-0000{number + 1}-of-00002.safetensors")
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def assert_same(directory: Path, head: Eagle3DraftHead) -> None:
    loaded = load_draft_head(directory)
    assert loaded.state_dict().keys() == head.state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert loaded.config.rope_theta == head.config.rope_theta
    assert loaded.config.max_position_embeddings == head.config.max_position_embeddings


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("layout", ["official", "layers.0 names", "speculators"])
def test_published_layouts_load_weight_for_weight(
    layout: str, sharded: bool, saved: Path, head: Eagle3DraftHead
) -> None:
    if layout == "speculators":
        as_speculators(saved)
    if layout == "layers.0 names":
        tensors = load_file(saved / "model.safetensors")
        renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        save_file(renamed, saved / "model.safetensors")
    if sharded:
        shard(saved)
    assert_same(saved, head)


def test_a_file_beside_the_index_is_not_read(saved: Path, head: Eagle3DraftHead) -> None:
    shard(saved)
    save_file({"fc.weight": torch.zeros(32, 96)}, saved / "optimizer.safetensors")
    assert_same(saved, head)


def test_a_lost_shard_or_tensor_is_named(saved: Path) -> None:
    weight_map = shard(saved)
    second = saved / "model-00002-of-00002.safetensors"
    kept = load_file(second)
    name = sorted(kept)[0]
    save_file({key: value for key, value in kept.items() if key != name}, second)
    with pytest.raises(InputError, match=f"lists {name}, which no shard holds"):
        load_draft_head(saved)
    second.unlink()
    with pytest.raises(InputError, match=r"model-00002-of-00002\.safetensors, which is absent"):
        load_draft_head(saved)
    (saved / INDEX).write_text(json.dumps({"weight_map": list(weight_map)}))
    with pytest.raises(InputError, match="not an index of shards"):
        load_draft_head(saved)


def test_the_second_map_follows_from_the_first(saved: Path, head: Eagle3DraftHead) -> None:
    tensors = load_file(saved / "model.safetensors")
    del tensors["t2d"]
    save_file(tensors, saved / "model.safetensors")
    assert_same(saved, head)
    tensors["d2t"] = tensors["d2t"] + 1000
    save_file(tensors, saved / "model.safetensors")
    with pytest.raises(InputError, match="d2t leads out of the vocabulary: row 0 to id 1000 of 96"):
        load_draft_head(saved)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a normed residual": ({"norm_before_residual": True}, "norm_before_residual is true"),
    "no word on the residual": ({"norm_before_residual": None}, "norm_before_residual is not written"),
    "a norm before fc": ({"norm_before_fc": True}, "norm_before_fc is true"),
    "a norm of the output": ({"norm_output": True}, "norm_output is true"),
    "norms of each state": ({"fc_norm": True}, "fc_norm is true"),
    "two layers": ({"layer": {"num_hidden_layers": 2}}, "num_hidden_layers is 2"),
    "biases": ({"layer": {"attention_bias": True}}, "attention_bias is true"),
    "another activation": ({"layer": {"hidden_act": "gelu"}}, "hidden_act is gelu"),
    "another target width": ({"target_hidden_size": 64}, "target_hidden_size is 64"),
    "a window": (
        {"layer": {"layer_types": ["sliding_attention"], "sliding_window": 2048}},
        "slides over 2048 tokens",
    ),
    "scaled rotary positions": (
        {"layer": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}},
        "rotary scaling of type 'yarn'",
    ),
}


@pytest.mark.parametrize(("changes", "part"), REFUSED.values(), ids=REFUSED)
def test_what_our_layer_lacks_is_refused_by_name(changes: dict[str, Any], part: str, saved: Path) -> None:
    as_speculators(saved, **dict(changes))
    with pytest.raises(InputError, match=part) as refusal:
        load_draft_head(saved)
    assert "eagle_train check" in str(refusal.value)


def test_heads_that_do_not_divide_are_refused(saved: Path) -> None:
    (saved / "config.json").write_text(json.dumps(read(saved) | {"num_key_value_heads": 3}))
    with pytest.raises(InputError, match="4 heads cannot share 3 key-value heads"):
        load_draft_head(saved)


def test_a_name_that_is_there_twice_is_refused(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    twice = "midlayer.mlp.up_proj.weight"
    tensors["layers.0.mlp.up_proj.weight"] = tensors[twice].clone()
    save_file(tensors, saved / "model.safetensors")
    with pytest.raises(InputError, match=f"{twice} is there under layers.0. too"):
        load_draft_head(saved)


def test_each_place_of_layer_ids_has_its_own_meaning() -> None:
    assert aux_layer_ids({}) is None
    assert aux_layer_ids({IDS_KEY: None, "eagle_config": {}}) is None
    assert aux_layer_ids({IDS_KEY: [2, 6, 9]}) == [2, 6, 9]
    assert aux_layer_ids({"eagle_config": {IDS_KEY: [1, 5, 8]}}) == [2, 6, 9]
    assert aux_layer_ids({IDS_KEY: [2, 6, 9], "eagle_config": {IDS_KEY: [1, 5, 8]}}) == [2, 6, 9]
