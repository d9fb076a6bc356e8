"""Which layers the OpenVINO runner writes into the model, for each place where a config may name them."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from eagle_train.model.layouts import aux_layer_ids

IDS_KEY = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name in ("openvino", "openvino_genai"):  # its own Python has them
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return importlib.import_module("scripts.engines.run_openvino")


def layers_of(runner: ModuleType, tmp_path: Path, config: dict[str, Any]) -> list[int]:
    for name, values in (("target", {"num_hidden_layers": 12}), ("draft", config)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(values))
    layers: list[int] = runner.hidden_layers(tmp_path / "target", tmp_path / "draft")
    return layers


CONFIGS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "no ids": ({}, [1, 5, 8]),
    "no ids, explicitly": ({IDS_KEY: None, "eagle_config": None}, [1, 5, 8]),
    "entering states": ({IDS_KEY: [1, 4, 7]}, [0, 3, 6]),
    "outputs in eagle_config": ({"eagle_config": {IDS_KEY: [0, 3, 6]}}, [0, 3, 6]),
    "both, of which the first is read": (
        {IDS_KEY: [2, 4, 7], "eagle_config": {IDS_KEY: [0, 3, 6]}}, [1, 3, 6],
    ),
    "other options in eagle_config": ({"eagle_config": {"use_aux_hidden_state": True}}, [1, 5, 8]),
}  # fmt: skip


@pytest.mark.parametrize(("config", "layers"), CONFIGS.values(), ids=CONFIGS)
def test_layers_are_read_from_both_places(
    config: dict[str, Any], layers: list[int], runner: ModuleType, tmp_path: Path
) -> None:
    assert layers_of(runner, tmp_path, config) == layers
    assert [x - 1 for x in aux_layer_ids(config) or (2, 6, 9)] == layers, "as the package reads them"


def test_the_embeddings_cannot_be_read(runner: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="cannot read aux layer 0"):
        layers_of(runner, tmp_path, {IDS_KEY: [0, 4, 7]})
