"""What engines were seen to do with such copies of the probe's head, and what their sources say: the figures
that an engine gave are counts of vLLM on the probe, whose sound head gives 154 verify steps and 329 accepted.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_train.errors import InputError
from eagle_train.export.check import check_draft_head
from eagle_train.export.write import export_draft_head
from eagle_train.model.target import FrozenTarget
from tests.export.heads import Tensors, change_config, change_tensors, config_in, save_head
from tests.export.test_check import (
    ENGINES,
    IDS_KEY,
    LOADS,
    REFUSED,
    UNKNOWN,
    WRONG,
    faults,
    verdicts,
)

INDEX = "model.safetensors.index.json"
FC_NORMS = {f"fc_norm.{part}.weight": torch.ones(32) for part in range(3)}
INPUT_NORM = {"input_norm.weight": torch.ones(96)}
FOUR = {"fc.weight": torch.ones(32, 128)}
ALL_UNKNOWN = dict.fromkeys(ENGINES, UNKNOWN)

# The config, further tensors, and the verdicts that are not "loads".
CASES: dict[str, tuple[dict[str, Any], Tensors, dict[str, str]]] = {
    # Both engines gave the counts of a head without the option.
    "a nested normed residual": (
        {"eagle_config": {"norm_before_residual": True}}, {}, dict.fromkeys(ENGINES, WRONG),
    ),
    # vLLM refused the tensors.
    "nested norms of states": (
        {"eagle_config": {"fc_norm": True}}, FC_NORMS,
        {"vllm": REFUSED, "sglang": WRONG, "tensorrt-llm": WRONG, "openvino": WRONG, "llamacpp": REFUSED},
    ),
    "norms of states": ({"fc_norm": True}, FC_NORMS, {"openvino": WRONG, "llamacpp": REFUSED}),
    # llama.cpp could not load the draft; vLLM honours it.
    "a nested norm before fc": (
        {"eagle_config": {"norm_before_fc": True}}, INPUT_NORM,
        {"sglang": UNKNOWN, "openvino": WRONG, "llamacpp": REFUSED},
    ),
    "a norm before fc": ({"norm_before_fc": True}, INPUT_NORM, {"tensorrt-llm": WRONG, "openvino": WRONG}),
    "a norm before fc that eagle_config denies": (
        {"norm_before_fc": True, "eagle_config": {"norm_before_fc": False}}, INPUT_NORM,
        {"vllm": WRONG, "tensorrt-llm": WRONG, "openvino": WRONG},
    ),
    "a normed output": ({"norm_output": True}, {}, {"openvino": WRONG, "llamacpp": WRONG}),
    # vLLM: weights [128, 512] into [128, 384].
    "four layers at the top level": (
        {IDS_KEY: [1, 3, 5, 7]}, FOUR,
        {"vllm": REFUSED, "sglang": REFUSED, "openvino": REFUSED, "llamacpp": REFUSED},
    ),
    "four layers that are counted": (
        {IDS_KEY: [1, 3, 5, 7], "num_aux_hidden_states": 4}, FOUR,
        {"sglang": UNKNOWN, "openvino": REFUSED, "llamacpp": REFUSED},
    ),
    "four layers in both places": (
        {IDS_KEY: [1, 3, 5, 7], "eagle_config": {IDS_KEY: [0, 2, 4, 6]}}, FOUR,
        {"openvino": REFUSED, "llamacpp": REFUSED},
    ),
    "three layers that are counted as four": (
        {"num_aux_hidden_states": 4}, {}, {"vllm": REFUSED, "sglang": REFUSED},
    ),
    # 201 and 277: vLLM honours it.
    "rotation of a part": (
        {"partial_rotary_factor": 0.5}, {}, ALL_UNKNOWN | {"vllm": LOADS, "llamacpp": WRONG},
    ),
    # 287 and 191.
    "one state alone": (
        {"eagle_config": {"use_aux_hidden_state": False}}, {}, ALL_UNKNOWN | {"vllm": WRONG},
    ),
    # 468 and none with -1: vLLM honours it.
    "scaled logits": ({"logit_scale": -1}, {}, ALL_UNKNOWN | {"vllm": LOADS}),
    "quantisation": (
        {"quantization_config": {"quant_method": "fp8"}}, {}, ALL_UNKNOWN | {"vllm": REFUSED},
    ),
    "another family": ({"model_type": "gemma2"}, {}, ALL_UNKNOWN),
    "an embedding without a target": (
        {}, {"embed_tokens.weight": torch.ones(301, 32)},
        {"sglang": UNKNOWN, "tensorrt-llm": UNKNOWN, "openvino": UNKNOWN},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("values", "extra", "changed"), CASES.values(), ids=CASES)
def test_what_engines_do_with_options(
    values: dict[str, Any], extra: Tensors, changed: dict[str, str], head: Path
) -> None:
    change_config(head, **values)
    change_tensors(head, lambda t: t | extra)
    report = check_draft_head(head)
    assert report.is_sound, faults(report)
    assert verdicts(report) == dict.fromkeys(ENGINES, LOADS) | changed


def test_what_was_run_is_not_said_to_be_read(head: Path) -> None:
    change_config(head, eagle_config={"norm_before_residual": True})
    found = check_draft_head(head).verdicts
    assert found["vllm"].why == "reads norm_before_residual at the top level only"
    assert "by its source" not in found["llamacpp"].why
    assert "by its source, not run" in found["openvino"].why


def test_vllm_refuses_maps_of_the_whole_vocabulary(target: FrozenTarget, tmp_path: Path) -> None:
    """It says: no module or parameter named 'draft_id_to_target_id'. llama.cpp runs it."""
    save_head(tmp_path / "head", target, target.vocab_size)
    path = str(target.model.name_or_path)
    export_draft_head(tmp_path / "head", "openvino", tmp_path / "out", path)
    report = check_draft_head(tmp_path / "out")
    assert report.is_sound
    assert verdicts(report) == dict.fromkeys(ENGINES, LOADS) | {"vllm": REFUSED}
    export_draft_head(tmp_path / "out", "vllm", tmp_path / "again")
    assert check_draft_head(tmp_path / "again").verdicts["vllm"].verdict == LOADS


def test_an_embedding_of_its_own_is_for_engines_that_take_it(
    head: Path, target_dir: Path, tmp_path: Path
) -> None:
    own = load_file(target_dir / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(head, lambda t: t | {"embed_tokens.weight": own + 0.05 * own.std()})
    report = check_draft_head(head, str(target_dir))
    shared = dict.fromkeys(("sglang", "tensorrt-llm", "openvino"), WRONG)
    assert report.is_sound
    assert verdicts(report) == dict.fromkeys(ENGINES, LOADS) | shared
    export_draft_head(head, "vllm", tmp_path / "vllm", str(target_dir))
    for engine in ("sglang", "openvino"):
        with pytest.raises(InputError, match=f"--to {engine}, which drafts with the target's embedding"):
            export_draft_head(head, engine, tmp_path / engine, str(target_dir))


def test_a_second_weight_file_is_told(head: Path) -> None:
    """Of such a copy, with a norm of zeros, vLLM accepted none of 468."""
    save_file({"norm.weight": torch.zeros(32)}, head / "zother.safetensors")
    report = check_draft_head(head)
    assert [finding.text[:52] for finding in report.findings] == [
        "zother.safetensors lies beside model.safetensors, wh"
    ]
    found = {"vllm": WRONG, "sglang": UNKNOWN, "tensorrt-llm": UNKNOWN}
    assert verdicts(report) == dict.fromkeys(ENGINES, LOADS) | found
    (head / "zother.safetensors").rename(head / "model-old.safetensors")
    assert check_draft_head(head).verdicts["llamacpp"].verdict == WRONG


def test_an_index_of_other_files_is_told(head: Path) -> None:
    save_file({"norm.weight": torch.zeros(32)}, head / "other.safetensors")
    (head / INDEX).write_text('{"weight_map": {"norm.weight": "model.safetensors"}}')
    assert not check_draft_head(head).findings, "engines leave out what an index does not list"
    (head / INDEX).write_text('{"weight_map": {"norm.weight": "other.safetensors"}}')
    report = check_draft_head(head)
    assert f"{INDEX} lists other.safetensors" in report.findings[0].text
    assert (report.verdicts["vllm"].verdict, report.verdicts["llamacpp"].verdict) == (WRONG, WRONG)


@pytest.mark.parametrize(
    "values",
    [
        {"speculators_model_type": "eagle"},
        {"speculators_model_type": None},
        {"speculators_config": None},
        {"transformer_layer_config": {"model_type": "mistral"}},
    ],
    ids=str,
)
def test_vllm_knows_eagle3_alone_in_the_speculators_layout(
    values: dict[str, Any], head: Path, target_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    export_draft_head(head, "speculators", out, str(target_dir))
    assert check_draft_head(out, str(target_dir)).verdicts["vllm"].verdict == LOADS
    if layer := values.get("transformer_layer_config"):
        values = {"transformer_layer_config": config_in(out)["transformer_layer_config"] | layer}
    change_config(out, **values)
    report = check_draft_head(out, str(target_dir))
    assert report.is_sound
    assert report.verdicts["vllm"].verdict == REFUSED
    assert "by its source, not run" in report.verdicts["vllm"].why
