"""`check` names layout, algorithm, every fault of a head and what each engine makes of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_train.export.check import CheckReport, check_draft_head
from eagle_train.export.write import export_draft_head
from eagle_train.model.checkpoint import load_draft_head
from eagle_train.model.target import FrozenTarget
from tests.export.heads import (
    V_D,
    Tensors,
    change_config,
    change_tensors,
    command,
    config_in,
    drop_config,
    save_head,
    tensors_in,
)
from tests.tiny import write_target

IDS_KEY = "eagle_aux_hidden_state_layer_ids"
ENGINES = ("vllm", "sglang", "tensorrt-llm", "openvino", "llamacpp")
LOADS, UNKNOWN, WRONG, REFUSED = "loads", "not known", "loads but wrong", "refused"


def faults(report: CheckReport) -> list[str]:
    return [finding.text for finding in report.findings if finding.is_fault]


def verdicts(report: CheckReport) -> dict[str, str]:
    return {engine: effect.verdict for engine, effect in report.verdicts.items()}


def test_a_sound_head_loads_everywhere(head_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    outcome = command("check", head_dir, "--target", target_dir, "--json", tmp_path / "report.json")
    assert outcome.code == 0, outcome.err
    assert "EAGLE-3 head, official layout, 15 tensors" in outcome.out
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["sound"], report["faults"], report["notes"]) == (True, [], [])
    assert {engine: row["verdict"] for engine, row in report["engines"].items()} == dict.fromkeys(
        ENGINES, LOADS
    )
    assert "hidden_layers_list 1 3 4" in report["engines"]["openvino"]["why"]
    for engine in ("sglang", "tensorrt-llm"):
        assert "by its source, not run" in report["engines"][engine]["why"]


def test_the_probe_head_is_sound_for_its_target(shared: Path) -> None:
    probe = shared / "fixtures" / "engine_probe"
    report = check_draft_head(probe / "draft", str(probe / "target"))
    assert report.is_sound, faults(report)
    assert verdicts(report) == dict.fromkeys(ENGINES, LOADS)
    assert "hidden_layers_list 1 5 8" in report.verdicts["openvino"].why
    assert not check_draft_head(probe / "draft", "eagle_train/demo/target").is_sound


def test_help_says_what_the_exit_codes_mean(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command("check", "--help")
    from eagle_train.__main__ import CHECK_DESCRIPTION

    assert "0: sound; 1: not sound; 2: cannot be read" in CHECK_DESCRIPTION


def drop(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: value for name, value in tensors.items() if name not in names}


def prefix(text: str, *spared: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name if name in spared else text + name: value for name, value in tensors.items()}


def with_nan(tensors: Tensors) -> Tensors:
    tensors["midlayer.mlp.up_proj.weight"][3, 4] = float("nan")
    return tensors


def absolute(tensors: Tensors) -> Tensors:
    return tensors | {"d2t": tensors["d2t"] + torch.arange(V_D)}


def beyond(tensors: Tensors) -> Tensors:
    tensors["d2t"][-1] += 1000
    return tensors


def twice(tensors: Tensors) -> Tensors:
    tensors["d2t"][1] = tensors["d2t"][0] - 1
    return tensors


# What is done to the tensors, parts of the one fault, and the verdicts of vLLM and of llama.cpp.
DAMAGES: dict[str, tuple[Callable[[Tensors], Tensors], tuple[str, ...], str, str]] = {
    "no lm_head": (drop("lm_head.weight"), ("lm_head.weight is missing",), WRONG, REFUSED),
    "no d2t": (drop("d2t"), ("d2t is missing with 40 of",), WRONG, UNKNOWN),
    "no maps": (drop("d2t", "t2d"), ("d2t is missing",), WRONG, UNKNOWN),
    "an extra bias": (
        lambda t: t | {"fc.bias": torch.zeros(32)}, ("fc.bias is not part", "no bias"), REFUSED, REFUSED,
    ),
    "compile's prefix": (
        prefix("_orig_mod."), ("_orig_mod.d2t", "15 names carry a prefix", "fc.weight"), REFUSED, UNKNOWN,
    ),
    "DDP's prefix": (prefix("module."), ("module.fc.weight", "prefix"), REFUSED, UNKNOWN),
    "both prefixes": (prefix("module._orig_mod."), ("module._orig_mod.", "prefix"), REFUSED, UNKNOWN),
    "a model's prefix on all but the head": (
        prefix("model.", "lm_head.weight", "d2t", "t2d"), ("12 names", "model.fc.weight"), REFUSED, UNKNOWN,
    ),
    "a NaN": (with_nan, ("midlayer.mlp.up_proj.weight holds a NaN",), WRONG, WRONG),
    "another shape": (
        lambda t: t | {"fc.weight": t["fc.weight"][:, :-1].contiguous()},
        ("fc.weight has shape [32, 95], the config says [32, 96]",), REFUSED, REFUSED,
    ),
    "ids instead of offsets": (absolute, ("d2t holds absolute ids",), WRONG, REFUSED),
    "a map out of range": (beyond, ("d2t leads out of the vocabulary: row 39",), WRONG, REFUSED),
    "a map that names an id twice": (twice, ("more than once",), WRONG, REFUSED),
    "maps that disagree": (
        lambda t: t | {"t2d": t["t2d"].roll(1)}, ("d2t and t2d disagree",), WRONG, WRONG,
    ),
    "an embedding of zeros": (
        lambda t: t | {"embed_tokens.weight": torch.zeros(len(t["t2d"]), 32)},
        ("embed_tokens.weight is all zero",), WRONG, WRONG,
    ),
    "whole numbers for weights": (
        lambda t: t | {"fc.weight": t["fc.weight"].to(torch.int8)}, ("fc.weight is int8",), UNKNOWN, UNKNOWN,
    ),
    "a map of floats": (
        lambda t: t | {"d2t": t["d2t"].float()}, ("d2t is float32",), UNKNOWN, UNKNOWN,
    ),
    "a head of zeros": (
        lambda t: t | {"lm_head.weight": torch.zeros(V_D, 32)}, ("lm_head.weight is all zero",), WRONG, WRONG,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "parts", "vllm", "llamacpp"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_head_is_named_by_tensor(
    damage: Callable[[Tensors], Tensors], parts: tuple[str, ...], vllm: str, llamacpp: str, head: Path
) -> None:
    change_tensors(head, damage)
    outcome = command("check", head)
    assert outcome.code == 1
    assert outcome.err == ""
    report = check_draft_head(head)
    assert len(faults(report)) == 1, faults(report)
    for part in parts:
        assert part in faults(report)[0]
        assert part in outcome.out
    assert (report.verdicts["vllm"].verdict, report.verdicts["llamacpp"].verdict) == (vllm, llamacpp)


def test_absolute_ids_are_seen_without_the_second_map(head: Path) -> None:
    change_tensors(head, lambda t: drop("t2d")(absolute(t)))
    assert [text[:23] for text in faults(check_draft_head(head))] == ["d2t holds absolute ids "]


def test_another_hidden_size_is_named_for_every_tensor(head: Path, target_dir: Path) -> None:
    change_config(head, hidden_size=64)
    report = check_draft_head(head, str(target_dir))
    assert any("fc.weight has shape [32, 96], the config says [64, 192]" in text for text in faults(report))
    assert any("hidden size 64, the target's are 32" in text for text in faults(report))
    assert set(verdicts(report).values()) == {REFUSED}


MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "another vocabulary": ({"vocab_size": 64}, "vocab_size is 64"),
    "a shorter limit": ({"max_position_embeddings": 128}, "max_position_embeddings is 128, the target's 512"),
    "layers outside": ({IDS_KEY: [1, 4, 8]}, "aux layers [1, 4, 8] lie outside the target's 8"),
    "layers that do not rise": ({IDS_KEY: [4, 4, 5]}, "aux layers [4, 4, 5] do not rise"),
}


@pytest.mark.parametrize(("values", "part"), MISMATCHES.values(), ids=MISMATCHES)
def test_a_mismatch_with_the_target_is_named(
    values: dict[str, Any], part: str, head: Path, target_dir: Path
) -> None:
    change_config(head, **values)
    assert any(part in text for text in faults(check_draft_head(head, str(target_dir))))


def test_another_rotary_base_is_told_but_no_fault(head: Path, target_dir: Path) -> None:
    """Some published heads were trained with 10,000 whatever the target's base; engines serve them so."""
    change_config(head, rope_theta=5e5)
    report = check_draft_head(head, str(target_dir))
    assert report.is_sound
    assert any("rope_theta is 500,000, the target's 10,000" in f.text for f in report.findings)
    assert set(verdicts(report).values()) == {UNKNOWN}


