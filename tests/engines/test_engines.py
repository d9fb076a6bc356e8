"""Real engines load our heads: the target's own tokens, and the very counts of our decoder.

Skipped where an engine's environment is absent; `scripts/setup_engine.sh vllm|openvino|llamacpp` builds it.
"""

import json
import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compare_engines import ENGINES, environment, run_engine
from engine_cases import Case, Run, head_case, measure, probe_case, same_counts, with_target_greedy

from eagle_train import load_draft_head, load_target
from eagle_train.decode.results import Prompt
from eagle_train.export.write import Exported, export_draft_head
from scripts.engines.run_llamacpp import free_port, get, wait_until_ready
from tests.commands import run, write_conversations
from tests.tiny import write_target

pytestmark = pytest.mark.engines
LONG_PROMPT_TOKENS = 300
SMOLLM2 = Path(os.environ.get("EAGLE_TRAIN_SMOLLM2") or Path.home() / ".cache" / "eagle_train" / "smollm2")
DEMO = Path(__file__).resolve().parents[2] / "eagle_train" / "demo"


def installed(engine: str) -> Path:
    """The engine's environment; skips where there is none."""
    directory = environment(engine)
    if directory is None:
        pytest.skip(f"{engine} is not installed; scripts/setup_engine.sh {engine} builds it")
    return directory


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    installed(request.param)
    return request.param


@pytest.fixture(scope="module")
def vllm() -> Path:
    return installed("vllm")


@pytest.fixture(scope="module")
def openvino() -> Path:
    return installed("openvino")


@pytest.fixture(scope="module")
def llamacpp() -> Path:
    return installed("llamacpp")


@pytest.fixture(scope="module")
def truth(shared: Path) -> dict[str, Any]:
    return json.loads((shared / "fixtures" / "engine_probe" / "counts.json").read_text())


@pytest.fixture(scope="module")
def probe_run(engine: str, shared: Path) -> Run:
    return run_engine(engine, probe_case(shared / "fixtures" / "engine_probe"))


@pytest.fixture(scope="module")
def demo_case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A head of ours as training writes it, after a few steps on rows of 128 tokens, and a prompt far longer.
    Tests name `engine` before it, so that nothing is trained where none is installed.
    """
    folder = tmp_path_factory.mktemp("demo_head")
    done = run(
        "--max_steps", 60, "--training_seq_len", 128, "--bucket_granularity", 128, "--dtype", "float32",
        "--eval_fraction", 0, "--output_dir", folder,
    )  # fmt: skip
    assert done.code == 0, done.err
    case = head_case(DEMO / "target", folder, DEMO / "heldout.jsonl", 4, 3, 40)
    several = [token for prompt in case.prompts for token in prompt.token_ids] * 10
    return replace(
        case,
        prompts=[*case.prompts, Prompt(tuple(several[:LONG_PROMPT_TOKENS]), "long")],
        max_new_tokens=[40] * 5,
    )


@pytest.fixture(scope="module")
def wide_case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A random Qwen3 target whose attention is four times as wide as its hidden size."""
    folder = tmp_path_factory.mktemp("wide")
    target = write_target(folder / "target", "qwen3", head_dim=32)
    data = write_conversations(folder / "data.jsonl", 60)
    done = run(
        "--target", target, "--data", data, "--training_seq_len", 64, "--bucket_granularity", 64,
        "--dtype", "float32", "--eval_fraction", 0, "--learning_rate", 3e-3, "--num_epochs", 8,
        "--draft_vocab_size", 80, "--output_dir", folder / "head",
    )  # fmt: skip
    assert done.code == 0, done.err
    return head_case(target, folder / "head", data, 4, 3, 24)


