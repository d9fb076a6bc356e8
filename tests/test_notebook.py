"""The notebook runs from top to bottom on a freshly trained head and shows its figures and plots."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import eagle_train
from eagle_train.__main__ import main

NOTEBOOK = Path(__file__).resolve().parents[1] / "scripts" / "acceptance_rate.ipynb"


def outputs_of(notebook: nbformat.NotebookNode) -> tuple[str, int]:
    """All printed text, and the number of pictures."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert all(output.output_type != "error" for output in outputs)
    text = "".join(output.get("text", "") for output in outputs)
    return text, sum("image/png" in output.get("data", {}) for output in outputs)


def check_outputs(notebook: nbformat.NotebookNode) -> None:
    text, num_pictures = outputs_of(notebook)
    assert re.search(r"^all +acceptance length \d\.\d\d", text, flags=re.MULTILINE)
    expected, measured = re.findall(r"temperature 0: expected ([\d.]+), measured ([\d.]+)", text)[0]
    assert expected == measured
    assert "temperature 1: expected " in text
    assert num_pictures == 4


def test_the_notebook_shows_acceptance_of_a_trained_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ["--max_steps", "2", "--max_samples", "8", "--max_eval_samples", "4", "--training_seq_len", "1024"]
    eager = ["--torch_compile", "false", "--dtype", "float32"]
    assert main([*run, *eager, "--output_dir", str(tmp_path / "run")]) == 0
    monkeypatch.setenv("EAGLE_TRAIN_HEAD", str(tmp_path / "run"))
    monkeypatch.setenv("EAGLE_TRAIN_NUM_PROMPTS", "4")
    monkeypatch.setenv("EAGLE_TRAIN_MAX_NEW_TOKENS", "16")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=300).execute(cwd=str(tmp_path))
    check_outputs(notebook)


def test_the_notebook_holds_its_outputs_and_uses_public_names_alone() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    check_outputs(notebook)
    source = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert "from eagle_train." not in source
    assert "import eagle_train." not in source
    (names,) = re.findall(r"from eagle_train import \((.*?)\)", source, flags=re.DOTALL)
    assert {name.strip() for name in names.split(",") if name.strip()} <= set(eagle_train.__all__)