def test_the_parameters_of_a_scaling_are_compared(head_dir: Path, head: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    scaled = write_target(tmp_path / "scaled", rope_parameters=rope)
    change_config(head, rope_scaling={"rope_type": "linear", "factor": 4.0})
    texts = [finding.text for finding in check_draft_head(head, str(scaled)).findings]
    assert any("rotary scaling of type 'linear' differs from the target's in factor" in t for t in texts)


@pytest.mark.parametrize("values", [{"attention_bias": None}, {"bos_token_id": "x"}, {"hidden_act": None}])
def test_a_value_that_the_config_class_refuses_is_told(values: dict[str, Any], head: Path) -> None:
    path = head / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    report = check_draft_head(head)
    assert report.verdicts["vllm"].verdict == REFUSED
    assert next(iter(values)) in report.verdicts["vllm"].why


def test_rotary_scaling_is_told_but_no_fault(head_dir: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    scaled = write_target(tmp_path / "scaled", rope_parameters=rope)
    report = check_draft_head(head_dir, str(scaled))
    assert report.is_sound
    assert any("rotary scaling is 'default', the target's 'linear'" in f.text for f in report.findings)


def test_a_target_of_few_layers_needs_explicit_ones(head: Path, tmp_path: Path) -> None:
    small = write_target(tmp_path / "small", num_hidden_layers=4)
    report = check_draft_head(head, str(small))
    assert [text for text in faults(report) if "coincide" in text]
    assert (report.verdicts["vllm"].verdict, report.verdicts["openvino"].verdict) == (REFUSED, REFUSED)
    change_config(head, **{IDS_KEY: [1, 2, 3]})
    report = check_draft_head(head, str(small))
    assert report.is_sound
    assert verdicts(report) == dict.fromkeys(ENGINES, LOADS) | {"sglang": WRONG}


def test_an_embedding_is_compared_with_the_target_s(head: Path, target_dir: Path) -> None:
    own = load_file(target_dir / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(head, lambda t: t | {"embed_tokens.weight": own})
    assert not check_draft_head(head, str(target_dir)).findings
    change_tensors(head, lambda t: t | {"embed_tokens.weight": own.bfloat16()})
    assert not check_draft_head(head, str(target_dir)).findings
    change_tensors(head, lambda t: t | {"embed_tokens.weight": own + 0.05 * own.std()})
    report = check_draft_head(head, str(target_dir))
    assert report.is_sound
    assert "trained on" in report.findings[0].text
    change_tensors(head, lambda t: t | {"embed_tokens.weight": torch.randn(own.shape)})
    assert "not the target's" in faults(check_draft_head(head, str(target_dir)))[0]


def test_the_embedding_of_a_sharded_target_is_found(head: Path, target: FrozenTarget, tmp_path: Path) -> None:
    target.model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()
    own = target.embedding_VH.clone()
    change_tensors(head, lambda t: t | {"embed_tokens.weight": own})
    assert not check_draft_head(head, str(tmp_path / "sharded")).findings


def test_ids_as_specforge_counts_them_are_for_sglang(head: Path, target_dir: Path) -> None:
    """[1, L//2-1, L-4] in eagle_config are the default layers counted as outputs; vLLM misreads them."""
    change_config(head, eagle_config={IDS_KEY: [1, 3, 4]})
    report = check_draft_head(head, str(target_dir))
    assert report.is_sound
    assert verdicts(report) == dict.fromkeys(ENGINES, LOADS) | {"vllm": WRONG}
    assert "reads layers [1, 3, 4], the config means [2, 4, 5]" in report.verdicts["vllm"].why


def test_both_layer_keys_can_serve_both_conventions(head: Path, target_dir: Path) -> None:
    change_config(head, **{IDS_KEY: [1, 3, 7], "eagle_config": {IDS_KEY: [0, 2, 6]}})
    report = check_draft_head(head, str(target_dir))
    assert verdicts(report) == dict.fromkeys(ENGINES, LOADS)
    assert "eagle3_layers_to_capture [0, 2, 6]" in report.verdicts["tensorrt-llm"].why


CONFIGS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "a normed residual": (
        {"norm_before_residual": True}, {"sglang": WRONG, "tensorrt-llm": WRONG, "openvino": WRONG},
    ),
    "tied embeddings": ({"tie_word_embeddings": True}, {"sglang": REFUSED}),
    "another activation": ({"hidden_act": "gelu"}, dict.fromkeys(ENGINES, UNKNOWN) | {"vllm": REFUSED}),
    "a window": ({"sliding_window": 64, "use_sliding_window": True}, dict.fromkeys(ENGINES, UNKNOWN)),
    "no kind of model": (
        {"model_type": None},
        {"vllm": REFUSED, "openvino": REFUSED, "sglang": UNKNOWN, "tensorrt-llm": UNKNOWN},
    ),
    "a null epsilon": ({"rms_norm_eps": None}, dict.fromkeys(ENGINES, UNKNOWN) | {"vllm": REFUSED}),
    "no dtype": ({"torch_dtype": None}, {"tensorrt-llm": REFUSED}),
    "another class name": (
        {"architectures": ["Mystery"]},
        {"vllm": UNKNOWN, "sglang": REFUSED, "openvino": REFUSED, "tensorrt-llm": UNKNOWN},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("values", "changed"), CONFIGS.values(), ids=CONFIGS)
def test_options_that_only_some_engines_honour(
    values: dict[str, Any], changed: dict[str, str], head: Path
) -> None:
    change_config(head, **values)
    report = check_draft_head(head)
    assert report.is_sound
    assert verdicts(report) == dict.fromkeys(ENGINES, LOADS) | changed


def test_an_absent_epsilon_keeps_no_engine_away(head: Path) -> None:
    drop_config(head, "rms_norm_eps")
    assert set(verdicts(check_draft_head(head)).values()) == {LOADS}


def test_biases_that_the_config_names_belong_to_the_layout(head: Path) -> None:
    width = config_in(head)["intermediate_size"]
    sizes = {"mlp.gate_proj": width, "mlp.up_proj": width, "mlp.down_proj": 32}
    biases = {f"midlayer.{name}.bias": torch.zeros(size) for name, size in sizes.items()}
    change_config(head, mlp_bias=True)
    assert [text[:32] for text in faults(check_draft_head(head))] == [
        f"midlayer.mlp.{part}_proj.bias is missing"[:32] for part in ("down", "gate", "up")
    ]
    change_tensors(head, lambda tensors: tensors | biases)
    report = check_draft_head(head)
    assert report.is_sound
    assert "mlp_bias is true" in report.verdicts["vllm"].why


def test_8_bit_floats_are_looked_at(head: Path) -> None:
    change_tensors(head, lambda t: t | {"fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)})
    assert check_draft_head(head).is_sound
    assert load_draft_head(head).fc.weight.dtype == torch.float32


def test_layers_that_fall_are_a_fault_without_a_target(head: Path) -> None:
    change_config(head, **{IDS_KEY: [5, 4, 2]})
    assert faults(check_draft_head(head)) == ["aux layers [5, 4, 2] do not rise"]


def test_a_map_of_a_whole_vocabulary_must_have_its_shape(target: FrozenTarget, tmp_path: Path) -> None:
    save_head(tmp_path / "head", target, target.vocab_size)
    change_tensors(tmp_path / "head", lambda tensors: tensors | {"d2t": torch.zeros(5, dtype=torch.int64)})
    assert any("d2t has shape [5]" in text for text in faults(check_draft_head(tmp_path / "head")))


@pytest.mark.parametrize(
    "values", [{"architectures": ["DFlashDraftModel"]}, {"speculators_model_type": "dflash"}]
)
def test_a_drafter_of_another_kind_is_named(values: dict[str, Any], head: Path) -> None:
    change_config(head, **values)
    assert "names a dflash head" in command("check", head).refusal()


def test_a_null_target_width_crashes_engines_in_the_official_layout(head: Path) -> None:
    change_config(head, target_hidden_size=None)
    found = verdicts(check_draft_head(head))
    assert (found["vllm"], found["sglang"], found["llamacpp"]) == (REFUSED, REFUSED, LOADS)


def test_layers_zero_names_are_specforge_s(head: Path) -> None:
    change_tensors(
        head, lambda t: {name.replace("midlayer.", "layers.0."): value for name, value in t.items()}
    )
    report = check_draft_head(head)
    assert report.is_sound
    assert verdicts(report) == dict.fromkeys(ENGINES, LOADS)


@pytest.fixture
def speculators(head_dir: Path, target_dir: Path, tmp_path: Path) -> Path:
    export_draft_head(head_dir, "speculators", tmp_path / "speculators", str(target_dir))
    return tmp_path / "speculators"


def test_the_speculators_layout_and_its_traps(speculators: Path, target_dir: Path) -> None:
    report = check_draft_head(speculators, str(target_dir))
    assert (report.stored.layout, report.is_sound) == ("speculators", True)
    assert verdicts(report) == {
        "vllm": LOADS, "sglang": REFUSED, "tensorrt-llm": REFUSED, "openvino": REFUSED, "llamacpp": LOADS,
    }  # fmt: skip
    config = config_in(speculators)
    (speculators / "config.json").write_text(json.dumps(config | {"model_type": "speculator_model"}))
    report = check_draft_head(speculators)
    assert any("speculator_model" in finding.text for finding in report.findings)
    assert report.is_sound, "llama.cpp reads it"
    assert report.verdicts["vllm"].verdict == REFUSED
    del config["norm_before_residual"]
    (speculators / "config.json").write_text(json.dumps(config))
    report = check_draft_head(speculators)
    assert "norm_before_residual is not written, and engines disagree" in faults(report)[0]
    assert "for true" in report.verdicts["vllm"].why
    assert "for false" in report.verdicts["llamacpp"].why


def test_an_eagle1_head_is_known(head: Path, target_dir: Path) -> None:
    layer = {
        name.replace("midlayer.", "layers.0."): value[:, :32].contiguous() if "_proj" in name else value
        for name, value in tensors_in(head).items()
        if name.startswith("midlayer.") and "input_layernorm" not in name and "hidden_norm" not in name
    }
    whole = {name: tensors_in(head)[name.replace("layers.0.", "midlayer.")] for name in layer}
    layer |= {name: value for name, value in whole.items() if "o_proj" in name or "mlp" in name}
    save_file(layer | {"fc.weight": torch.randn(32, 64)}, head / "model.safetensors")
    values = config_in(head)
    del values["draft_vocab_size"]
    (head / "config.json").write_text(json.dumps(values | {"architectures": ["LlamaForCausalLM"]}))
    report = check_draft_head(head, str(target_dir))
    assert (report.stored.algorithm, faults(report)) == ("EAGLE-1", [])
    assert verdicts(report) == {
        "vllm": LOADS, "sglang": WRONG, "tensorrt-llm": UNKNOWN, "openvino": REFUSED, "llamacpp": REFUSED,
    }  # fmt: skip
    for name, vllm, sglang in (("LlamaForCausalLMEagle", REFUSED, LOADS), ("Mystery", UNKNOWN, UNKNOWN)):
        change_config(head, architectures=[name])
        found = verdicts(check_draft_head(head))
        assert (found["vllm"], found["sglang"]) == (vllm, sglang)
    change_config(head, architectures=["LlamaForCausalLM"], logit_scale=0.5)
    assert any(finding.text == "logit_scale is 0.5" for finding in check_draft_head(head).findings)
    assert "EAGLE-1" in command("export", "--draft", head, "--to", "vllm", "--out", head / "o").refusal()


def test_what_cannot_be_read_ends_in_one_line(head: Path, target_dir: Path, tmp_path: Path) -> None:
    assert "does not exist" in command("check", tmp_path / "nowhere").refusal()
    assert "arguments are required: draft" in command("check").refusal()
    assert "holds no draft head" in command("check", target_dir).refusal()
    assert "does not exist" in command("check", head, "--target", tmp_path / "nowhere").refusal()
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    line = command("check", head).refusal()
    assert "pytorch_model.bin" in line
    assert "not unpickled" in line
    (head / "config.json").write_text("{")
    assert "is not JSON" in command("check", head).refusal()


@pytest.mark.parametrize("value", [0, -4, "32", 3.5, True, ["a"], {}])
def test_values_of_another_type_are_refused_by_name(value: Any, head: Path, target_dir: Path) -> None:
    original = config_in(head)
    for key in ("hidden_size", "head_dim", "vocab_size", "num_hidden_layers", "rope_theta", IDS_KEY):
        if key == "rope_theta" and value == 3.5:
            continue
        (head / "config.json").write_text(json.dumps(original | {key: value}))
        assert f"{key} is {value!r}, not a" in command("check", head, "--target", target_dir).refusal()


def test_a_size_that_is_absent_is_a_fault(head: Path, target_dir: Path) -> None:
    change_config(head, hidden_size=None)
    report = check_draft_head(head, str(target_dir))
    assert faults(report)[0] == "config.json lacks hidden_size"
    assert set(verdicts(report).values()) == {REFUSED}
