"""Bad input ends with exit code 2 and one line that names value, limit and remedy, and loses nothing."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.commands import Outcome, conversation, run, write_conversations, write_jsonl
from tests.data.templates import turns
from tests.tiny import write_target

SMALL = ("--training_seq_len", 256, "--bucket_granularity", 64, "--ttt_steps", 2, "--max_steps", 1)


class Workplace:
    """A directory with a data file and room for output; `train` runs the command line there."""

    def __init__(self, directory: Path, target_dir: Path) -> None:
        self.directory = directory
        self.target = target_dir
        self.data = write_conversations(directory / "data.jsonl", 6)
        self.output = directory / "out"

    def train(self, *flags: object, **named: object) -> Outcome:
        """Train with the small defaults; later flags win over earlier ones."""
        named = {"target": self.target, "data": self.data, "output_dir": self.output} | named
        words = [word for name, value in named.items() for word in (f"--{name}", value)]
        return run(*words, *SMALL, "--dtype", "float32", "--num_threads", 1, *flags)

    def refusal(self, *flags: object, **named: object) -> str:
        """The line of a run that is refused before training and leaves nothing behind."""
        line = self.train(*flags, **named).refusal()
        assert not self.output.exists()
        return line

    def write_data(self, text: str | bytes) -> Path:
        path = self.directory / "bad.jsonl"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path


@pytest.fixture
def place(tmp_path: Path, target_dir: Path) -> Workplace:
    return Workplace(tmp_path, target_dir)


def rows(*values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def assert_names(line: str, *parts: object) -> None:
    for part in parts:
        assert str(part) in line, line


FLAG_FAULTS = {
    "a capacity that the granularity does not divide": (
        "--training_seq_len 200 --bucket_granularity 64",
        ("--training_seq_len 200", "--bucket_granularity 64", "use 192 or 256"),
    ),
    "a capacity below the granularity": (
        "--training_seq_len 32 --bucket_granularity 64",
        ("--training_seq_len 32", "--bucket_granularity 64", "use 64"),
    ),
    "a draft vocabulary of no token": ("--draft_vocab_size 0", ("--draft_vocab_size is 0", "at least 1")),
    "a draft vocabulary below zero": ("--draft_vocab_size -1", ("--draft_vocab_size is -1", "at least 1")),
    "no step": ("--max_steps 0", ("--max_steps is 0", "at least 1")),
    "an unknown flag": ("--learning_rat 1", ("unknown flag --learning_rat", "did you mean --learning_rate")),
    "a flag that another trainer has": ("--zzz 1", ("unknown flag --zzz", "--help")),
    "a word for a number": ("--max_steps many", ("--max_steps", "'many'", "--help")),
    "an unknown choice": ("--packing tight", ("--packing", "'tight'", "multipack", "none")),
    "a word for a truth value": ("--padding_free perhaps", ("--padding_free", "'perhaps'", "true nor false")),
    "a share above one": ("--eval_fraction 2", ("--eval_fraction is 2.0", "between 0 and 1")),
    "a learning rate of zero": ("--learning_rate 0", ("--learning_rate is 0.0", "above 0")),
    "an infinite learning rate": ("--learning_rate inf", ("--learning_rate is inf", "finite")),
    "a learning rate that is no number": ("--learning_rate nan", ("--learning_rate is nan", "finite")),
    "a moment decay above one": ("--adam_beta1 2", ("--adam_beta1 is 2.0", "below 1")),
    "a negative seed": ("--seed -1", ("--seed is -1", "between 0 and")),
    "a negative weight decay": ("--weight_decay -1", ("--weight_decay is -1.0", "from 0 up")),
    "a template option without value": ("--template_options thinking", ("'thinking'", "name=value")),
    "a template option that is no YAML": ("--template_options a=[", ("--template_options a=[", "not YAML")),
    "both ways with an old run": ("--resume --overwrite", ("--resume and --overwrite", "drop one")),
    "a device that is no device": ("--device gpu", ("--device gpu", "use auto, cpu or cuda")),
    "a device without values": ("--device meta", ("--device meta", "use auto, cpu or cuda")),
    "a device without software": ("--device hpu", ("--device hpu", "use auto, cpu or cuda")),
    "two aux layers": ("--aux_layer_ids 1 2", ("--aux_layer_ids", "2 layers", "three")),
    "an aux layer behind the last": ("--aux_layer_ids 1 2 8", ("--aux_layer_ids is 1 2 8", "0 and 7")),
    "a chat template that is not there": ("--chat_template no.jinja", ("no.jinja", "does not exist")),
    "a chat template that is a directory": ("--chat_template .", ("--chat_template .", "is not a file")),
    "a template option that is not read": (
        "--template_options enable_thinkin=false",
        ("--template_options enable_thinkin", "no such option", "it reads"),
    ),
    "an eval file that is not there": ("--eval_data no.jsonl", ("no.jsonl does not exist", "--eval_data")),
    "a config that is not there": ("--config no.yaml", ("--config no.yaml", "No such file")),
}


@pytest.mark.parametrize(("flags", "parts"), FLAG_FAULTS.values(), ids=FLAG_FAULTS)
def test_a_bad_flag_is_refused(place: Workplace, flags: str, parts: tuple[str, ...]) -> None:
    assert_names(place.refusal(*flags.split()), *parts)


def test_a_draft_vocabulary_above_the_target_s_is_refused(place: Workplace) -> None:
    line = place.refusal("--draft_vocab_size", 302)
    assert_names(line, "--draft_vocab_size is 302", "between 1 and the target's vocabulary of 301")


def test_an_unknown_command_names_the_known_ones() -> None:
    assert_names(run("trian", "--max_steps", 1).refusal(), "'trian'", "train")


def test_data_and_target_are_named_together(tmp_path: Path) -> None:
    assert_names(run("--data", tmp_path / "d.jsonl").refusal(), "--data", "without --target")
    assert_names(run("--target", tmp_path).refusal(), "--target", "without --data")


YAML_FAULTS = {
    "an unknown key": (
        "training_seq_length: 64\n",
        ("'training_seq_length'", "did you mean training_seq_len"),
    ),
    "a key that is a number": ("1: 2\n", ("unknown key 1",)),
    "text for a number": ("max_steps: many\n", ("max_steps is 'many'", "type int")),
    "a truth value for a number": ("max_steps: true\n", ("max_steps is True", "type int")),
    "a fraction for a count": ("max_steps: 1.5\n", ("max_steps is 1.5", "type int")),
    "a number for a truth value": ("padding_free: 1\n", ("padding_free is 1", "type bool")),
    "a list for one value": ("target: [a, b]\n", ("target is ['a', 'b']", "type str")),
    "nothing for a needed value": ("training_seq_len: null\n", ("training_seq_len is None", "type int")),
    "an unknown choice": ("packing: tight\n", ("packing is 'tight'", "multipack, multipack_v1")),
    "a list instead of keys": ("- a\n", ("holds list", "key: value")),
    "no YAML at all": ("a: [\n", ("not YAML",)),
    "bytes that are no text": (b"\xff\xfe\x00", ("not YAML",)),
}


@pytest.mark.parametrize(("text", "parts"), YAML_FAULTS.values(), ids=YAML_FAULTS)
def test_a_bad_config_file_is_refused(place: Workplace, text: str | bytes, parts: tuple[str, ...]) -> None:
    path = place.directory / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert_names(place.refusal(config=path), path, *parts)


GOOD = rows(conversation(0))
DATA_FAULTS: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
    "an empty file": ("", ("bad.jsonl", "no rows")),
    "a file of blank lines": ("\n \n", ("bad.jsonl", "no rows")),
    "a broken line": (GOOD + '{"messages": [\n', ("bad.jsonl:2", "not valid JSON", "mend or remove")),
    "a row that is no object": (GOOD + "[1]\n", ("bad.jsonl:2", "JSON object")),
    "a conversation without assistant turn": (
        GOOD + GOOD + rows({"messages": turns("yes")}),
        ("bad.jsonl:3", "no assistant turn", "--on_bad_row skip"),
    ),
    "a conversation without turns": (GOOD + rows({"messages": []}), ("bad.jsonl:2", "empty")),
    "an unknown role": (
        rows({"messages": [{"role": "my-model", "content": "yes"}]}),
        ("bad.jsonl:1", "'my-model'", "--role_map"),
    ),
    "token ids beyond the vocabulary": (
        GOOD + rows({"input_ids": [1, 301, 2], "loss_mask": [0, 1, 1]}),
        ("bad.jsonl:2", "token id 301", "vocabulary of 301", "0..300"),
    ),
    "token ids below zero": (rows({"input_ids": [1, -1], "loss_mask": [0, 1]}), ("bad.jsonl:1", "-1")),
    "a mask of another length": (
        rows({"input_ids": [1, 2], "loss_mask": [1]}),
        ("bad.jsonl:1", "2 input_ids"),
    ),
    "no supervised token": (rows({"input_ids": [1, 2], "loss_mask": [0, 0]}), ("bad.jsonl", "supervised")),
    "only one-token answers": (
        rows({"input_ids": [1, 2], "loss_mask": [0, 1]}),
        ("bad.jsonl", "supervised row"),
    ),
    "a byte that is no text": (b'{"messages": "\xff"}\n', ("bad.jsonl:1", "not UTF-8")),
}


@pytest.mark.parametrize(("text", "parts"), DATA_FAULTS.values(), ids=DATA_FAULTS)
def test_a_bad_data_file_is_refused_and_left_as_it_is(
    place: Workplace, text: str | bytes, parts: tuple[str, ...]
) -> None:
    path = place.write_data(text)
    before = path.read_bytes()
    assert_names(place.refusal(data=path), *parts)
    assert path.read_bytes() == before


def test_a_missing_data_file_is_refused(place: Workplace) -> None:
    path = place.directory / "no.jsonl"
    assert_names(place.refusal(data=path), path, "does not exist", "--data")


def test_a_directory_for_a_data_file_is_refused(place: Workplace) -> None:
    assert_names(place.refusal(data=place.directory), place.directory, "is not a file", "--data")


def test_a_capacity_that_no_sample_fits_is_refused(place: Workplace) -> None:
    flags = ("--training_seq_len", 16, "--bucket_granularity", 16)
    for overlong in ("drop", "truncate"):
        line = place.refusal(*flags, "--overlong", overlong)
        assert_names(line, place.data, "none of 6 samples", "within 16 tokens", "raise --training_seq_len")


def test_an_overlong_sample_is_refused_on_request(place: Workplace) -> None:
    line = place.refusal("--training_seq_len", 16, "--bucket_granularity", 16, "--overlong", "error")
    assert_names(line, f"{place.data}:1", "the limit is 16", "--overlong truncate or drop")


def test_mended_data_trains_with_the_same_command(place: Workplace) -> None:
    path = place.write_data(GOOD * 4 + "{\n")
    place.refusal(data=path)
    path.write_text(GOOD * 4)
    assert place.train(data=path).code == 0


def test_faulty_rows_can_be_left_out_and_are_counted(place: Workplace) -> None:
    path = place.write_data(GOOD * 4 + "{\n")
    outcome = place.train("--on_bad_row", "skip", data=path)
    assert outcome.code == 0
    assert "1 of 5 rows refused" in outcome.out
    assert "bad.jsonl:5" in outcome.out


def test_a_shallow_target_needs_its_aux_layers_named(place: Workplace) -> None:
    shallow = write_target(place.directory / "shallow", num_hidden_layers=6)
    line = place.refusal(target=shallow)
    assert_names(line, "6 layers", "at least 7", "--aux_layer_ids")
    assert place.train("--aux_layer_ids", 0, 2, 4, target=shallow).code == 0


def test_a_tokenizer_without_chat_template_is_refused(place: Workplace) -> None:
    target = Path(shutil.copytree(place.target, place.directory / "target"))
    template = target / "chat_template.jinja"
    text = template.read_text()
    template.unlink()
    assert_names(place.refusal(target=target), "no chat template", "--chat_template")
    (place.directory / "own.jinja").write_text(text)
    assert place.train(target=target, chat_template=place.directory / "own.jinja").code == 0


def test_token_rows_need_no_chat_template(place: Workplace) -> None:
    target = Path(shutil.copytree(place.target, place.directory / "target"))
    (target / "chat_template.jinja").unlink()
    data = write_jsonl(
        place.directory / "ids.jsonl", [{"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]}] * 3
    )
    assert place.train(target=target, data=data).code == 0


def test_a_target_that_is_not_there_is_refused(place: Workplace) -> None:
    path = place.directory / "no" / "target"
    assert_names(place.refusal(target=path), path, "does not exist", "Hugging Face id")


TARGET_FAULTS = {
    "no config": (("config.json", None), "config.json"),
    "a config without model type": (("config.json", b"{}"), "model_type"),
    "a config that is no JSON": (("config.json", b"{"), "JSON"),
    "weights that are cut short": (("model.safetensors", b"\x08\0\0\0\0\0\0\0{}"), "could not be loaded"),
    "no tokenizer": (("tokenizer.json", None), "tokenizer could not be loaded"),
    "a tokenizer without contents": (("tokenizer.json", b"{}"), "tokenizer could not be loaded"),
}


@pytest.mark.parametrize(("change", "part"), TARGET_FAULTS.values(), ids=TARGET_FAULTS)
def test_a_directory_that_is_no_model_is_refused(
    place: Workplace, change: tuple[str, bytes | None], part: str
) -> None:
    target = Path(shutil.copytree(place.target, place.directory / "target"))
    name, contents = change
    (target / name).unlink()
    if contents is not None:
        (target / name).write_bytes(contents)
    assert_names(place.refusal(target=target), f"--target {target}", part)


def test_a_target_with_pickled_weights_only_is_refused_with_the_remedy(place: Workplace) -> None:
    target = Path(shutil.copytree(place.target, place.directory / "target"))
    (target / "model.safetensors").rename(target / "pytorch_model.bin")
    assert_names(place.refusal(target=target), target, "no .safetensors file", "save_pretrained")


def test_a_target_without_all_its_weights_is_refused_by_tensor(place: Workplace) -> None:
    target = Path(shutil.copytree(place.target, place.directory / "target"))
    model = AutoModelForCausalLM.from_pretrained(target)
    weights = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(target, state_dict=weights)
    assert_names(place.refusal(target=target), target, "lacks lm_head.weight")


def test_an_output_folder_in_use_is_left_alone(place: Workplace) -> None:
    assert place.train().code == 0
    before = {path.name: path.read_bytes() for path in place.output.iterdir() if path.is_file()}
    line = place.train().refusal()
    assert_names(line, place.output, "not empty", "--resume", "--overwrite", "name another")
    assert {path.name: path.read_bytes() for path in place.output.iterdir() if path.is_file()} == before


def test_overwriting_replaces_a_run_and_nothing_else(place: Workplace) -> None:
    assert place.train().code == 0
    (place.output / "notes.txt").write_text("mine")
    (place.output / "state.old").mkdir()
    assert place.train("--overwrite").code == 0
    assert (place.output / "notes.txt").read_text() == "mine"
    assert not (place.output / "state.old").exists()
    assert (place.output / "metrics.jsonl").read_text().count('"event": "start"') == 1


def test_overwriting_with_bad_data_keeps_the_old_run(place: Workplace) -> None:
    assert place.train().code == 0
    head = (place.output / "model.safetensors").read_bytes()
    place.train("--overwrite", data=place.write_data("{\n")).refusal()
    assert (place.output / "model.safetensors").read_bytes() == head
    assert (place.output / "state" / "state.json").is_file()


@pytest.mark.parametrize("flags", [(), ("--overwrite",), ("--resume",)])
def test_a_folder_that_is_no_run_is_left_alone(place: Workplace, flags: tuple[str, ...]) -> None:
    place.output.mkdir()
    (place.output / "thesis.txt").write_text("mine")
    line = place.train(*flags).refusal()
    assert_names(line, *flags, place.output, "no eagle_train run", "Name another")
    assert [path.name for path in place.output.iterdir()] == ["thesis.txt"]


def test_resuming_without_a_run_is_refused(place: Workplace) -> None:
    assert_names(place.refusal("--resume"), "--resume", place.output, "holds no run")


def test_resuming_without_state_is_refused(place: Workplace) -> None:
    assert place.train().code == 0
    shutil.rmtree(place.output / "state")
    assert_names(place.train("--resume").refusal(), "--resume", "no saved state", "--overwrite")
    line = place.train().refusal()
    assert_names(line, "is not empty; it holds no saved state", "--overwrite")
    assert "--resume" not in line


def test_an_output_that_is_a_file_or_cannot_be_made_is_refused(place: Workplace) -> None:
    line = place.train(output_dir=place.data).refusal()
    assert_names(line, f"--output_dir {place.data}", "is a file")
    line = place.train(output_dir="/proc/no/folder").refusal()
    assert_names(line, "--output_dir /proc/no/folder", "cannot be written")
