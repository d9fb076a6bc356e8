"""Files of heads and targets that cannot be read: one line that names the value, and exit code 2, at once."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from eagle_train.errors import InputError
from eagle_train.export.engines import Served, serve_command
from eagle_train.export.write import export_draft_head
from eagle_train.model.checkpoint import load_draft_head
from eagle_train.model.target_config import read_target_config
from tests.export.heads import change_config, command, config_in, copy_of, tensors_in

INDEX = "model.safetensors.index.json"
HUGE = 10**30
TOO_LONG = "x" * 5000
DEEP, DIGITS = "[" * 200_000, '{"hidden_size": ' + "1" * 6000 + "}"


def sharded(head: Path, weight_map: Any) -> Path:
    """The head with its weights in a shard, and this weight map, or text in place of an index."""
    (head / "model.safetensors").rename(head / "shard.safetensors")
    text = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
    (head / INDEX).write_text(text)
    return head


@pytest.mark.parametrize("layers", [1001, 10**9, HUGE])
def test_a_number_of_layers_has_a_limit(layers: int, head: Path) -> None:
    change_config(head, num_hidden_layers=layers)
    line = command("check", head).refusal()
    assert f"num_hidden_layers is {layers}, not a whole number from 1 to 1,000" in line


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "vocab_size", "rope_theta"]
)
def test_sizes_have_a_limit(key: str, head: Path) -> None:
    value = 10**400 if key == "rope_theta" else HUGE
    change_config(head, **{key: value})
    assert f"{key} is 1000" in command("check", head).refusal()
    with pytest.raises(InputError, match=f"{key} is 1000") as refusal:
        load_draft_head(head)
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize("text", [DEEP, DIGITS], ids=["deep", "digits"])
def test_json_beyond_the_reader_s_limits(text: str, head: Path, target_dir: Path, tmp_path: Path) -> None:
    target = copy_of(target_dir, tmp_path / "target")
    (target / "config.json").write_text(text)
    assert f"--target {target} could not be loaded" in command("check", head, "--target", target).refusal()
    assert "is not an index of shards" in command("check", sharded(head, text)).refusal()
    (head / "config.json").write_text(text)
    assert "is not JSON" in command("check", head).refusal()


TARGETS: dict[str, tuple[dict[str, Any], str]] = {
    "a vocabulary of letters": ({"vocab_size": "x"}, "vocab_size"),
    "layers in words": ({"num_hidden_layers": "8"}, "num_hidden_layers"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    "a null position limit": ({"max_position_embeddings": None}, "max_position_embeddings"),
    "an end of text in words": ({"eos_token_id": [1, 2, "x"]}, "eos_token_id"),
    "heads that do not divide": ({"num_attention_heads": 3}, "attention heads (3)"),
    "unknown layers": ({"layer_types": ["x"]}, "layer_types"),
    "a rotary base in words": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": "a"}}, "rope_theta is 'a'",
    ),
    "an empty text config": ({"text_config": {"a": 1}}, "hidden_size is None"),
    "a number for a text config": ({"text_config": 5}, "hidden_size is None"),
    "an unknown dtype": ({"dtype": "float99"}, "float99"),
}  # fmt: skip


@pytest.mark.parametrize(("values", "part"), TARGETS.values(), ids=TARGETS)
def test_a_target_s_config_with_one_wrong_value(
    values: dict[str, Any], part: str, head: Path, target_dir: Path, tmp_path: Path
) -> None:
    target = copy_of(target_dir, tmp_path / "target")
    change_config(target, **values)
    line = command("check", head, "--target", target).refusal()
    assert str(target) in line
    assert part in line
    words = ("--draft", head, "--to", "vllm", "--out", tmp_path / "out")
    assert command("export", *words, "--target", target).refusal() == line


def test_rotary_parameters_of_another_shape_are_read_past(
    head: Path, target_dir: Path, tmp_path: Path
) -> None:
    target = copy_of(target_dir, tmp_path / "target")
    change_config(target, rope_parameters={"rope_type": "default", "full_attention": 5})
    assert command("check", head, "--target", target).code == 0


def test_names_that_are_too_long_for_a_file(head: Path, target_dir: Path, tmp_path: Path) -> None:
    assert "does not exist" in command("check", f"/{TOO_LONG}").refusal()
    assert "does not exist" in command("check", head, "--target", f"/{TOO_LONG}").refusal()
    assert "could not be loaded" in command("check", head, "--target", TOO_LONG).refusal()
    words = ("export", "--draft", f"/{TOO_LONG}", "--to", "vllm", "--out", tmp_path / "out")
    assert "File name too long" in command(*words).refusal()
    words = ("export", "--draft", head, "--to", "vllm", "--out", tmp_path / TOO_LONG)
    assert "cannot be written (File name too long)" in command(*words).refusal()
    assert "which is absent" in command("check", sharded(head, {"a": f"{TOO_LONG}.safetensors"})).refusal()


@pytest.mark.parametrize("name", ["../other/model.safetensors", "a/../../x.safetensors", "/etc/passwd"])
def test_an_index_does_not_lead_out_of_its_directory(name: str, head: Path) -> None:
    other = head.parent / "other"
    other.mkdir()
    save_file({"norm.weight": torch.ones(32)}, other / "model.safetensors")
    weight_map = dict.fromkeys(tensors_in(head), "shard.safetensors") | {"norm.weight": name}
    assert f"names {name}, which lies outside" in command("check", sharded(head, weight_map)).refusal()


def test_an_empty_target_is_no_target(head: Path, target_dir: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The current directory is one of a target, which an empty name must not stand for."""
    monkeypatch.chdir(target_dir)
    words = ("--draft", head, "--to", "vllm", "--out", tmp_path / "out")
    assert "--target is empty" in command("check", head, "--target", "").refusal()
    assert "--target is empty" in command("export", *words, "--target", "").refusal()


def test_the_class_of_a_multimodal_target_is_kept(head: Path, target_dir: Path, tmp_path: Path) -> None:
    """Only its outer config names the class; the text config inside holds the sizes."""
    target = copy_of(target_dir, tmp_path / "target")
    text = config_in(target)
    del text["architectures"]
    sizes = AutoConfig.for_model("llava").to_dict()
    outer = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    (target / "config.json").write_text(json.dumps(sizes | outer))
    assert read_target_config(str(target)).architectures == ["LlavaForConditionalGeneration"]
    export_draft_head(head, "speculators", tmp_path / "out", str(target))
    verifier = config_in(tmp_path / "out")["speculators_config"]["verifier"]
    assert verifier["architectures"] == ["LlavaForConditionalGeneration"]


@pytest.mark.parametrize("engine", ["openvino", "tensorrt-llm"])
def test_python_lines_import_what_they_name_and_print(engine: str) -> None:
    line = serve_command(engine, Served("/d", "/t", "official", "float32", (1, 3, 7), False))
    body = ast.parse(line or "").body
    imported = {alias.name for part in body for alias in getattr(part, "names", ())}
    names = {node.id for node in ast.walk(body[-1]) if isinstance(node, ast.Name)}
    assert names - {"print"} == imported - {"tensorrt_llm"}
    assert isinstance(body[-1], ast.Expr)
    assert ast.unparse(body[-1]).startswith("print(")
