"""Real tokens per CPU-second of one optimizer step, beside NVIDIA Model-Optimizer or vLLM's speculators.

    python scripts/bench_rivals.py --rival modelopt --rival_python V/bin/python --random_llama 256,8,1024
    python scripts/bench_rivals.py --rival speculators --rival_python V/bin/python --ttt_steps 3

The rivals are no dependencies. An environment for each:

    python3 -m venv V && V/bin/pip install torch==2.13.0          # a CPU build is enough
  modelopt
    V/bin/pip install nvidia-modelopt==0.47.0 accelerate omegaconf datasets requests peft \\
        "transformers>=5,<5.13"
  speculators
    V/bin/pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0
    V/bin/pip install "transformers>=5,<=5.19" "datasets<=5.1" click httpx huggingface-hub "loguru<=0.7.3" \\
        numpy "openai>=2" protobuf psutil pydantic pydantic-settings rich safetensors tqdm typer aiohttp \\
        packaging

Neither rival supports CPUs officially: these figures compare how much work a step does. Equal on both
sides: target, hidden size, heads, MLP, draft vocabulary, K, the samples of every step, supervised tokens
(--supervise), dtype, threads, eager PyTorch, AdamW. A step is everything from samples to updated weights:

  modelopt     target and draft; --samples_per_step rows, each padded to --row_len, as its collator does
  speculators  draft only, because it reads the target's states from a server or from files (the states are
               made before the clock starts, on our side too); one packed row padded to --row_len, as its
               collate does. Its output head is frozen, ours and Model-Optimizer's is trained

Ours is one packed row of the same samples, rounded up to --bucket_granularity. Each side runs in a process of
its own and they take turns, a step each; the unit is that process's CPU time, figures are medians. "slots"
are positions that a step computes, so tokens/CPU-s = fill x slots/CPU-s: how much of a ratio is padding,
and how much is work a position.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from bench_packing import cpu_name
from rivals.protocol import MARK
from tqdm import tqdm
from transformers import AutoConfig, LlamaForCausalLM

from eagle_train.bundled import DEMO
from eagle_train.config import TrainConfig
from eagle_train.data.collator import round_up
from eagle_train.data.mock import MockSamples, mock_lengths
from eagle_train.data.packing import shuffled
from eagle_train.errors import InputError
from eagle_train.files import write_json
from eagle_train.model.mock_target import mock_config, parse_mock_target
from eagle_train.model.vocab import choose_draft_vocabulary
from eagle_train.train.prepare import load_tokenizer
from eagle_train.train.report import format_table
from eagle_train.train.splits import prepare_data

PROGRAMS = Path(__file__).resolve().parent / "rivals"


def main() -> None:
    args = parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="bench_rivals_") as directory:
            results = compare(args, Path(directory))
    except InputError as error:
        raise SystemExit(f"error: {error}") from error
    print(report(results))
    if args.json:
        write_json(args.json, results)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--rival", required=True, choices=("modelopt", "speculators"))
    add("--rival_python", required=True, help="the interpreter of the rival's environment")
    add("--target", default="demo", help="Hugging Face directory, or demo: the bundled target")
    add("--random_llama", metavar="H,L,V", help="a Llama of these sizes with random weights as the target")
    add("--data", nargs="+", default=[], help="conversations; none: the demo's, or mock ones")
    add("--mock_len", default="uniform:26:320", help="with --random_llama: lengths of mock conversations")
    add("--supervise", default="all", choices=("all", "answers"), help="tokens that the loss is taken on")
    add("--ttt_steps", type=int, default=3, help="K, length of the unroll (steps)")
    add("--draft_vocab_size", type=int, help="none: half of the target's vocabulary")
    add("--row_len", type=int, default=512, help="what the rival pads a row to, and longest sample (tokens)")
    add("--samples_per_step", type=int, default=4, help="with modelopt: rows of its batch")
    add("--bucket_granularity", type=int, default=128, help="ours: rows are multiples of it (tokens)")
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add("--num_threads", type=int, default=1, help="CPU threads of each side")
    add("--repeats", type=int, default=10, help="timed steps, behind one of warm-up")
    add("--json", type=Path, metavar="FILE", help="write the figures there, too")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats is {args.repeats}; it must be at least 1")
    return args


def compare(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    job = make_job(args, directory)
    path = directory / "job.json"
    path.write_text(json.dumps(job))
    sides: dict[str, list[dict[str, Any]]] = {"ours": [], args.rival: []}
    ours = (sys.executable, PROGRAMS / "run_ours.py")
    rival = (args.rival_python, PROGRAMS / f"run_{args.rival}.py")
    with (
        trainer(*ours, path, directory / "ours.log") as ask_ours,
        trainer(*rival, path, directory / "rival.log") as ask_rival,
    ):
        for step in tqdm(job["steps"], desc="steps", unit="step", leave=False):
            sides["ours"].append(ask_ours(step))
            sides[args.rival].append(ask_rival(step))
    lengths = [len(sample["input_ids"]) for sample in job["samples"]]
    tokens = [sum(lengths[i] for i in step) for step in job["steps"]]
    rows = args.samples_per_step if args.rival == "modelopt" else 1
    slots = {
        "ours": [round_up(count, args.bucket_granularity) for count in tokens],
        args.rival: [rows * args.row_len] * len(tokens),
    }
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "rival_python")}
    return {
        "cpu": cpu_name(),
        "torch": torch.__version__,
        "settings": settings,
        "draft_vocab_size": len(job["draft_token_ids"]),
        "sides": {name: side_figures(answers, tokens, slots[name]) for name, answers in sides.items()},
    }


def make_job(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """What each side needs, as plain values: target directory, samples, which of them each step has."""
    target, samples = load_samples(args, directory)
    vocab_size = AutoConfig.from_pretrained(target).get_text_config().vocab_size
    num_steps = args.repeats + 1
    order = shuffled(len(samples), 0, 0).tolist()
    steps: list[list[int]] = []
    for index in order:
        packed = args.rival == "speculators"
        room = args.row_len - sum(len(samples[i]["input_ids"]) for i in steps[-1]) if steps else 0
        fits = (
            len(samples[index]["input_ids"]) <= room
            if packed
            else len(steps[-1:]) and (len(steps[-1]) < args.samples_per_step)
        )
        if steps and fits:
            steps[-1].append(index)
        elif len(steps) == num_steps:
            break
        else:
            steps.append([index])
    if len(steps) < num_steps:
        raise InputError(f"the data fill {len(steps)} steps; --repeats {args.repeats} needs {num_steps}")
    counts = np.zeros(vocab_size, dtype=np.int64)
    for sample in samples:
        np.add.at(counts, sample["input_ids"], 1)
    ids, _ = choose_draft_vocabulary(counts, args.draft_vocab_size or vocab_size // 2, ())
    return {
        "target": target,
        "samples": samples,
        "steps": steps,
        "draft_token_ids": ids.tolist(),
        "with_target": args.rival == "modelopt",
        **{name: getattr(args, name) for name in ("ttt_steps", "row_len", "dtype", "num_threads")},
        "bucket_granularity": args.bucket_granularity,
    }


def load_samples(args: argparse.Namespace, directory: Path) -> tuple[str, list[dict[str, Any]]]:
    """The target's directory, and samples of at most --row_len tokens as plain lists."""
    if args.random_llama:
        hidden, layers, vocab = parse_mock_target(args.random_llama)
        torch.manual_seed(0)
        target = str(directory / "target")
        LlamaForCausalLM(mock_config(hidden, layers, vocab)).save_pretrained(target)
        lengths = np.minimum(mock_lengths(args.mock_len, 1000, 0), args.row_len)
        found: Any = MockSamples(lengths[lengths >= 3], vocab, 0.5, 0)
    else:
        target = str(DEMO / "target") if args.target == "demo" else args.target
        config = TrainConfig(
            target=args.target,
            data=tuple(args.data),
            training_seq_len=args.row_len,
            bucket_granularity=args.row_len,
            max_samples=1000,
        )
        vocab = AutoConfig.from_pretrained(target).get_text_config().vocab_size
        found = prepare_data(config, load_tokenizer(target, config), vocab, None).train_samples
    samples = []
    for sample in found:
        answered = (sample.answer_remaining > 0).astype(int)  # token t + 1 is the answer's
        mask = [0, *answered[:-1].tolist()]
        if args.supervise == "all":
            mask = [0] + [1] * (len(sample) - 1)
        samples.append({"input_ids": sample.input_ids.tolist(), "loss_mask": mask})
    return target, samples


