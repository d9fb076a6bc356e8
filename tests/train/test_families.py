"""The command line trains on other families than Llama, and what it writes has their shapes."""

import json
from pathlib import Path

import pytest

from eagle_train import load_draft_head
from tests.commands import run, write_conversations
from tests.tiny import write_target


@pytest.mark.parametrize(("family", "changes"), [("qwen3", {"head_dim": 16}), ("gemma2", {"head_dim": 8})])
def test_a_run_on_another_family(family: str, changes: dict[str, int], tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", family, **changes)
    data = write_conversations(tmp_path / "data.jsonl", 12)
    flags = ["--target", target, "--data", data, "--output_dir", tmp_path / "out", "--max_steps", "2"]
    small = [
        "--training_seq_len",
        "128",
        "--bucket_granularity",
        "64",
        "--ttt_steps",
        "3",
        "--dtype",
        "float32",
    ]
    outcome = run(*map(str, [*flags, *small]))
    assert outcome.code == 0, outcome.err
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["head_dim"] == changes["head_dim"]
    attention = load_draft_head(tmp_path / "out").midlayer.self_attn
    assert attention.q_proj.weight.shape == (4 * changes["head_dim"], 2 * 32)
    events = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [e["eval_supervised_rows"] > 0 for e in events if e["event"] == "validation"].count(True) >= 2
