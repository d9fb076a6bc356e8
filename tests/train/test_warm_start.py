"""--init_from: a run starts from a trained head bit for bit; rows of its vocabulary move by token (U28)."""

import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from eagle_train.export.write import export_draft_head
from eagle_train.model.checkpoint import load_draft_head
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.target import load_target
from eagle_train.train import loop
from tests.commands import Outcome, read_events, run, write_conversations
from tests.data.templates import make_tokenizer
from tests.export.heads import assert_same_weights, change_config, change_tensors, command, copy_of
from tests.tiny import swap_tokens, tiny_model, write_target

OPTIONS = {
    "training_seq_len": 256,
    "bucket_granularity": 64,
    "ttt_steps": 3,
    "dtype": "float32",
    "num_threads": 1,
    "learning_rate": 1e-2,
    "eval_every": 100,
}
WITHOUT_STEPS = {"max_steps": 1, "learning_rate": 1e-30}
V, V_D, STEPS = 301, 200, 10


@dataclass(frozen=True)
class Place:
    """A directory with data for the tiny target, and `trained`: a head of a few steps on these data, by which
    it is also validated.
    """

    directory: Path
    target: Path
    data: Path

    @property
    def trained(self) -> Path:
        return self.directory / "trained"

    def words(self, output: Path, **options: object) -> list[str]:
        named: dict[str, Any] = {"target": self.target, "data": self.data, "eval_data": self.data}
        named |= OPTIONS | {"output_dir": output} | options
        return [str(word) for name, value in named.items() for word in (f"--{name}", value)]

    def train(self, output: Path, *flags: object, **options: object) -> Outcome:
        return run(*self.words(output, **options), *flags)

    def started(self, output: Path, *flags: object, **options: object) -> Outcome:
        """A run whose steps move no float32 weight by a bit, so that it ends with the head that it had."""
        outcome = self.train(output, *flags, **(WITHOUT_STEPS | options))
        assert outcome.code == 0, outcome.err
        return outcome

    def refusal(self, output: Path, *flags: object, **options: object) -> str:
        line = self.train(output, *flags, **(WITHOUT_STEPS | options)).refusal()
        assert not output.exists()
        return line


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Place:
    directory = tmp_path_factory.mktemp("warm")
    data = write_conversations(directory / "data.jsonl", 12)
    place = Place(directory, target_dir, data)
    outcome = place.train(place.trained, max_steps=STEPS, draft_vocab_size=V_D)
    assert outcome.code == 0, outcome.err
    assert read_events(place.trained, "end")[0]["best_step"] == STEPS
    return place


def rows_by_token(head: Eagle3DraftHead) -> dict[int, torch.Tensor]:
    return dict(zip(head.draft_token_ids.tolist(), head.lm_head.weight, strict=True))


def digest_of(head: Path) -> str:
    return hashlib.sha256((head / "model.safetensors").read_bytes()).hexdigest()[:12]


def notes_of(outcome: Outcome) -> list[str]:
    """Without those about the data, which validate on what they train on and are not the target's own."""
    notes = [line for line in outcome.out.splitlines() if line.startswith("  note: ")]
    return [note for note in notes if not re.search("samples are also in training|own arg-max", note)]


