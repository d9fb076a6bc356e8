"""`python -m eagle_train plan`: what its table, its JSON and its plan file say, and what it refuses."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_train.config import PACKINGS, TrainConfig
from eagle_train.train import loop
from eagle_train.train.prepare import Prepared, prepare
from eagle_train.train.schedule import Schedule
from tests.commands import Outcome, run, write_conversations, write_jsonl

MODES = [*PACKINGS, "none, padded"]
SMALL = ("--training_seq_len", 256, "--bucket_granularity", 64)
MIXED = np.random.default_rng(0).integers(3, 250, 300)
TOKEN_ROW = {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 1, 1]}


def write_lengths(path: Path, lengths: Iterable[int]) -> Path:
    if path.suffix == ".npy":
        np.save(path, np.array(list(lengths), dtype=np.int64))
    else:
        path.write_text("".join(f"{length}\n" for length in lengths))
    return path


def planned(*flags: object) -> Outcome:
    outcome = run("plan", *flags)
    assert outcome.code == 0, outcome.err
    return outcome


def as_json(*flags: object) -> dict[str, Any]:
    """The one object on standard output."""
    return json.loads(planned(*flags, "--json").out)


def read_plan(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows_of_table(out: str) -> list[str]:
    """The packing modes in the table's order."""
    lines = out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.split()[:2] == ["packing", "steps"])
    rows = lines[first + 1 : next(i for i, line in enumerate(lines) if line.startswith("  fill:"))]
    return [row.strip().split("  ")[0] for row in rows]


def assert_sound_plan(
    lines: Sequence[dict[str, Any]], lengths: Sequence[int], world_size: int, granularity: int = 64
) -> None:
    """Each sample once, tokens as the lengths say, all ranks in each step, one bucket that holds them."""
    assert all(list(line) == ["step", "rank", "samples", "tokens", "bucket"] for line in lines)
    assert sorted(i for line in lines for i in line["samples"]) == list(range(len(lengths)))
    steps = sorted({line["step"] for line in lines})
    assert steps == list(range(len(steps)))
    assert [(line["step"], line["rank"]) for line in lines] == [
        (step, rank) for step in steps for rank in range(world_size)
    ]
    for line in lines:
        assert line["tokens"] == sum(int(lengths[i]) for i in line["samples"])
    for step in steps:
        of_step = [line for line in lines if line["step"] == step]
        (bucket,) = {line["bucket"] for line in of_step}
        assert bucket % granularity == 0
        assert bucket - granularity < max(line["tokens"] for line in of_step) <= bucket


@pytest.mark.parametrize("name", ["lengths.npy", "lengths.txt"])
def test_lengths_are_read_from_an_array_or_a_text_file(tmp_path: Path, name: str) -> None:
    path = write_lengths(tmp_path / name, MIXED)
    figures = as_json("--lengths", path, *SMALL, "--world_size", 3)
    assert figures["source"] == str(path)
    assert figures["samples"] == 300
    assert figures["tokens"] == MIXED.sum()
    assert figures["mean_length"] == pytest.approx(MIXED.mean())
    assert figures["p50_length"] == np.percentile(MIXED, 50)
    assert figures["p95_length"] == np.percentile(MIXED, 95)
    assert figures["max_length"] == MIXED.max()
    assert (figures["overlong"], figures["unsupervised_samples"]) == (0, 0)
    assert (figures["world_size"], figures["capacity"], figures["bucket_granularity"]) == (3, 256, 64)


