"""How flags, YAML and the demo's own options come together."""

from pathlib import Path

import pytest

from eagle_train.__main__ import with_demo_config
from eagle_train.config import TrainConfig
from eagle_train.errors import InputError
from eagle_train.flags import parse


def parsed(args: list[str]) -> TrainConfig:
    return parse(TrainConfig, args, command="train", description="")


def test_a_repeated_list_flag_adds_to_the_list() -> None:
    config = parsed(["--target", "t", "--data", "a.jsonl", "b.jsonl", "--data", "c.jsonl"])
    assert config.data == ("a.jsonl", "b.jsonl", "c.jsonl")


@pytest.mark.parametrize(
    "args",
    [
        ["--packing", "none"],
        ["--packing", "none", "--padding_free", "false"],
        ["--accumulation_steps", "2"],
        ["--training_seq_len", "4096", "--bucket_granularity", "1024"],
    ],
)
def test_the_demo_takes_any_batch_form(args: list[str]) -> None:
    config = parsed(with_demo_config(args))
    assert config.target == "demo"
    for flag, value in zip(args[::2], args[1::2], strict=True):
        assert str(getattr(config, flag.removeprefix("--"))).lower() == value


def test_a_target_data_or_config_of_the_users_own_sets_the_demos_options_aside() -> None:
    assert with_demo_config(["--target=t", "--data", "a.jsonl"]) == ["--target=t", "--data", "a.jsonl"]
    assert with_demo_config(["--config", "x.yaml"]) == ["--config", "x.yaml"]
    assert with_demo_config([])[0] == "--config"


def test_none_is_the_same_word_in_yaml(tmp_path: Path) -> None:
    names = ("init_from", "draft_vocab_size", "aux_layer_ids", "torch_compile", "learning_rate", "max_steps")
    path = tmp_path / "c.yaml"
    path.write_text("".join(f"{name}: none\n" for name in (*names, "packing")))
    config = parsed(["--config", str(path)])
    assert [getattr(config, name) for name in names] == [None] * len(names)
    assert config.packing == "none"
    path.write_text("aux_layer_ids: [2, 4, 5]\ninit_from: w1/\n")
    assert parsed(["--config", str(path)]).aux_layer_ids == (2, 4, 5)
    flags = ["--config", str(path), "--aux_layer_ids", "none", "--init_from", "none"]
    assert (parsed(flags).aux_layer_ids, parsed(flags).init_from) == (None, None)
    with pytest.raises(InputError, match="--aux_layer_ids names none beside other values"):
        parsed(["--aux_layer_ids", "1", "none", "3"])


def test_none_takes_back_what_the_config_names() -> None:
    assert parsed(with_demo_config([])).max_steps == 300
    assert parsed(with_demo_config(["--max_steps", "none"])).max_steps is None
    counted_in_epochs = parsed(with_demo_config(["--num_epochs", "3"]))
    assert (counted_in_epochs.max_steps, counted_in_epochs.num_epochs) == (None, 3)
