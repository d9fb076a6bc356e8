"""What each engine has to be told: which layers it reads, how it is started, what has to be done before.

Layers are counted as everywhere here: layer x is the state that *enters* block x (Hugging Face's
`hidden_states[x]`). SGLang, TensorRT-LLM and OpenVINO count the outputs of blocks, one less.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle_train.export.findings import LLAMACPP, OPENVINO, SGLANG, TENSORRT, VLLM
from eagle_train.model.layouts import OFFICIAL, SPECULATORS

MOST_DRAFTED = 3  # tokens drafted a verify step in the commands that are shown
TARGET_WORD = "TARGET"  # stands in commands where the target is not known
IN_PYTHON = (TENSORRT, OPENVINO)  # whose serve command is no shell line
LLAMA_CPP_IS_SET = ': "${LLAMA_CPP:?set LLAMA_CPP to a source tree of llama.cpp that has EAGLE-3}"'
GGUF_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class Served:
    """A head as a command line names it.

    draft and a target on disk: by their full paths; target: else a Hugging Face id or `TARGET_WORD`;
    aux_layer_ids: entering states; None: unknown, because they are the default ones of a target that is not
    known; num_drafted: tokens a verify step, of `num_drafted`.
    """

    draft: str
    target: str
    layout: str
    dtype: str
    aux_layer_ids: Sequence[int] | None
    is_default: bool
    num_drafted: int = MOST_DRAFTED


def num_drafted(ttt_steps: int | None) -> int:
    """Tokens to draft a verify step with a head that was trained for so many; None: it is not known."""
    return min(MOST_DRAFTED, ttt_steps or MOST_DRAFTED)


def full_path(name: str) -> str:
    """A directory's full path, because commands are run elsewhere; a Hugging Face id as it is."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def serve_command(engine: str, head: Served) -> str | None:
    """The shell or Python line that serves the head; None where the engine does not read its layout."""
    draft, target, drafted = shlex.quote(head.draft), shlex.quote(head.target), head.num_drafted
    if engine == VLLM and head.layout == SPECULATORS:
        return f"vllm serve {draft}"
    if engine == VLLM:
        speculation = {"method": "eagle3", "model": head.draft, "num_speculative_tokens": drafted}
        return f"vllm serve {target} --speculative-config {shlex.quote(json.dumps(speculation))}"
    if engine == LLAMACPP:
        files = "-m target.gguf -md draft.gguf"
        return f"llama-server {files} --spec-type draft-eagle3 --spec-draft-n-max {drafted}"
    if head.layout != OFFICIAL:
        return None
    if engine == SGLANG:
        return (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 "
            f"--speculative-draft-model-path {draft} --speculative-num-steps {drafted} "
            f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {drafted + 1}"
        )
    if engine == TENSORRT:
        layers = ""
        if not head.is_default and head.aux_layer_ids:
            layers = f", eagle3_layers_to_capture={{{', '.join(str(x - 1) for x in head.aux_layer_ids)}}}"
        config = f"Eagle3DecodingConfig(max_draft_len={drafted}, speculative_model={head.draft!r}{layers})"
        imports = "from tensorrt_llm import LLM; from tensorrt_llm.llmapi import Eagle3DecodingConfig"
        model = f"LLM({head.target!r}, speculative_config={config})"
        return f'{imports}; print({model}.generate("Hello").outputs[0].text)'
    draft_model = 'draft_model=openvino_genai.draft_model("draft_ov", "CPU")'
    generate = f'generate("Hello", max_new_tokens=64, num_assistant_tokens={drafted})'
    pipeline = f'openvino_genai.LLMPipeline("target_ov", "CPU", {draft_model})'
    return f"import openvino_genai; print({pipeline}.{generate})"


def steps(engine: str, head: Served) -> list[str]:
    """Shell lines that make what OpenVINO and llama.cpp read from the exported directory, run inside it;
    nothing for the others.
    """
    if engine == OPENVINO:
        return _openvino_steps(head)
    if engine == LLAMACPP:
        return _llamacpp_steps(head)
    return []


def _openvino_steps(head: Served) -> list[str]:
    assert head.aux_layer_ids is not None
    layers = [x - 1 for x in head.aux_layer_ids]
    convert = "--task text-generation-with-past --weight-format fp32"
    return [
        "# needs openvino-genai 2026.4 and optimum-intel 2.2, which wants the remote-code flag",
        f"optimum-cli export openvino --model {shlex.quote(head.target)} {convert} target_ov",
        f"optimum-cli export openvino --model . {convert} --trust-remote-code draft_ov_default",
        "# by default it reads the states one block late, so the layers are written into the model",
        "python - <<'END'",
        "import shutil",
        "import openvino",
        'shutil.copytree("draft_ov_default", "draft_ov", dirs_exist_ok=True)',
        'model = openvino.Core().read_model("draft_ov_default/openvino_model.xml")',
        f'model.set_rt_info({layers}, ["hidden_layers_list"])',
        'openvino.save_model(model, "draft_ov/openvino_model.xml", compress_to_fp16=False)',
        "END",
    ]


def _llamacpp_steps(head: Served) -> list[str]:
    target, lines = shlex.quote(head.target), []
    if not Path(head.target).is_dir():
        lines = [f"hf download {target} --local-dir target"]
        target = "target"
    convert = 'PYTHONPATH="$LLAMA_CPP/gguf-py" python "$LLAMA_CPP/convert_hf_to_gguf.py"'
    kind = GGUF_TYPES.get(head.dtype, "auto")
    return [
        LLAMA_CPP_IS_SET,
        "# the converter knows tokenizers by a hash and refuses one that it does not know",
        *lines,
        f"{convert} {target} --outtype {kind} --outfile target.gguf",
        f"{convert} . --target-model-dir {target} --outtype {kind} --outfile draft.gguf",
    ]


def script(lines: Sequence[str]) -> str:
    """The steps as a shell script, which runs in its own directory whatever the caller's is."""
    # Without CDPATH, in which cd would look for directories of the same name.
    head = ["#!/bin/bash", "set -eu", "unset CDPATH"]
    if LLAMA_CPP_IS_SET in lines:
        head += [LLAMA_CPP_IS_SET, 'LLAMA_CPP=$(cd -- "$LLAMA_CPP" && pwd)']  # as the caller names it
    return "\n".join([*head, 'cd -- "$(dirname -- "$0")"', *lines]) + "\n"