def test_json_has_every_mode_with_figures_that_agree_with_each_other(tmp_path: Path) -> None:
    path = write_lengths(tmp_path / "lengths.npy", MIXED)
    plans = as_json("--lengths", path, *SMALL, "--world_size", 3)["plans"]
    assert list(plans) == MODES
    for name, figures in plans.items():
        assert figures["tokens"] + figures["dropped_tokens"] == MIXED.sum(), name
        assert sum(figures["shapes"].values()) == figures["num_steps"] > 0
        assert figures["fill"] == pytest.approx(figures["tokens"] / figures["slots"])
        assert figures["imbalance_tokens"] >= 1
        assert figures["imbalance_cost"] >= 1
        assert 0 < figures["utilisation"] <= 1
    assert plans["multipack"]["dropped_samples"] == 0
    assert plans["multipack"]["fill"] == max(figures["fill"] for figures in plans.values())
    assert plans["none, padded"]["fill"] == min(figures["fill"] for figures in plans.values())
    assert all("x" in shape for shape in plans["none, padded"]["shapes"])


def test_the_table_compares_every_mode_unless_packing_names_one(tmp_path: Path) -> None:
    path = write_lengths(tmp_path / "lengths.npy", MIXED)
    flags = ("--lengths", path, *SMALL)
    out = planned(*flags).out
    assert rows_of_table(out) == MODES
    assert f"300, {MIXED.sum():,} tokens" in out
    assert f"mean {MIXED.mean():,.0f}, p50 {np.percentile(MIXED, 50):,.0f}, p95 " in out
    assert f"max {MIXED.max():,} tokens" in out
    assert rows_of_table(planned(*flags, "--packing", "next_fit").out) == ["next_fit"]
    assert rows_of_table(planned(*flags, "--packing=multipack").out) == ["multipack"]
    padded = ("--packing", "none", "--padding_free", "false", "--attn_implementation", "eager")
    assert rows_of_table(planned(*flags, *padded).out) == ["none, padded"]
    assert list(as_json(*flags, "--packing", "none")["plans"]) == ["none"]


def test_the_example_of_eight_ranks_is_full_even_and_of_few_shapes(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).lognormal(6.5, 1.0, 20_000).clip(1, 8192).round().astype(int)
    path = write_lengths(tmp_path / "lengths.npy", lengths)
    flags = ("--world_size", 8, "--training_seq_len", 8192, "--bucket_granularity", 1024)
    figures = as_json("--lengths", path, *flags, "--packing", "multipack")["plans"]["multipack"]
    assert figures["tokens"] == lengths.sum()
    assert figures["fill"] >= 0.995
    assert figures["imbalance_tokens"] < 1.005
    assert figures["imbalance_cost"] < 1.01
    assert len(figures["shapes"]) <= 3
    assert all(int(shape) % 1024 == 0 and int(shape) <= 8192 for shape in figures["shapes"])


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("packing", ["multipack", "next_fit", "none"])
def test_the_plan_file_holds_each_sample_once_in_one_bucket_a_step(
    tmp_path: Path, packing: str, world_size: int
) -> None:
    path, out = write_lengths(tmp_path / "lengths.npy", MIXED), tmp_path / "plan.jsonl"
    flags = ("--lengths", path, *SMALL, "--world_size", world_size, "--packing", packing, "--out", out)
    figures = as_json(*flags)["plans"][packing]
    lines = read_plan(out)
    assert_sound_plan(lines, MIXED.tolist(), world_size)
    assert lines[-1]["step"] == figures["num_steps"] - 1
    assert sum(line["bucket"] for line in lines) == figures["slots"]


def test_the_plan_file_leaves_out_what_a_comparison_mode_drops(tmp_path: Path) -> None:
    path, out = write_lengths(tmp_path / "lengths.npy", [60] * 7), tmp_path / "plan.jsonl"
    flags = ("--lengths", path, "--training_seq_len", 64, "--world_size", 2, "--out", out)
    figures = as_json(*flags, "--packing", "multipack_v2")["plans"]["multipack_v2"]
    assert (figures["dropped_samples"], figures["dropped_tokens"]) == (1, 60)
    assert len({i for line in read_plan(out) for i in line["samples"]}) == 6


