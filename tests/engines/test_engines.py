"""Real engines load our heads: the target's own tokens, and the very counts of our decoder.

Skipped where an engine's environment is absent; `scripts/setup_engine.sh vllm|openvino|llamacpp` builds it.
"""

import json
from pathlib import Path

import pytest

from scripts.compare_engines import ENGINES, Run, environment, probe_case, run_engine

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    if environment(request.param) is None:
        pytest.skip(f"{request.param} is not installed; scripts/setup_engine.sh {request.param} builds it")
    return request.param


@pytest.fixture(scope="module")
def probe_run(engine: str, shared: Path) -> Run:
    return run_engine(engine, probe_case(shared / "fixtures" / "engine_probe"))


def test_an_engine_gives_the_probes_tokens(probe_run: Run, shared: Path) -> None:
    truth = json.loads((shared / "fixtures" / "engine_probe" / "counts.json").read_text())
    assert [prompt.token_ids for prompt in probe_run.prompts] == [
        row["greedy_ids"] for row in truth["prompts"]
    ]


def test_an_engine_gives_the_probes_counts(engine: str, probe_run: Run, shared: Path) -> None:
    """Capped for llama.cpp and OpenVINO, full for vLLM. OpenVINO does not tell acceptance by position."""
    truth = json.loads((shared / "fixtures" / "engine_probe" / "counts.json").read_text())
    assert probe_run.capped == (engine != "vllm")
    expected = truth["capped"] if probe_run.capped else truth
    totals = probe_run.totals()
    assert totals.accepted == expected["accepted"]
    assert totals.drafted == expected.get("drafted", 3 * expected["verify_steps"])
    if engine != "openvino":
        assert totals.verify_steps == expected["verify_steps"]
        assert totals.accepted_per_position == expected["accepted_per_position"]
    if (
        engine != "llamacpp"
    ):  # it does not count a step that drafts nothing; the other two take the same steps
        assert [prompt.verify_steps for prompt in probe_run.prompts] == [
            row["verify_steps"] for row in truth["prompts"]
        ]