def relabelled(directory: Path, to: Path, ids: torch.Tensor) -> Path:
    """A copy whose rows stand for other tokens."""
    copy_of(directory, to)
    t2d = torch.zeros(load_draft_head(to).config.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    change_tensors(to, lambda tensors: tensors | {"d2t": ids - torch.arange(len(ids)), "t2d": t2d})
    return to


def validation(output: Path, step: int) -> dict[str, Any]:
    (event,) = [e for e in read_events(output, "validation") if e["step"] == step]
    return {key: value for key, value in event.items() if key.startswith("eval_")}


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return [number for item in items for number in numbers(item)]
    return [value] if isinstance(value, int | float) else []


def test_a_head_starts_bit_for_bit_and_validates_as_it_did_when_it_was_saved(
    place: Place, tmp_path: Path
) -> None:
    outcome = place.started(tmp_path / "out", init_from=place.trained)
    assert_same_weights(load_draft_head(tmp_path / "out"), load_draft_head(place.trained))
    assert f"starts from          {place.trained} (official layout); {V_D} rows" in outcome.out
    assert f"{V_D} rows of the draft vocabulary kept, 0 new\n" in outcome.out
    first, kept = validation(tmp_path / "out", 0), validation(place.trained, STEPS)
    assert first.keys() == kept.keys()
    assert numbers(first) == pytest.approx(numbers(kept), rel=1e-6)
    assert numbers(kept) != pytest.approx(numbers(validation(place.trained, 0)), rel=1e-2)
    (start,) = read_events(tmp_path / "out", "start")
    assert start["warm_start"] == {
        "init_from": str(place.trained), "weights_sha256": digest_of(place.trained), "rows_kept": V_D,
        "rows_new": 0, "rows_dropped": 0,
    }  # fmt: skip
    options = yaml.safe_load((tmp_path / "out" / "run_config.yaml").read_text())
    assert (options["init_from"], options["draft_vocab_size"]) == (str(place.trained), None)
    shown = f"`--init_from {place.trained}` (sha256 of its weights: {digest_of(place.trained)}...)"
    assert shown in (tmp_path / "out" / "README.md").read_text()
    assert notes_of(outcome) == []


def test_its_record_repeats_the_run_under_the_same_vocabulary(place: Place, tmp_path: Path) -> None:
    other = write_conversations(tmp_path / "other.jsonl", 3)
    place.started(tmp_path / "out", init_from=place.trained, data=other)
    outcome = run("--config", tmp_path / "out" / "run_config.yaml", "--output_dir", tmp_path / "again")
    assert outcome.code == 0, outcome.err
    assert_same_weights(load_draft_head(tmp_path / "again"), load_draft_head(place.trained))


@pytest.mark.parametrize("size", [150, 250])
def test_another_vocabulary_moves_rows_by_token(place: Place, tmp_path: Path, size: int) -> None:
    head = relabelled(place.trained, tmp_path / "head", torch.arange(V - V_D, V))
    outcome = place.started(tmp_path / "out", init_from=head, draft_vocab_size=size)
    before, after = load_draft_head(head), load_draft_head(tmp_path / "out")
    old, new = rows_by_token(before), rows_by_token(after)
    kept = old.keys() & new.keys()
    assert len(new) == size
    assert 0 < len(kept) < len(new)
    assert all(torch.equal(new[token], old[token]) for token in kept)
    target = load_target(str(place.target), dtype=torch.float32, device=torch.device("cpu"))
    assert all(torch.equal(new[token], target.lm_head.weight[token]) for token in new.keys() - kept)
    for name, tensor in before.state_dict().items():
        if name not in ("lm_head.weight", "d2t", "t2d"):
            assert torch.equal(after.state_dict()[name], tensor), name
    counted = f"{len(kept)} rows of the draft vocabulary kept, {size - len(kept)} new (they start as the "
    assert f"{counted}target's), {V_D - len(kept)} dropped" in outcome.out
    (note,) = notes_of(outcome)
    assert f"--draft_vocab_size {size} chose a vocabulary from these data" in note
    assert "--draft_vocab_size none keeps the head's own" in note


def test_the_size_in_the_record_of_the_head_itself_chooses_anew_and_is_told(
    place: Place, tmp_path: Path
) -> None:
    other = write_conversations(tmp_path / "other.jsonl", 3)
    words = ("--config", place.trained / "run_config.yaml", "--init_from", place.trained, "--data", other)
    steps = [word for name, value in WITHOUT_STEPS.items() for word in (f"--{name}", value)]
    outcome = run(*words, *steps, "--output_dir", tmp_path / "anew")
    assert outcome.code == 0, outcome.err
    assert any(f"--draft_vocab_size {V_D} chose" in note for note in notes_of(outcome))
    outcome = run(*words, *steps, "--output_dir", tmp_path / "own", "--draft_vocab_size", "none")
    assert outcome.code == 0, outcome.err
    assert not any("--draft_vocab_size" in note for note in notes_of(outcome))
    assert_same_weights(load_draft_head(tmp_path / "own"), load_draft_head(place.trained))


def test_under_bf16_the_masters_are_the_head_and_the_kept_one_is_rounded(
    place: Place, tmp_path: Path
) -> None:
    place.started(tmp_path / "out", init_from=place.trained, dtype="bfloat16")
    own = load_file(place.trained / "model.safetensors")
    masters = load_file(tmp_path / "out" / "state" / "weights.safetensors")
    kept = load_file(tmp_path / "out" / "model.safetensors")
    assert own.keys() == masters.keys() == kept.keys()
    for name, tensor in own.items():
        assert torch.equal(masters[name], tensor), name
        rounded = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(kept[name], rounded), name
    first, before = validation(tmp_path / "out", 0), validation(place.trained, STEPS)
    assert numbers(first["eval_acceptance_length"]) == pytest.approx(
        numbers(before["eval_acceptance_length"]), rel=0.05
    )


def test_a_vocabulary_without_closing_tokens_is_told_with_the_remedy(place: Place, tmp_path: Path) -> None:
    closing = make_tokenizer(None).convert_tokens_to_ids("<|im_end|>")
    ids = torch.tensor([token for token in range(V) if token != closing][-V_D:])
    head = relabelled(place.trained, tmp_path / "head", ids)
    outcome = place.started(tmp_path / "out", init_from=head)
    assert load_draft_head(tmp_path / "out").draft_token_ids.tolist() == ids.tolist()
    (note,) = notes_of(outcome)
    assert f"the draft vocabulary of {head} lacks 1 special or closing tokens" in note
    assert "(<|im_end|>)" in note
    assert "--draft_vocab_size N" in note


def test_unsorted_rows_are_put_in_order_with_their_tokens(place: Place, tmp_path: Path) -> None:
    head = copy_of(place.trained, tmp_path / "head")
    ids = load_draft_head(head).draft_token_ids.flip(0)
    flipped = load_file(head / "model.safetensors")["lm_head.weight"].flip(0).contiguous()
    maps = {"d2t": ids - torch.arange(V_D), "lm_head.weight": flipped}
    change_tensors(head, lambda tensors: tensors | maps)
    place.started(tmp_path / "out", init_from=head)
    assert_same_weights(load_draft_head(tmp_path / "out"), load_draft_head(place.trained))


def test_a_whole_vocabulary_in_the_speculators_layout(place: Place, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    place.started(whole, init_from=place.trained, draft_vocab_size=V)
    assert "d2t" not in load_file(whole / "model.safetensors")
    export_draft_head(str(whole), "speculators", str(tmp_path / "exported"), str(place.target))
    outcome = place.started(tmp_path / "out", init_from=tmp_path / "exported")
    assert notes_of(outcome) == []  # the embedding that it brings is the target's
    assert f"(speculators layout); {V} rows of the draft vocabulary kept, 0 new" in outcome.out
    assert_same_weights(load_draft_head(tmp_path / "out"), load_draft_head(whole))


def test_another_embedding_is_told(place: Place, tmp_path: Path) -> None:
    head = copy_of(place.trained, tmp_path / "head")
    change_tensors(head, lambda tensors: tensors | {"embed_tokens.weight": torch.ones(V, 32)})
    outcome = place.started(tmp_path / "out", init_from=head)
    assert f"note: {head} has an embed_tokens.weight of its own that is not the target's" in outcome.out


def test_a_head_of_another_rotary_base_keeps_it(place: Place, tmp_path: Path) -> None:
    other = copy_of(place.trained, tmp_path / "other")
    change_config(other, rope_theta=500_000.0)
    outcome = place.train(tmp_path / "out", init_from=other, max_steps=1)
    assert outcome.code == 0, outcome.err
    assert f"note: {other} rotates by a base of 500,000, the target by 10,000" in outcome.out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_theta"] == 500_000.0


def test_the_head_keeps_its_own_sizes_and_takes_the_target_s_position_limit(
    place: Place, tmp_path: Path
) -> None:
    narrow = tmp_path / "narrow"
    place.started(narrow, "--aux_layer_ids", 1, 4, 6, draft_intermediate_size=40)
    change_config(narrow, max_position_embeddings=100, rms_norm_eps=1e-3)
    place.started(tmp_path / "out", init_from=narrow)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["intermediate_size"], config["rms_norm_eps"]) == (40, 1e-3)
    assert config["max_position_embeddings"] == 512
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 4, 6]
    assert_same_weights(load_draft_head(tmp_path / "out"), load_draft_head(narrow))


