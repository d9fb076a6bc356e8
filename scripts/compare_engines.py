"""The same heads and prompts in every engine at hand, in our decoder, and as teacher forcing expects them.

    scripts/setup_engine.sh openvino        # and vllm, llamacpp: each builds one engine's environment
    python scripts/compare_engines.py --head TARGET_DIR DRAFT_DIR PROMPTS.jsonl
    python scripts/compare_engines.py --probe shared/fixtures/engine_probe

Greedy, float32, so that counts can be compared one to one. Each answer is cut before its end of text, because
engines that are told to ignore one do different things (llama.cpp takes the next best token). "expected"
walks the target's own greedy tokens by teacher forcing; "measured" is our decoder. Engines differ in one
rule: vLLM drafts n tokens at the last verify step too, llama.cpp and OpenVINO at most the tokens that are
left less one ("capped"), so expected and measured are given under both rules. The acceptance length is 1 +
accepted / verify steps.

An engine's runner (scripts/engines/run_ENGINE.py, run by the engine's own Python) reads a JSON file with
target_dir, draft_dir, prompts (token ids), max_new_tokens (of each prompt) and num_speculative_tokens. It
writes one with version, capped (whether the last step's draft is cut), and for each prompt token_ids,
verify_steps, drafted, accepted and accepted_per_position (null where the engine does not tell).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from engine_cases import (
    Case,
    PromptCounts,
    Run,
    expected_leading_hits,
    head_case,
    measure,
    probe_case,
    same_counts,
    walk,
    with_target_greedy,
)
from tqdm import tqdm

from eagle_train import InputError, load_draft_head, load_target
from eagle_train.train.report import format_table

ENGINES = ("vllm", "openvino", "llamacpp")
SCRIPTS = Path(__file__).resolve().parent
LOG_LINES_SHOWN = 15


@dataclass(frozen=True, slots=True)
class Comparison:
    """The target's own greedy tokens of each prompt, the runs, and what engines that failed said."""

    greedy: list[list[int]]
    runs: list[Run]
    failures: list[str]


def main() -> None:
    args = parse_args()
    try:
        check_args(args)
        cases = [probe_case(args.probe)] if args.probe else []
        cases += [
            head_case(*map(Path, paths), args.num_prompts, args.num_speculative_tokens, args.max_new_tokens)
            for paths in args.head
        ]
        if not cases:
            raise InputError("nothing to compare; name a head with --head, or a fixture with --probe")
        engines = [engine for engine in args.engines if report_environment(engine)]
        results = []
        for case in cases:
            case, greedy = with_target_greedy(case)
            results.append(compare(case, greedy, engines))
            print(f"\n{case.draft_dir}\n{case_table(case, results[-1])}", flush=True)
    except InputError as error:
        raise SystemExit(f"compare_engines: {error}") from error
    if args.json:
        written = [
            {"draft": str(case.draft_dir)} | asdict(result)
            for case, result in zip(cases, results, strict=True)
        ]
        args.json.write_text(json.dumps(written, indent=1))
    if failures := [text for result in results for text in result.failures]:
        raise SystemExit("\n".join(f"compare_engines: {text}" for text in failures))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--head",
        nargs=3,
        action="append",
        default=[],
        metavar=("TARGET", "DRAFT", "PROMPTS"),
        help="directories of a target and a head, and a prompt file as `measure` reads it; may be given "
        "several times",
    )
    parser.add_argument("--probe", type=Path, help="a folder with target/, draft/ and counts.json")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--num_prompts", type=int, default=12, help="prompts of each file, evenly spaced")
    parser.add_argument("--num_speculative_tokens", type=int, default=3, help="drafted per verify step")
    parser.add_argument("--max_new_tokens", type=int, default=40, help="per prompt")
    parser.add_argument("--json", type=Path, help="write every prompt's tokens and counts")
    return parser.parse_args()


def check_args(args: argparse.Namespace) -> None:
    """Raises InputError for what would otherwise end in a traceback, or fail once all engines have run."""
    for name, least in (("num_prompts", 1), ("num_speculative_tokens", 1), ("max_new_tokens", 2)):
        if (value := getattr(args, name)) < least:
            raise InputError(f"--{name} {value} is too small; it must be at least {least}")
    heads = [Path(path) / "config.json" for target, draft, _ in args.head for path in (target, draft)]
    for path in [*heads, *([args.probe / "counts.json"] if args.probe else [])]:
        if not path.is_file():
            raise InputError(f"{path} does not exist; name the directory that holds it")
    if args.json and not args.json.absolute().parent.is_dir():
        raise InputError(f"--json {args.json}: its folder does not exist; make it first")


def environment(engine: str) -> Path | None:
    """Where setup_engine.sh has finished this engine's environment, or None."""
    home = os.environ.get("EAGLE_TRAIN_ENGINES") or Path.home() / ".cache" / "eagle_train" / "engines"
    directory = Path(home) / engine
    return directory if (directory / "versions.txt").is_file() else None