CAP = 64
EDGES = [CAP, CAP, CAP + 1, CAP - 1, 1, 1]
OVERLONG = {
    # samples, tokens; truncated samples, tokens; dropped samples, tokens
    "truncate": (6, 3 * CAP + CAP - 1 + 2, 1, 1, 0, 0),
    "drop": (5, 2 * CAP + CAP - 1 + 2, 0, 0, 1, CAP + 1),
}


@pytest.mark.parametrize("overlong", OVERLONG)
def test_u18_a_sample_at_capacity_fits_and_one_above_follows_overlong(tmp_path: Path, overlong: str) -> None:
    path, out = write_lengths(tmp_path / "lengths.txt", EDGES), tmp_path / "plan.jsonl"
    flags = ("--lengths", path, "--training_seq_len", CAP, "--overlong", overlong, "--out", out)
    figures = as_json(*flags)
    assert figures["overlong"] == 1
    keys = ("samples", "tokens", "truncated_samples", "truncated_tokens", "dropped_samples", "dropped_tokens")
    assert tuple(figures[key] for key in keys) == OVERLONG[overlong]
    lines = read_plan(out)
    kept = [0, 1, 2, 3, 4, 5] if overlong == "truncate" else [0, 1, 3, 4, 5]
    assert sorted(i for line in lines for i in line["samples"]) == kept
    for line in lines:
        assert line["tokens"] == sum(min(EDGES[i], CAP) for i in line["samples"]) <= CAP
    assert {0, 1} <= {line["samples"][0] for line in lines if len(line["samples"]) == 1}
    assert figures["plans"]["multipack"]["num_packs"] == len(kept) - 1, "only a 1 shares a row"
    shown = planned(*flags).out
    truncated, dropped = OVERLONG[overlong][2:4], OVERLONG[overlong][4:]
    assert f"truncated  {truncated[0]} samples, {truncated[1]} tokens lost" in shown
    assert f"dropped    {dropped[0]} samples, {dropped[1]} tokens, by --overlong" in shown


def test_u18_an_overlong_sample_is_refused_on_request(tmp_path: Path) -> None:
    path = write_lengths(tmp_path / "lengths.txt", EDGES)
    line = run("plan", "--lengths", path, "--training_seq_len", CAP, "--overlong", "error").refusal()
    for part in ("sample 2", "65 tokens", "the limit is 64", "--training_seq_len", "truncate or drop"):
        assert part in line, line


PACKS = {8192: 1502, 9216: 1474, 16384: 793, 17408: 740}  # of best-fit-decreasing


@pytest.mark.parametrize("capacity", PACKS)
def test_u18_packing_works_at_every_capacity(tmp_path: Path, capacity: int) -> None:
    lengths = np.random.default_rng(0).normal(4096, 512, 3000).round().clip(100, 8192).astype(int)
    path, out = write_lengths(tmp_path / "lengths.npy", lengths), tmp_path / "plan.jsonl"
    flags = ("--training_seq_len", capacity, "--bucket_granularity", 1024, "--packing", "multipack")
    figures = as_json("--lengths", path, *flags, "--out", out)
    assert figures["overlong"] == 0
    assert figures["plans"]["multipack"]["num_packs"] <= 1.01 * PACKS[capacity]
    lines = read_plan(out)
    assert_sound_plan(lines, lengths.tolist(), 1, 1024)
    assert max(line["tokens"] for line in lines) <= capacity


@pytest.mark.parametrize("packing", ["multipack", "next_fit", "none"])
@pytest.mark.parametrize(
    ("lengths", "world_size"),
    [([5], 1), ([5], 4), ([50, 20, 9], 4), ([4000, 2, 2, 2, 2, 2, 2], 3)],
    ids=["1 sample", "1 sample on 4 ranks", "3 samples on 4 ranks", "1 long and 6 short on 3 ranks"],
)
def test_u19_the_smallest_sets_are_planned_on_any_number_of_ranks(
    tmp_path: Path, lengths: list[int], world_size: int, packing: str
) -> None:
    path, out = write_lengths(tmp_path / "lengths.txt", lengths), tmp_path / "plan.jsonl"
    flags = ("--lengths", path, "--world_size", world_size, "--bucket_granularity", 64, "--packing", packing)
    assert as_json(*flags, "--out", out)["plans"][packing]["num_steps"] >= 1
    assert_sound_plan(read_plan(out), lengths, world_size)


