"""The notebook runs from top to bottom on a freshly trained head and shows its figures and plots."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from eagle_train.__main__ import main

NOTEBOOK = Path(__file__).resolve().parents[1] / "scripts" / "acceptance_rate.ipynb"


def test_the_notebook_shows_acceptance_of_a_trained_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ["--max_steps", "2", "--max_samples", "8", "--max_eval_samples", "4", "--training_seq_len", "1024"]
    assert main([*run, "--dtype", "float32", "--output_dir", str(tmp_path / "run")]) == 0
    monkeypatch.setenv("EAGLE_TRAIN_HEAD", str(tmp_path / "run"))
    monkeypatch.setenv("EAGLE_TRAIN_NUM_SAMPLES", "4")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=300).execute(cwd=str(tmp_path))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    for name in ("acceptance_rate", "top1_agreement", "acceptance length at n = 3"):
        assert name in text
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
