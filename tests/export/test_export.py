"""What an engine's directory holds: its own meaning of layer ids, the same weights, a card, the steps."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle_train.errors import InputError
from eagle_train.export.card import RunRecord, model_card, write_model_card
from eagle_train.export.check import check_draft_head
from eagle_train.export.engines import Served
from eagle_train.export.write import export_draft_head
from eagle_train.model.checkpoint import load_draft_head
from eagle_train.model.target import FrozenTarget, load_target
from tests.commands import read_events, run, write_conversations
from tests.export.heads import (
    V_D,
    assert_same_weights,
    change_config,
    change_tensors,
    command,
    config_in,
    copy_of,
    save_head,
    tensors_in,
)
from tests.tiny import tiny_model, write_target

IDS_KEY = "eagle_aux_hidden_state_layer_ids"
FORMATS = ("vllm", "sglang", "speculators", "openvino", "llamacpp")


@pytest.fixture(scope="module")
def other_layers_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that reads what enters layers 1, 3 and 7 of 8."""
    target = load_target(
        str(target_dir), dtype=torch.float32, device=torch.device("cpu"), aux_layer_ids=(1, 3, 7)
    )
    directory = tmp_path_factory.mktemp("head") / "other_layers"
    save_head(directory, target)
    return directory


@pytest.mark.parametrize("engine", FORMATS)
def test_every_export_loads_back_weight_for_weight(
    engine: str, head_dir: Path, target_dir: Path, tmp_path: Path
) -> None:
    export_draft_head(head_dir, engine, tmp_path / "out", str(target_dir))
    loaded, original = load_draft_head(tmp_path / "out"), load_draft_head(head_dir)
    assert_same_weights(loaded, original)
    assert loaded.config == original.config
    assert check_draft_head(tmp_path / "out", str(target_dir)).is_sound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_weights_keep_their_dtype(dtype: torch.dtype, target: FrozenTarget, tmp_path: Path) -> None:
    save_head(tmp_path / "head", target, dtype=dtype)
    export_draft_head(tmp_path / "head", "vllm", tmp_path / "out")
    before, after = tensors_in(tmp_path / "head"), tensors_in(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert config_in(tmp_path / "out") == config_in(tmp_path / "head")


def test_a_whole_vocabulary_is_exported_without_maps(
    target: FrozenTarget, target_dir: Path, tmp_path: Path
) -> None:
    save_head(tmp_path / "head", target, target.vocab_size)
    export_draft_head(tmp_path / "head", "speculators", tmp_path / "out", str(target_dir))
    assert not {"d2t", "t2d"} & set(tensors_in(tmp_path / "out"))
    assert_same_weights(load_draft_head(tmp_path / "out"), load_draft_head(tmp_path / "head"))
    # OpenVINO has both maps as buffers, which it leaves unset where the file has none.
    export_draft_head(tmp_path / "head", "openvino", tmp_path / "openvino", str(target_dir))
    maps = tensors_in(tmp_path / "openvino")
    assert maps["d2t"].tolist() == [0] * target.vocab_size
    assert maps["t2d"].tolist() == [True] * target.vocab_size
    without = check_draft_head(tmp_path / "head", str(target_dir)).verdicts["openvino"]
    assert without.verdict == "loads but wrong"
    assert "without d2t and t2d it accepts next to nothing: export --to openvino" in without.why
    assert check_draft_head(tmp_path / "openvino").verdicts["openvino"].verdict == "loads"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "openvino", "llamacpp"])
def test_default_layers_are_never_written(
    engine: str, head_dir: Path, target_dir: Path, tmp_path: Path
) -> None:
    export_draft_head(head_dir, engine, tmp_path / "out", str(target_dir))
    assert "layer_ids" not in json.dumps(config_in(tmp_path / "out"))


def test_explicit_layers_are_written_as_each_engine_counts(
    other_layers_dir: Path, target_dir: Path, tmp_path: Path
) -> None:
    configs: dict[str, dict[str, Any]] = {}
    for engine in FORMATS:
        export_draft_head(other_layers_dir, engine, tmp_path / engine, str(target_dir))
        configs[engine] = config_in(tmp_path / engine)
        assert load_draft_head(tmp_path / engine).config.aux_layer_ids == (1, 3, 7)
    for engine in ("vllm", "llamacpp", "speculators"):
        assert configs[engine][IDS_KEY] == [1, 3, 7]
        assert "eagle_config" not in configs[engine]
    assert configs["sglang"]["eagle_config"] == {IDS_KEY: [0, 2, 6]}
    assert IDS_KEY not in configs["sglang"]
    assert "model.set_rt_info([0, 2, 6]," in (tmp_path / "openvino" / "steps.sh").read_text()