def test_u19_a_mode_that_drops_everything_is_a_line_and_no_error(tmp_path: Path) -> None:
    path = write_lengths(tmp_path / "lengths.txt", [50, 20, 9])
    plans = as_json("--lengths", path, *SMALL, "--world_size", 4)["plans"]
    assert list(plans) == MODES
    for name in ("multipack_v1", "multipack_v2"):
        empty = plans[name]
        assert (empty["num_steps"], empty["tokens"], empty["fill"], empty["shapes"]) == (0, 0, 0.0, {})
        assert (empty["dropped_samples"], empty["dropped_tokens"]) == (3, 79)


def test_u19_no_sample_left_is_refused(tmp_path: Path) -> None:
    path = write_lengths(tmp_path / "lengths.txt", [100, 200])
    line = run("plan", "--lengths", path, "--training_seq_len", 64, "--overlong", "drop").refusal()
    assert str(path) in line
    assert "no sample is left" in line
    assert "--training_seq_len" in line
    data = write_jsonl(tmp_path / "ids.jsonl", [TOKEN_ROW])
    flags = ("--training_seq_len", 4, "--bucket_granularity", 4, "--overlong", "drop")
    assert "none of 1 samples" in run("plan", "--data", data, *flags).refusal()


def test_pre_tokenised_rows_are_planned_without_a_target(tmp_path: Path) -> None:
    large = {"input_ids": [5, 2_000_000, 7], "loss_mask": [0, 1, 1]}
    data = write_jsonl(tmp_path / "ids.jsonl", [*[TOKEN_ROW] * 6, large])
    figures = as_json("--data", data, "--eval_fraction", 0)
    assert figures["source"] == str(data)
    assert (figures["samples"], figures["tokens"]) == (7, 33)


def test_conversations_without_a_target_are_refused_with_the_remedy(tmp_path: Path) -> None:
    data = write_conversations(tmp_path / "data.jsonl", 3)
    line = run("plan", "--data", data).refusal()
    assert f"{data}:1" in line
    assert "--target" in line
    mixed = write_jsonl(tmp_path / "mixed.jsonl", [TOKEN_ROW, *map(json.loads, data.open())])
    assert f"{mixed}:2" in run("plan", "--data", mixed).refusal()
    assert as_json("--data", mixed, "--max_samples", 1, "--eval_fraction", 0)["samples"] == 1
    evaluation = write_jsonl(tmp_path / "ids.jsonl", [TOKEN_ROW])
    assert f"{data}:1" in run("plan", "--data", evaluation, "--eval_data", data).refusal()


def small_run(data: Path, target_dir: Path, output: Path) -> dict[str, Any]:
    """Options under which training and planning are compared: some samples are cut."""
    return {
        "target": target_dir,
        "data": data,
        "output_dir": output,
        "training_seq_len": 64,
        "bucket_granularity": 16,
        "ttt_steps": 2,
        "seed": 3,
    }


def words(options: dict[str, Any]) -> list[Any]:
    return [word for name, value in options.items() for word in (f"--{name}", value)]