MISMATCHES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "layers that the target lacks": (
        {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]},
        {},
        ("aux layers [2, 4, 9] lie outside the target's 8 layers",),
    ),
    "layers out of order": (
        {"eagle_aux_hidden_state_layer_ids": [4, 2, 5]},
        {},
        ("--init_from", "aux layers [4, 2, 5] do not rise"),
    ),
    "other layers than asked for": (
        {},
        {"aux_layer_ids": "1 4 5"},
        ("--aux_layer_ids is 1 4 5, but the head in --init_from", "has 2 4 5; drop --aux_layer_ids"),
    ),
    "other layers than its run was trained on": (
        {"eagle_aux_hidden_state_layer_ids": [1, 4, 5]},
        {},
        (
            "the head was trained on aux layers 2 4 5, as ",
            "run_config.yaml says, and here 1 4 5 would be read",
        ),
    ),
    "another width than asked for": (
        {},
        {"draft_intermediate_size": 64},
        ("--draft_intermediate_size is 64, but the head in --init_from", "has 48; drop"),
    ),
    "a layer that we do not have": (
        {"attention_bias": True},
        {},
        ("--init_from: ", "attention_bias is true"),
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_head_that_does_not_fit_is_refused_in_one_line(place: Place, tmp_path: Path, name: str) -> None:
    config, options, parts = MISMATCHES[name]
    head = copy_of(place.trained, tmp_path / "head")
    change_config(head, **config)
    flags = [word for key, value in options.items() for word in (f"--{key}", *str(value).split())]
    line = place.refusal(tmp_path / "out", *flags, init_from=head)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"hidden_size": 64}, "the head reads states of hidden size 32, the target's are 64"),
        ({"vocab_size": 320}, "vocab_size is 301, the target's 320"),
    ],
)
def test_another_target_is_refused(place: Place, tmp_path: Path, changes: dict[str, int], part: str) -> None:
    target = copy_of(place.target, tmp_path / "target")
    tiny_model(**({"vocab_size": V} | changes)).save_pretrained(target)
    assert part in place.refusal(tmp_path / "out", init_from=place.trained, target=target)


