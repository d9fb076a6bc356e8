"""Export a target and a draft head to OpenVINO and decode prompts; run by the Python of
`setup_engine.sh openvino`.

    ENGINE/bin/python scripts/engines/run_openvino.py REQUEST.json RESULT.json

Request and result are described in scripts/compare_engines.py. OpenVINO GenAI drafts at most the
tokens that are left less one (`capped` is true) and does not tell acceptance by position.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai
import torch
from safetensors.torch import load_file, save_file

AUX_IDS_KEY = "eagle_aux_hidden_state_layer_ids"
NO_TOKEN = 10**9
FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    target_dir, draft_dir = Path(request["target_dir"]), Path(request["draft_dir"])
    with tempfile.TemporaryDirectory() as scratch:
        target_ir, draft_ir = Path(scratch) / "target", Path(scratch) / "draft"
        export(target_dir, target_ir)
        export(with_maps(draft_dir, Path(scratch) / "with_maps"), draft_ir, "--trust-remote-code")
        set_aux_layers(draft_ir / "openvino_model.xml", hidden_layers(target_dir, draft_dir))
        let_drafts_run_on(draft_ir / "generation_config.json")
        draft = openvino_genai.draft_model(str(draft_ir), "CPU", **FLOAT32)
        pipeline = openvino_genai.LLMPipeline(str(target_ir), "CPU", draft_model=draft, **FLOAT32)
        results = [
            decode(pipeline, prompt, num_tokens, request["num_speculative_tokens"])
            for prompt, num_tokens in zip(request["prompts"], request["max_new_tokens"], strict=True)
        ]
    Path(sys.argv[2]).write_text(
        json.dumps(
            {"version": f"OpenVINO GenAI {version('openvino-genai')}", "capped": True, "prompts": results}
        )
    )


def with_maps(draft_dir: Path, copy: Path) -> Path:
    """The head, or a copy with `d2t` and `t2d` where it has none because its vocabulary is the target's:
    the exporter makes maps in any case and does not fill them, so that nearly nothing would be accepted.
    """
    weights = draft_dir / "model.safetensors"
    if not weights.is_file() or "d2t" in (tensors := load_file(weights)):
        return draft_dir
    vocab_size = json.loads((draft_dir / "config.json").read_text())["vocab_size"]
    tensors["d2t"] = torch.zeros(vocab_size, dtype=torch.int64)  # offsets
    tensors["t2d"] = torch.ones(vocab_size, dtype=torch.bool)
    copy.mkdir()
    shutil.copy(draft_dir / "config.json", copy)
    save_file(tensors, copy / weights.name, metadata={"format": "pt"})
    return copy


def export(model: Path, out: Path, *flags: str) -> None:
    command = [Path(sys.executable).with_name("optimum-cli"), "export", "openvino", "--model", model]
    command += ["--task", "text-generation-with-past", "--weight-format", "fp32", *flags, out]
    subprocess.run(command, check=True)


def hidden_layers(target_dir: Path, draft_dir: Path) -> list[int]:
    """The draft's aux layers as OpenVINO counts them, by the layer whose *output* is read: one less than
    the layer that the state enters. Always written, because its own default is one layer late.
    """
    num_layers = json.loads((target_dir / "config.json").read_text())["num_hidden_layers"]
    config = json.loads((draft_dir / "config.json").read_text())
    nested = config.get("eagle_config")
    outputs = nested.get(AUX_IDS_KEY) if isinstance(nested, dict) else None  # counted so already
    if entered := config.get(AUX_IDS_KEY):
        outputs = [layer - 1 for layer in entered]
    outputs = outputs or [1, num_layers // 2 - 1, num_layers - 4]
    if min(outputs) < 0:
        raise SystemExit(
            f"OpenVINO cannot read aux layer {min(outputs) + 1}, the embeddings; use layers from 1 on"
        )
    return outputs


def set_aux_layers(model_path: Path, layers: list[int]) -> None:
    model = ov.Core().read_model(model_path)
    model.set_rt_info(layers, ["hidden_layers_list"])
    # Saved beside the open files, then moved over them.
    fixed = model_path.with_name("with_layers.xml")
    ov.save_model(model, fixed, compress_to_fp16=False)
    del model
    fixed.with_suffix(".bin").replace(model_path.with_suffix(".bin"))
    fixed.replace(model_path)


def let_drafts_run_on(generation_config: Path) -> None:
    """Name an end of text that is no token: a draft ends behind one whatever `ignore_eos` says, which leaves
    tokens and accepted counts alone but not what was drafted (where none is named, the tokenizer's is taken).
    """
    config = json.loads(generation_config.read_text())
    generation_config.write_text(json.dumps(config | {"eos_token_id": NO_TOKEN}))


def decode(pipeline, prompt: list[int], num_tokens: int, num_drafted: int) -> dict:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = num_tokens
    config.ignore_eos = True
    config.do_sample = False
    config.num_assistant_tokens = num_drafted
    result = pipeline.generate(ov.Tensor(np.array([prompt], dtype=np.int64)), config)
    metrics = result.extended_perf_metrics
    passes = len(metrics.main_model_metrics.raw_metrics.m_durations) - 1  # without the prefill
    return {
        "token_ids": list(result.tokens[0]),
        **prompt_counts(
            len(result.tokens[0]), passes, metrics.get_num_draft_tokens(), metrics.get_num_accepted_tokens()
        ),
        "accepted_per_position": None,
    }


def prompt_counts(num_tokens: int, passes: int, told_drafted: int, told_accepted: int) -> dict[str, int]:
    """The counts of a whole answer. OpenVINO's own leave out the pass that ends it (seen in 2026.4.1).

    Every pass gives one token beside those that it accepts, so tokens and passes tell how many were accepted
    in all. The last pass drafts no more than it can use and is the last because all of that was accepted:
    what is missing was drafted and accepted. Where nothing is missing, the last pass drafted nothing and is
    no verify step.
    """
    accepted = num_tokens - 1 - passes
    of_the_last = accepted - told_accepted
    if of_the_last < 0:
        raise SystemExit(
            f"OpenVINO tells {told_accepted} accepted tokens, but {num_tokens} tokens in {passes} passes "
            f"hold {accepted}; this version counts in another way"
        )
    return {
        "verify_steps": passes - (of_the_last == 0),
        "drafted": told_drafted + of_the_last,
        "accepted": accepted,
    }


if __name__ == "__main__":
    main()