@pytest.mark.parametrize("packing", ["multipack", "multipack_v1", "none"])
def test_the_plan_of_a_data_file_is_what_training_sees(
    tmp_path: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch, packing: str
) -> None:
    data, out = write_conversations(tmp_path / "data.jsonl", 20), tmp_path / "plan.jsonl"
    form = {"packing": packing} | ({"batch_size": 3} if packing == "none" else {})
    options = words(small_run(data, target_dir, tmp_path / "run") | form)
    figures = as_json(*options, "--out", out)
    assert figures["samples"] == 19, "one is held out"
    assert figures["truncated_samples"] > 0
    seen: list[tuple[list[str], int, int]] = []
    kept: list[Prepared] = []
    train_step = loop.train_step

    def watch(run: loop.Run, window: Any) -> Any:
        seen.extend((list(batch.sources), batch.num_tokens, batch.bucket_len) for batch in window)
        kept.append(run.prepared)
        return train_step(run, window)

    monkeypatch.setattr(loop, "train_step", watch)
    trained = run(*options, "--dtype", "float32", "--num_threads", 1, "--eval_every", 1000)
    assert trained.code == 0, trained.err
    samples = kept[0].data.train_samples
    lines = read_plan(out)
    assert [line["rank"] for line in lines] == [0] * len(lines)
    assert seen == [
        ([samples[i].source for i in line["samples"]], line["tokens"], line["bucket"]) for line in lines
    ]


def test_the_plan_file_is_the_schedule_of_the_run_s_own_config(tmp_path: Path, target_dir: Path) -> None:
    data, out = write_conversations(tmp_path / "data.jsonl", 20), tmp_path / "plan.jsonl"
    options = small_run(data, target_dir, tmp_path / "run") | {"tokens_per_step": 192}
    as_json(*words(options), "--out", out)
    named = options | {"target": str(target_dir), "data": (str(data),), "dtype": "float32"}
    config = TrainConfig(**named)
    schedule = Schedule(prepare(config).data.train_lengths, config, world_size=1)
    assert schedule.geometry.accumulation_steps == 3
    epoch = schedule.plan()
    assert [(line["samples"], line["bucket"]) for line in read_plan(out)] == [
        (epoch.pack(step, 0), epoch.bucket_lens[step]) for step in range(epoch.num_steps)
    ]


def test_mock_data_are_planned_within_the_positions_of_the_target_that_training_would_use(
    target_dir: Path,
) -> None:
    flags = ("--mock_data", "--mock_len", "uniform:10:3000", "--mock_num_samples", 50)
    figures = as_json(*flags, "--mock_target", "64,8,512")
    assert (figures["source"], figures["samples"], figures["truncated_samples"]) == ("mock data", 50, 0)
    assert 2048 < figures["max_length"] <= 3000
    assert as_json(*flags)["max_length"] == 2048, "the demo's target"
    limited = as_json(*flags, "--target", target_dir)
    assert limited["max_length"] == 512
    assert limited["truncated_samples"] == limited["overlong"] > 0


def test_max_samples_limits_mock_data_too() -> None:
    flags = ("--mock_data", "--mock_len", "uniform:10:90", "--mock_target", "64,8,512")
    few, many = (as_json(*flags, "--max_samples", count) for count in (7, 5000))
    assert (few["samples"], many["samples"]) == (7, 1000)


def test_without_flags_the_bundled_demo_is_planned_under_its_own_options() -> None:
    figures = as_json("--max_samples", 40, "--max_eval_samples", 2)
    assert (figures["source"], figures["samples"]) == ("the bundled demo", 40)
    assert figures["capacity"] == 1024, "the demo's --tokens_per_row"


def test_the_global_batch_is_translated(tmp_path: Path) -> None:
    path = write_lengths(tmp_path / "lengths.npy", MIXED)
    flags = ("--lengths", path, *SMALL, "--world_size", 2, "--tokens_per_step", 2048)
    line = next(line for line in planned(*flags).out.splitlines() if line.startswith("  global batch"))
    assert "--tokens_per_step 2,048 -> 256 slots x 2 ranks x 4 micro-batches = 2,048 slots" in line
    assert as_json(*flags)["accumulation_steps"] == 4