@pytest.fixture(scope="module")
def smollm2_case(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A real target, and a head of ours after a few steps on its own answers, on Spec-Bench prompts."""
    if not (SMOLLM2 / "config.json").is_file():
        pytest.skip(
            f"SmolLM2 is not in {SMOLLM2}; shared/tools/get_smollm2.py writes it (or set EAGLE_TRAIN_SMOLLM2)"
        )
    folder = tmp_path_factory.mktemp("smollm2_head")
    data = shared / "data"
    done = run(
        "--target", SMOLLM2, "--data", data / "smollm2_distilled" / "train.jsonl", "--max_samples", 40,
        "--eval_fraction", 0, "--draft_vocab_size", 8192, "--training_seq_len", 512,
        "--bucket_granularity", 512, "--learning_rate", 2e-3, "--max_steps", 12,
        "--dtype", "bfloat16", "--output_dir", folder,
    )  # fmt: skip
    assert done.code == 0, done.err
    return head_case(SMOLLM2, folder, data / "eval" / "spec_bench.jsonl", 4, 3, 40)


def test_an_engine_gives_the_probes_tokens(probe_run: Run, truth: dict[str, Any]) -> None:
    own = [row["greedy_ids"] for row in truth["prompts"]]
    assert [prompt.token_ids for prompt in probe_run.prompts] == own


def test_an_engine_gives_the_probes_counts(engine: str, probe_run: Run, truth: dict[str, Any]) -> None:
    """Capped for llama.cpp and OpenVINO, full for vLLM. OpenVINO does not tell acceptance by position."""
    assert probe_run.capped == (engine != "vllm")
    expected = truth["capped"] if probe_run.capped else truth
    totals = probe_run.totals()
    assert totals.accepted == expected["accepted"]
    assert totals.drafted == expected.get("drafted", truth["num_speculative_tokens"] * truth["verify_steps"])
    assert totals.verify_steps == expected["verify_steps"]
    if engine != "openvino":
        assert totals.accepted_per_position == expected["accepted_per_position"]


def test_an_engine_counts_a_head_of_ours_as_we_do(engine: str, demo_case: Case) -> None:
    """The training output, loaded unchanged: a bfloat16 target with tied embeddings, a head without one.

    Beyond the trained length too: where a head's position limit is what it was trained on, engines read past
    the end of its rotary table (vLLM issue 48894).
    """
    assert_counts_are_ours(engine, demo_case)
    limit = json.loads((demo_case.draft_dir / "config.json").read_text())["max_position_embeddings"]
    assert limit == json.loads((demo_case.target_dir / "config.json").read_text())["max_position_embeddings"]
    assert max(len(prompt.token_ids) for prompt in demo_case.prompts) == LONG_PROMPT_TOKENS


def test_an_engine_counts_a_head_of_smollm2_as_we_do(engine: str, smollm2_case: Case) -> None:
    """A draft vocabulary of a sixth of the target's, a real tokenizer, 30 layers."""
    assert_counts_are_ours(engine, smollm2_case)


def test_an_engine_counts_a_head_of_wide_attention_as_we_do(engine: str, wide_case: Case) -> None:
    """Four heads of size 32 over a hidden size of 32, as Qwen3 has them: o_proj is [32, 128]."""
    config = json.loads((wide_case.draft_dir / "config.json").read_text())
    assert config["head_dim"] * config["num_attention_heads"] == 4 * config["hidden_size"]
    assert_counts_are_ours(engine, wide_case)


@pytest.mark.parametrize("layout", ["vllm", "speculators"])
def test_vllm_counts_an_exported_head_as_we_do(
    vllm: Path, layout: str, wide_case: Case, tmp_path: Path
) -> None:
    export_draft_head(wide_case.draft_dir, layout, tmp_path / "out")
    assert_counts_are_ours("vllm", replace(wide_case, draft_dir=tmp_path / "out"))


def test_what_openvino_export_prints_serves(openvino: Path, smollm2_case: Case, tmp_path: Path) -> None:
    exported, env = run_steps("openvino", openvino, smollm2_case, tmp_path / "out")
    served = subprocess.run(
        ["python", "-c", exported.serve], cwd=exported.directory, env=env, capture_output=True, text=True
    )
    assert served.returncode == 0, served.stderr
    assert served.stdout.strip()


def test_what_llamacpp_export_prints_serves(llamacpp: Path, smollm2_case: Case, tmp_path: Path) -> None:
    exported, env = run_steps("llamacpp", llamacpp, smollm2_case, tmp_path / "out")
    port = free_port()
    command = [*shlex.split(exported.serve), "--port", str(port)]
    with subprocess.Popen(command, cwd=exported.directory, env=env, stderr=subprocess.DEVNULL) as server:
        try:
            wait_until_ready(f"http://127.0.0.1:{port}", server)
            request = {"prompt": "The capital of France is", "n_predict": 16, "temperature": 0}
            answer = json.loads(get(f"http://127.0.0.1:{port}/completion", json.dumps(request).encode()))
        finally:
            server.terminate()
    assert answer["content"].strip()
    assert answer["timings"]["draft_n"] > 0


def run_steps(engine: str, directory: Path, case: Case, out: Path) -> tuple[Exported, dict[str, str]]:
    """Export, and run steps.sh in the engine's environment, as a user would; what was exported, and that
    environment's variables.
    """
    exported = export_draft_head(case.draft_dir, engine, out)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"PATH": f"{directory / 'bin'}:{env['PATH']}", "LLAMA_CPP": str(directory / "llama.cpp")}
    done = subprocess.run(["bash", out / "steps.sh"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return exported, env


def assert_counts_are_ours(engine: str, case: Case) -> None:
    head = load_draft_head(case.draft_dir)
    target = load_target(str(case.target_dir), dtype=torch.float32, device=torch.device("cpu"))
    case, greedy = with_target_greedy(case)
    served = run_engine(engine, case)
    measured = measure(head, target, case, capped=served.capped)
    for prompt, tokens, num_tokens in zip(served.prompts, greedy, case.max_new_tokens, strict=True):
        assert prompt.token_ids == tokens[:num_tokens]
    assert measured.totals().accepted > 0
    for ours, theirs in zip(measured.prompts, served.prompts, strict=True):
        assert same_counts(ours, theirs)