@contextmanager
def trainer(python: str, program: Path, job: Path, log: Path) -> Iterator[Any]:
    """A process that does the job's steps when asked, and what asks it."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            [python, str(program), str(job)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def ask(step: list[int]) -> dict[str, Any]:
            stdin.write(json.dumps(step) + "\n")
            stdin.flush()
            return read_answer(stdout, program, log)

        try:
            read_answer(stdout, program, log)
            yield ask
        finally:
            process.kill()
            process.wait()


def read_answer(stdout: IO[str], program: Path, log: Path) -> dict[str, Any]:
    for line in stdout:
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    raise InputError(f"{program.name} ended early; its last words:\n{log.read_text()[-3000:]}")


def side_figures(answers: list[dict[str, Any]], tokens: list[int], slots: list[int]) -> dict[str, Any]:
    """Medians over all steps but the first."""
    timed = list(zip(answers, tokens, slots, strict=True))[1:]

    def median(unit: str, counts: int) -> float:
        return statistics.median(row[counts] / row[0][unit] for row in timed)

    return {
        "tokens_per_cpu_second": median("cpu_seconds", 1),
        "slots_per_cpu_second": median("cpu_seconds", 2),
        "tokens_per_second": median("wall_seconds", 1),
        "cpu_seconds_per_step": statistics.median(answer["cpu_seconds"] for answer, _, _ in timed),
        "fill": sum(tokens[1:]) / sum(slots[1:]),
        "peak_memory_mib": answers[-1]["peak_memory_mib"],
        "first_loss": answers[0]["loss"],
        "last_loss": answers[-1]["loss"],
    }


def report(results: dict[str, Any]) -> str:
    settings, sides = results["settings"], results["sides"]
    (_, ours), (rival_name, rival) = sides.items()
    ratios = {name: ours[name] / rival[name] for name in ours}
    columns = {
        "tokens_per_cpu_second": ",.0f", "fill": ".2f", "slots_per_cpu_second": ",.0f",
        "tokens_per_second": ",.0f", "cpu_seconds_per_step": ".3f", "peak_memory_mib": ",.0f",
        "first_loss": ".3f", "last_loss": ".3f",
    }  # fmt: skip
    rows = [[name, *(format(side[column], spec) for column, spec in columns.items())]
            for name, side in sides.items()]  # fmt: skip
    rows.append(["ours / rival", *(f"{ratios[c]:.2f}" if "loss" not in c else "" for c in columns)])
    place = (
        f"{results['cpu']}, {settings['num_threads']} threads, {settings['dtype']}, eager, torch "
        f"{results['torch']}; target {settings['random_llama'] or settings['target']}, K = "
        f"{settings['ttt_steps']}, V_d = {results['draft_vocab_size']}, loss on {settings['supervise']}, "
        f"median of {settings['repeats']} steps; losses are defined differently"
    )
    part = "target and draft" if rival_name == "modelopt" else "draft only"
    return f"{place}\nmeasured: {part}\n{format_table(['', *columns], rows)}"


if __name__ == "__main__":
    main()
