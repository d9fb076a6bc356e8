"""steps.sh, run: with a converter that only notes how it was called."""

import os
import subprocess
from pathlib import Path

import pytest

from eagle_train.export.write import export_draft_head
from tests.export.heads import command, copy_of

# Notes its directory, PYTHONPATH and words, one a line; the converters are given to it as scripts.
FAKE = """#!/bin/bash
{{ pwd; echo "PYTHONPATH=${{PYTHONPATH:-}}"; printf "%s\\n" "$@"; }} >> {log}
cat > /dev/null
"""


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for PATH with a python and an optimum-cli that note their calls."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in ("python", "optimum-cli"):
        (folder / name).write_text(FAKE.format(log=tmp_path / "log"))
        (folder / name).chmod(0o755)
    return folder


def run_steps(tools: Path, out: Path, start: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The script, called from `start` by its path from there, as a user would."""
    words = ["bash", os.path.relpath(out / "steps.sh", start)]
    path = {"PATH": f"{tools}:{os.environ['PATH']}"}
    return subprocess.run(
        words, cwd=start, env=os.environ | path | env, capture_output=True, text=True, input=""
    )


@pytest.mark.parametrize("name", ["out", "out dir", 'it\'s "out" $HOME'])
def test_a_relative_llama_cpp_is_the_callers(
    name: str, head_dir: Path, target_dir: Path, tools: Path, tmp_path: Path
) -> None:
    target = copy_of(target_dir, tmp_path / "a target's $dir")
    out, tree = tmp_path / name, tmp_path / "llama cpp"
    export_draft_head(head_dir, "llamacpp", out, str(target))
    (tree / "gguf-py").mkdir(parents=True)
    # A directory of that name beside the script, or on CDPATH, is another one.
    (out / "llama cpp").mkdir()
    (tmp_path / "other" / "llama cpp").mkdir(parents=True)
    done = run_steps(tools, out, tmp_path, LLAMA_CPP="llama cpp", CDPATH=str(tmp_path / "other"))
    assert (done.returncode, done.stderr) == (0, "")
    first = [str(out), f"PYTHONPATH={tree / 'gguf-py'}", f"{tree}/convert_hf_to_gguf.py", str(target)]
    calls = (tmp_path / "log").read_text().splitlines()
    assert calls[:4] == first
    assert calls[-7:-1] == [".", "--target-model-dir", str(target), "--outtype", "f32", "--outfile"]


def test_an_absolute_llama_cpp_stays(head_dir: Path, target_dir: Path, tools: Path, tmp_path: Path) -> None:
    export_draft_head(head_dir, "llamacpp", tmp_path / "out", str(target_dir))
    (tmp_path / "tree").mkdir()
    done = run_steps(tools, tmp_path / "out", tmp_path / "out", LLAMA_CPP=str(tmp_path / "tree"))
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/tree/convert_hf_to_gguf.py" in (tmp_path / "log").read_text()


def test_an_absent_llama_cpp_is_named(head_dir: Path, target_dir: Path, tools: Path, tmp_path: Path) -> None:
    export_draft_head(head_dir, "llamacpp", tmp_path / "out", str(target_dir))
    for value, part in (("", "set LLAMA_CPP to a source tree"), ("nowhere", "nowhere: No such file")):
        done = run_steps(tools, tmp_path / "out", tmp_path, LLAMA_CPP=value)
        assert done.returncode != 0
        assert part in done.stderr
    assert not (tmp_path / "log").exists()


def test_a_relative_target_is_found_from_the_script(
    head_dir: Path, target_dir: Path, tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = copy_of(target_dir, tmp_path / "the target")
    monkeypatch.chdir(tmp_path)
    words = ("--draft", head_dir, "--out", "my out", "--target", "the target")
    outcome = command("export", "--to", "openvino", *words)
    assert outcome.code == 0, outcome.err
    done = run_steps(tools, tmp_path / "my out", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    calls = (tmp_path / "log").read_text().splitlines()
    assert calls[0] == str(tmp_path / "my out")
    assert str(target) in calls
    card = (tmp_path / "my out" / "README.md").read_text()
    assert f"| target | {target} |" in card
    command("export", "--to", "vllm", "--draft", head_dir, "--out", "vllm out", "--target", "the target")
    assert f'"model": "{tmp_path / "vllm out"}"' in (tmp_path / "vllm out" / "README.md").read_text()