def test_options_may_come_from_a_config_file(tmp_path: Path) -> None:
    path, config = write_lengths(tmp_path / "lengths.npy", MIXED), tmp_path / "plan.yaml"
    config.write_text(f"lengths: {path}\nworld_size: 2\ntraining_seq_len: 256\nbucket_granularity: 64\n")
    by_flags = as_json("--lengths", path, *SMALL, "--world_size", 2)
    assert as_json("--config", config) == by_flags
    assert as_json("--config", config, "--world_size", 3)["world_size"] == 3


FAULTS = {
    "a file that is not there": ("--lengths no.npy", ("--lengths", "no.npy", "no file")),
    "no rank": ("--lengths {lengths} --world_size 0", ("--world_size is 0", "between 1 and")),
    "a folder that is not there": (
        "--lengths {lengths} --out no/plan.jsonl",
        ("--out 'no/plan.jsonl'", "directory that exists", "name one"),
    ),
    "a misspelt flag": ("--lengths {lengths} --worldsize 2", ("--worldsize", "did you mean --world_size")),
    "a shortened flag": ("--length {lengths}", ("unknown flag --length", "did you mean --lengths")),
    "a flag that nobody has": ("--zzz 1", ("unknown flag --zzz", "plan --help")),
    "a misspelt training flag": ("--training_seqlen 8", ("did you mean --training_seq_len",)),
    "a word for a number": ("--lengths {lengths} --world_size two", ("--world_size", "'two'")),
    "a length of nothing": ("--lengths {zero}", ("zero.txt", "length 0", "entry 2")),
    "a line that is no number": ("--lengths {words}", ("words.txt:2", "'many'", "whole number")),
    "an empty file": ("--lengths {empty}", ("empty.txt", "holds no length")),
    "fractions": ("--lengths {fractions}", ("fractions.npy", "whole numbers")),
    "lengths and data": ("--lengths {lengths} --data d.jsonl", ("--lengths", "drop --data")),
    "lengths and mock data": ("--lengths {lengths} --mock_data", ("--lengths", "--mock_data")),
    "lengths and a target": ("--lengths {lengths} --target t", ("--lengths", "--target")),
    "data that are not there": ("--data no.jsonl", ("no.jsonl does not exist", "--data")),
    "a target that is not there": ("--mock_data --target ./no", ("--target ./no", "does not exist")),
    "a target without data": ("--target {target}", ("--target", "without --data")),
    "a capacity between buckets": (
        "--lengths {lengths} --training_seq_len 100 --bucket_granularity 64",
        ("--training_seq_len 100", "use 64 or 128"),
    ),
}


@pytest.mark.parametrize(("flags", "parts"), FAULTS.values(), ids=FAULTS)
def test_bad_input_is_one_line_that_names_it(
    tmp_path: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch, flags: str, parts: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "lengths": write_lengths(tmp_path / "lengths.txt", [5, 6]),
        "zero": write_lengths(tmp_path / "zero.txt", [5, 0]),
        "words": tmp_path / "words.txt",
        "empty": tmp_path / "empty.txt",
        "fractions": tmp_path / "fractions.npy",
    }
    files["words"].write_text("5\nmany\n")
    files["empty"].write_text("")
    np.save(files["fractions"], np.array([1.5]))
    line = run("plan", *flags.format(target=target_dir, **files).split()).refusal()
    for part in parts:
        assert part in line, line


def test_a_plan_file_that_is_refused_leaves_the_old_one(tmp_path: Path) -> None:
    out = tmp_path / "plan.jsonl"
    out.write_text("old\n")
    path = write_lengths(tmp_path / "lengths.txt", EDGES)
    run("plan", "--lengths", path, "--training_seq_len", 64, "--overlong", "error", "--out", out).refusal()
    assert out.read_text() == "old\n"


def test_training_refuses_the_flags_of_a_plan(tmp_path: Path) -> None:
    path = write_lengths(tmp_path / "lengths.txt", [5])
    assert "unknown flag --lengths" in run("train", "--lengths", path).refusal()