def test_each_export_serves_where_it_is_meant_to(
    other_layers_dir: Path, target_dir: Path, tmp_path: Path
) -> None:
    for engine in ("vllm", "sglang", "openvino", "llamacpp"):
        export_draft_head(other_layers_dir, engine, tmp_path / engine, str(target_dir))
        report = check_draft_head(tmp_path / engine, str(target_dir))
        assert report.verdicts[engine].verdict == "loads"
    assert (
        check_draft_head(tmp_path / "vllm", str(target_dir)).verdicts["sglang"].verdict == "loads but wrong"
    )
    assert (
        check_draft_head(tmp_path / "sglang", str(target_dir)).verdicts["vllm"].verdict == "loads but wrong"
    )


def test_the_speculators_layout_is_complete(head_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    export_draft_head(head_dir, "speculators", tmp_path / "out", str(target_dir))
    config, tensors = config_in(tmp_path / "out"), tensors_in(tmp_path / "out")
    assert config["norm_before_residual"] is False
    assert "model_type" not in config
    assert config["architectures"] == ["Eagle3DraftModel"]
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": str(target_dir),
        "architectures": ["LlamaForCausalLM"],
    }
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["vocab_size"]) == ("llama", config_in(head_dir)["vocab_size"])
    own = load_file(target_dir / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(tensors.pop("embed_tokens.weight"), own)
    official = {name.replace("midlayer.", "layers.0.") for name in tensors_in(head_dir)}
    assert set(tensors) == official


def test_the_position_limit_becomes_the_target_s(head_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    short = copy_of(head_dir, tmp_path / "short")
    change_config(short, max_position_embeddings=128)
    for engine in ("vllm", "speculators"):
        export_draft_head(short, engine, tmp_path / engine, str(target_dir))
        assert load_draft_head(tmp_path / engine).config.max_position_embeddings == 512


@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen3", {"head_dim": 16}), ("qwen2", {}), ("gpt_oss", {"head_dim": 16, "num_local_experts": 2})],
)
def test_head_size_and_biases_are_as_the_tensors_are(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    target = FrozenTarget(tiny_model(family, **changes))
    head = save_head(tmp_path / "head", target)
    export_draft_head(tmp_path / "head", "vllm", tmp_path / "out")
    config, tensors = config_in(tmp_path / "out"), tensors_in(tmp_path / "out")
    size = changes.get("head_dim", 8)
    assert config["head_dim"] == size
    assert list(tensors["midlayer.self_attn.q_proj.weight"].shape) == [4 * size, 64]
    assert list(tensors["midlayer.self_attn.o_proj.weight"].shape) == [32, 4 * size]
    assert config["attention_bias"] is any(name.endswith("_proj.bias") for name in tensors) is False
    assert_same_weights(load_draft_head(tmp_path / "out"), head)


def test_the_steps_are_a_sound_script(head_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    for engine in ("openvino", "llamacpp"):
        outcome = command(
            "export", "--draft", head_dir, "--to", engine, "--out", tmp_path / engine, "--target", target_dir
        )
        assert outcome.code == 0, outcome.err
        script = tmp_path / engine / "steps.sh"
        subprocess.run(["bash", "-n", script], check=True)
        text = script.read_text()
        for line in text[text.index('cd -- "$(dirname') :].splitlines()[1:]:
            assert line in outcome.out
            assert line in (tmp_path / engine / "README.md").read_text()
    outcome = command("export", "--draft", head_dir, "--to", "vllm", "--out", tmp_path / "vllm")
    assert 'serve it: vllm serve TARGET --speculative-config \'{"method": "eagle3"' in outcome.out
    assert not (tmp_path / "vllm" / "steps.sh").exists()


REFUSALS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "a residual that is normed": (
        "vllm", {"norm_before_residual": True}, ("norm_before_residual is true", "eagle_train check"),
    ),
    "two layers": ("llamacpp", {"num_hidden_layers": 2}, ("num_hidden_layers is 2",)),
    "two rotary scalings": (
        "vllm",
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        ("rope_parameters and rope_scaling say different things",),
    ),
    "another vocabulary": ("vllm", {"vocab_size": 64}, ("vocab_size is 64",)),
    "layer 0 where outputs are counted": (
        "sglang", {IDS_KEY: [0, 3, 7]}, ("--to sglang cannot honour aux layers 0 3 7", "--to vllm"),
    ),
    "layer 0 in OpenVINO": ("openvino", {IDS_KEY: [0, 3, 7]}, ("--to openvino cannot honour", "llamacpp")),
    "layers beyond the target": ("vllm", {IDS_KEY: [1, 3, 8]}, ("aux layers [1, 3, 8]", "8 layers")),
    "four layers": ("llamacpp", {IDS_KEY: [1, 3, 5, 7]}, ("three layers",)),
}  # fmt: skip


@pytest.mark.parametrize(("engine", "values", "parts"), REFUSALS.values(), ids=REFUSALS)
def test_what_an_engine_cannot_honour_is_refused_by_name(
    engine: str,
    values: dict[str, Any],
    parts: tuple[str, ...],
    head_dir: Path,
    target_dir: Path,
    tmp_path: Path,
) -> None:
    head = copy_of(head_dir, tmp_path / "head")
    change_config(head, **values)
    words = ("--draft", head, "--to", engine, "--out", tmp_path / "out", "--target", target_dir)
    line = command("export", *words).refusal()
    for part in parts:
        assert part in line
    assert not (tmp_path / "out").exists()


def test_a_target_with_too_few_layers_is_refused(head_dir: Path, tmp_path: Path) -> None:
    small = write_target(tmp_path / "small", num_hidden_layers=6)
    with pytest.raises(InputError, match="6 layers coincide"):
        export_draft_head(head_dir, "vllm", tmp_path / "out", str(small))


def test_bad_words_are_refused_in_one_line(head_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "--draft is not named" in command("export", "--to", "vllm", "--out", out).refusal()
    assert "'tgi'" in command("export", "--draft", head_dir, "--to", "tgi", "--out", out).refusal()
    assert "--out is not named" in command("export", "--draft", head_dir, "--to", "vllm").refusal()
    for engine in ("speculators", "openvino", "llamacpp"):
        line = command("export", "--draft", head_dir, "--to", engine, "--out", out).refusal()
        assert f"--to {engine} needs the target" in line
    assert (
        "is not empty (it is --draft itself)"
        in command("export", "--draft", head_dir, "--to", "vllm", "--out", head_dir).refusal()
    )
    (tmp_path / "file").write_text("x")
    assert (
        "is a file"
        in command("export", "--draft", head_dir, "--to", "vllm", "--out", tmp_path / "file").refusal()
    )
    missing = command("export", "--draft", tmp_path / "none", "--to", "vllm", "--out", out).refusal()
    assert "does not exist" in missing


def test_a_trained_head_keeps_its_own_embedding(head_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    """One that was trained on from the target's is part of the head; engines would share the target's."""
    head = copy_of(head_dir, tmp_path / "head")
    own = load_file(target_dir / "model.safetensors")["model.embed_tokens.weight"] * 1.01
    own[3] += 0.05
    change_tensors(head, lambda tensors: tensors | {"embed_tokens.weight": own})
    for engine in ("vllm", "speculators"):
        export_draft_head(head, engine, tmp_path / engine, str(target_dir))
        assert torch.equal(tensors_in(tmp_path / engine)["embed_tokens.weight"], own)


@pytest.fixture(scope="module")
def trained(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of two steps, with its records."""
    place = tmp_path_factory.mktemp("run")
    data = write_conversations(place / "data.jsonl", 12)
    words = ["--target", target_dir, "--data", data, "--output_dir", place / "out", "--max_steps", 2]
    sizes = ["--training_seq_len", 128, "--bucket_granularity", 64, "--ttt_steps", 3]
    outcome = run(*words, *sizes, "--draft_vocab_size", V_D, "--dtype", "float32")
    assert outcome.code == 0, outcome.err
    return place / "out"


def test_a_training_is_exported_with_its_own_target_and_limit(trained: Path, tmp_path: Path) -> None:
    outcome = command("export", "--draft", trained, "--to", "speculators", "--out", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    assert config_in(tmp_path / "out")["transformer_layer_config"]["max_position_embeddings"] == 512
    assert f"serve it: vllm serve {tmp_path / 'out'}" in outcome.out
    card = (tmp_path / "out" / "README.md").read_text()
    assert "documents of up to 128 tokens" in card


def test_the_card_tells_target_data_acceptance_and_commands(trained: Path, target_dir: Path) -> None:
    path = write_model_card(trained)
    card = path.read_text()
    path.unlink()
    best = max(
        read_events(trained, "validation"), key=lambda event: event["eval_acceptance_length"]["3"] or 0
    )
    expected = f"| expected | {best['eval_acceptance_length']['3']:.3f} |"
    parts = [str(target_dir), "data.jsonl", "documents of up to 128 tokens", "`--ttt_steps 3`", expected]
    parts += ["vllm serve", "sglang.launch_server", "Eagle3DecodingConfig", "--to openvino", "--to llamacpp"]
    for part in [*parts, "## Licence", f"{V_D} of"]:
        assert part in card, part
    assert "base_model" not in card, "a directory is no model id"


def test_a_record_that_a_crash_cut_short_does_not_stop_an_export(trained: Path, tmp_path: Path) -> None:
    cut = copy_of(trained, tmp_path / "cut")
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"event": "log", "st')
    outcome = command("export", "--draft", cut, "--to", "vllm", "--out", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    assert "| expected |" in (tmp_path / "out" / "README.md").read_text()


def test_commands_say_where_they_run(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcome = command("export", "--draft", trained, "--to", "openvino", "--out", out)
    assert f"serve it, inside {out}, in Python: import openvino_genai; print(openvino_genai." in outcome.out
    card = (out / "README.md").read_text()
    assert ", run inside this directory, the last line in Python:" in card


def test_measured_figures_stand_beside_expected_ones(trained: Path, tmp_path: Path) -> None:
    run_dir = copy_of(trained, tmp_path / "run")
    with (run_dir / "metrics.jsonl").open("a") as file:
        for step in range(3):
            figure = {"value": 1.25 + step, "low": 1.0 + step, "high": 1.5 + step}
            event = {"event": "measured", "step": step, "num_speculative_tokens": 3}
            file.write(json.dumps(event | {"acceptance_length": figure}) + "\n")
    step = read_events(run_dir, "end")[-1]["best_step"]
    row = f"| measured by decoding | {1.25 + step:.3f} ({1 + step:.3f} to {1.5 + step:.3f}) |"
    assert row in write_model_card(run_dir).read_text()


def test_a_target_by_its_id_is_the_base_model_and_is_fetched() -> None:
    head = Served("out dir", "org/name", "official", "bfloat16", (2, 4, 5), True)
    card = model_card(head, 40, 96, RunRecord({}, ()), "llamacpp")
    assert card.startswith("---\nbase_model: org/name\n")
    assert "hf download org/name --local-dir target\n" in card
    assert "target --outtype bf16 --outfile target.gguf" in card
    everything = model_card(head, 40, 96, RunRecord({}, ()), None)
    assert "--speculative-draft-model-path 'out dir'" in everything
    other = Served("out", "org/name", "official", "bfloat16", (1, 3, 7), False)
    told = model_card(other, 40, 96, RunRecord({}, ()), None)
    assert "eagle3_layers_to_capture={0, 2, 6}" in told
    assert "sglang.launch_server" not in told
    assert "--to sglang --out OUT" in told


def test_a_head_of_random_tokens_is_not_for_serving(trained: Path, tmp_path: Path) -> None:
    mock = copy_of(trained, tmp_path / "mock")
    text = (mock / "run_config.yaml").read_text()
    (mock / "run_config.yaml").write_text(text.replace("mock_data: false", "mock_data: true"))
    card = write_model_card(mock).read_text()
    assert "Not for serving" in card
    assert "vllm serve" not in card
    (mock / "README.md").unlink()
    assert (
        "random tokens"
        in command("export", "--draft", mock, "--to", "vllm", "--out", tmp_path / "o").refusal()
    )