def report_environment(engine: str) -> Path | None:
    directory = environment(engine)
    if directory is None:
        print(f"{engine}: not installed; scripts/setup_engine.sh {engine} builds it", file=sys.stderr)
    return directory


def compare(case: Case, greedy: list[list[int]], engines: list[str]) -> Comparison:
    """Expected and measured under both rules, then each engine; one that fails leaves the others alone. case,
    greedy: as `with_target_greedy` gives them.
    """
    head = load_draft_head(case.draft_dir)
    target = load_target(
        str(case.target_dir),
        dtype=torch.float32,
        device=torch.device("cpu"),
        aux_layer_ids=head.config.aux_layer_ids,
    )
    leading = [
        expected_leading_hits(head, target, prompt, tokens, case.num_speculative_tokens)
        for prompt, tokens in zip(case.prompts, greedy, strict=True)
    ]
    runs = []
    for capped in (False, True):
        expected = [
            walk(hits, case.num_speculative_tokens, num_tokens, capped=capped)
            for hits, num_tokens in zip(leading, case.max_new_tokens, strict=True)
        ]
        runs += [Run("expected", capped, expected), measure(head, target, case, capped=capped)]
    failures = []
    for engine in tqdm(engines, desc=f"engines on {case.draft_dir}", unit="engine"):
        try:
            runs.append(run_engine(engine, case))
        except InputError as error:
            failures.append(str(error))
    own = [tokens[:num_tokens] for tokens, num_tokens in zip(greedy, case.max_new_tokens, strict=True)]
    return Comparison(own, runs, failures)


def run_engine(engine: str, case: Case) -> Run:
    """Decode the case's prompts in one engine. Raises InputError with the end of its log where it fails."""
    directory = environment(engine)
    if directory is None:
        raise InputError(f"{engine} is not installed; scripts/setup_engine.sh {engine} builds it")
    request = {
        "target_dir": str(case.target_dir.resolve()),
        "draft_dir": str(case.draft_dir.resolve()),
        "prompts": [prompt.token_ids for prompt in case.prompts],
        "num_speculative_tokens": case.num_speculative_tokens,
        "max_new_tokens": case.max_new_tokens,
    }
    # The engine's Python sees none of our modules; no engine may look for a hub.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with tempfile.TemporaryDirectory() as scratch:
        request_file, result_file, log = (Path(scratch) / name for name in ("request", "result", "log"))
        request_file.write_text(json.dumps(request))
        command = [
            directory / "bin" / "python",
            SCRIPTS / "engines" / f"run_{engine}.py",
            request_file,
            result_file,
        ]
        with log.open("w") as log_file:
            done = subprocess.run(command, env=env, stdout=log_file, stderr=subprocess.STDOUT, check=False)
        if done.returncode != 0:
            end = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])
            raise InputError(
                f"{engine} ended with code {done.returncode} on {case.draft_dir}; its log ends:\n{end}"
            )
        result = json.loads(result_file.read_text())
    prompts = [PromptCounts(**prompt) for prompt in result["prompts"]]
    return Run(result["version"], result["capped"], prompts)


def case_table(case: Case, comparison: Comparison) -> str:
    """One row a run. The last two columns are counted prompt by prompt: greedy tokens equal to the target's
    own, and counts equal to our decoder's under the same rule.
    """
    greedy = comparison.greedy
    measured = {run.capped: run for run in comparison.runs if run.name == "measured by us"}
    rows = []
    for run in sorted(comparison.runs, key=lambda run: run.capped):
        totals = run.totals()
        by_position = totals.accepted_per_position
        own = [prompt.token_ids == tokens for prompt, tokens in zip(run.prompts, greedy, strict=True)]
        equal = [same_counts(a, b) for a, b in zip(run.prompts, measured[run.capped].prompts, strict=True)]
        rows.append(
            [
                run.name,
                "capped" if run.capped else "full",
                f"{totals.verify_steps}",
                f"{totals.drafted}",
                f"{totals.accepted}",
                ", ".join(map(str, by_position)) if by_position else "not told",
                f"{1 + totals.accepted / totals.verify_steps:.4f}",
                "-" if run.name == "expected" else f"{sum(own)}/{len(own)}",
                "-" if run.name == "measured by us" else f"{sum(equal)}/{len(equal)}",
            ]
        )
    header = ["", "last step", "verify steps", "drafted", "accepted", "by position", "acceptance length"]
    header += ["tokens = target's", "counts = ours"]
    title = (
        f"{len(case.prompts)} prompts, {sum(case.max_new_tokens)} new tokens, "
        f"n = {case.num_speculative_tokens}, greedy, float32"
    )
    return f"{title}\n{format_table(header, rows)}"


if __name__ == "__main__":
    main()