def test_a_directory_without_a_head_and_the_output_itself_are_refused(place: Place, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    line = place.refusal(tmp_path / "out", init_from=tmp_path / "empty")
    assert f"--init_from: {tmp_path / 'empty' / 'config.json'} does not exist" in line
    file = place.trained / "model.safetensors"
    for named, remedy in ((file, "name its directory"), ("yuhuili/EAGLE3-x", "is downloaded first")):
        line = place.refusal(tmp_path / "out", init_from=named)
        assert f"--init_from {named} is no directory here; it must be a local directory that holds" in line
        assert remedy in line
    for flags in ((), ("--overwrite",)):
        before = (place.trained / "model.safetensors").read_bytes()
        line = place.train(place.trained, *flags, init_from=f"{place.trained}/../trained").refusal()
        assert "is --output_dir itself; use --resume" in line
        assert (place.trained / "model.safetensors").read_bytes() == before


def test_a_target_with_another_tokenizer_is_refused(place: Place, tmp_path: Path) -> None:
    target = copy_of(place.target, tmp_path / "target")
    swap_tokens(target / "tokenizer.json")
    line = place.refusal(tmp_path / "out", init_from=place.trained, target=target)
    assert (
        f"--init_from {place.trained} was trained with the tokenizer of {place.target}, and {target}" in line
    )
    assert "tokens not or under another id" in line


def test_a_target_of_another_depth_is_refused_wherever_a_head_meets_it(place: Place, tmp_path: Path) -> None:
    """The config of the head names no layers, because they were the default of its own target."""
    deep = write_target(tmp_path / "deep", num_hidden_layers=12)
    fault = "the head was trained on aux layers 2 4 5, as "
    read = "run_config.yaml says, and here 2 6 9 would be read"
    line = place.refusal(tmp_path / "out", init_from=place.trained, target=deep)
    assert fault in line
    assert read in line
    checked = command("check", place.trained, "--target", deep)
    assert checked.code == 1
    assert f"fault: {fault}" in checked.out
    assert command("check", place.trained, "--target", place.target).code == 0
    words = ("export", "--draft", place.trained, "--to", "vllm", "--out", tmp_path / "exported")
    assert read in command(*words, "--target", deep).refusal()
    words = ("measure", "--draft", place.trained, "--target", deep, "--prompts", place.data)
    assert read in run(*words, "--max_prompts", 1, "--dtype", "float32").refusal()


def test_another_target_of_the_same_sizes_is_told(place: Place, tmp_path: Path) -> None:
    sibling = copy_of(place.target, tmp_path / "sibling")
    (note,) = notes_of(place.started(tmp_path / "out", init_from=place.trained, target=sibling))
    assert f"{place.trained} was trained for {place.target}, not for {sibling}" in note
    same = f"{place.target}/../{place.target.name}"
    assert notes_of(place.started(tmp_path / "same", init_from=place.trained, target=same)) == []


@pytest.mark.parametrize(
    "record", [{"model": "x", "target": 5, "aux_layer_ids": [9]}, {"aux_layer_ids": [0, 1, 2]}, [1], "text"]
)
def test_the_record_of_another_program_stops_nothing(place: Place, tmp_path: Path, record: Any) -> None:
    head = copy_of(place.trained, tmp_path / "head")
    (head / "run_config.yaml").write_text(yaml.safe_dump(record))
    assert notes_of(place.started(tmp_path / "out", init_from=head)) == []


def test_a_record_that_cannot_be_read_is_named(place: Place, tmp_path: Path) -> None:
    head = copy_of(place.trained, tmp_path / "head")
    (head / "run_config.yaml").write_text("target: [")
    line = place.refusal(tmp_path / "out", init_from=head)
    assert f"--init_from: {head / 'run_config.yaml'} cannot be read" in line


def test_a_home_directory_is_expanded(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(place.directory))
    outcome = place.started(tmp_path / "out", init_from="~/trained/")
    assert f"starts from          {place.trained} (official layout)" in outcome.out


@pytest.mark.parametrize("size", [None, 220])
def test_a_resumed_run_goes_on_from_its_state_and_not_from_the_head(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int | None
) -> None:
    head, cut, straight = copy_of(place.trained, tmp_path / "head"), tmp_path / "cut", tmp_path / "straight"
    options: dict[str, Any] = {"max_steps": 4, "eval_every": 2, "draft_vocab_size": size or "none"}
    outcome = place.train(straight, init_from=head, **options)
    assert outcome.code == 0, outcome.err
    train_step = loop.train_step

    def stop(run: loop.Run, window: Any) -> Any:
        if run.state.step == 2:
            raise KeyboardInterrupt
        return train_step(run, window)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", stop)
        assert place.train(cut, init_from=head, **options).code == 130
    digest = digest_of(head)
    shutil.rmtree(head)
    lost = json.loads((cut / "state" / "state.json").read_text())["best_step"]
    # The state is enough, as for a run that starts fresh.
    for name in ("config.json", "model.safetensors"):
        (cut / name).unlink()
    line = place.train(cut, "--resume", init_from=tmp_path / "other", **options).refusal()
    assert f"--init_from {head} -> {tmp_path / 'other'}" in line
    outcome = place.train(cut, "--resume", init_from=f"{head}/", **options)
    assert outcome.code == 0, outcome.err
    starts = [event["warm_start"]["weights_sha256"] for event in read_events(cut, "start")]
    assert starts == [digest, digest]
    assert f"`--init_from {head}` (sha256 of its weights: {digest}...)" in (cut / "README.md").read_text()
    assert f"starts from          {head}; the run goes on from its saved state" in outcome.out
    assert f"note: the head of step {lost} is no longer in {cut}; a later one is kept" in outcome.out
    assert (cut / "model.safetensors").is_file()
    for name in ("weights.safetensors", "optimizer.safetensors"):
        assert (cut / "state" / name).read_bytes() == (straight / "state" / name).read_bytes()
    saved = yaml.safe_load((cut / "run_config.yaml").read_text())
    assert (saved["init_from"], saved["draft_vocab_size"]) == (str(head), size)


def test_a_state_of_an_earlier_version_goes_on_by_the_kept_head(place: Place, tmp_path: Path) -> None:
    place.started(tmp_path / "out", init_from=place.trained)
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / "out" / "state" / name).unlink()
    place.started(tmp_path / "out", "--resume", init_from=place.trained, max_steps=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_training_that_only_worsens_its_start_says_so_and_keeps_it(
    place: Place, tmp_path: Path, dtype: str
) -> None:
    options = {"init_from": place.trained, "dtype": dtype, "learning_rate": 10.0, "max_steps": 2}
    outcome = place.train(tmp_path / "out", eval_every=1, **options)
    assert outcome.code == 0, outcome.err
    assert read_events(tmp_path / "out", "end")[0]["best_step"] == 0
    kept, start = load_draft_head(tmp_path / "out"), load_draft_head(place.trained)
    if dtype == "bfloat16":
        start.to(torch.bfloat16).float()
    assert_same_weights(kept, start)
    said = "(no step improved on the head that training started from; this is that head"
    rounded = ", rounded to bfloat16" if dtype == "bfloat16" else ""
    assert f"{tmp_path / 'out'} {said}{rounded})\n" in outcome.out
    (length,) = {e["eval_acceptance_length"]["3"] for e in read_events(tmp_path / "out", "validation")[:1]}
    assert f"{length:.2f} before, {length:.2f} after" in outcome.out
    card = (tmp_path / "out" / "README.md").read_text()
    assert "No step improved on the head that training started from; this is that head." in card


def test_a_step_that_improves_is_named(place: Place, tmp_path: Path) -> None:
    place.started(tmp_path / "untrained")
    outcome = place.train(tmp_path / "out", init_from=tmp_path / "untrained", max_steps=STEPS)
    assert outcome.code == 0, outcome.err
    assert f"{tmp_path / 'out'} (of step {STEPS})\n" in outcome.out
    assert "No step improved" not in (tmp_path / "out" / "README.md").read_text()


def test_a_vocabulary_that_the_target_never_uses_is_told_once(place: Place, tmp_path: Path) -> None:
    """The loss is 0 then, as if all were learned."""
    target = copy_of(place.target, tmp_path / "target")
    own = load_draft_head(place.trained).t2d

    def lift(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors | {"lm_head.weight": tensors["lm_head.weight"] * torch.where(own, 1.0, 1e3)[:, None]}

    change_tensors(target, lift)
    outcome = place.started(tmp_path / "out", init_from=place.trained, target=target, max_steps=2)
    assert {values["loss"] for values in read_events(tmp_path / "out", "train")} == {0}
    (note,) = re.findall(r"^note: (.*)$", outcome.out, re.MULTILINE)
    assert "arg-max lies in the draft vocabulary in none of" in note
    assert "--draft_vocab_size" in note
