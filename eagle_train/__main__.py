"""python -m eagle_train [train|plan|measure|plot|export|check] [flags]: `train` when the first is a flag."""

import os
import shlex
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from eagle_train.bundled import DEMO, target_path
from eagle_train.errors import InputError, RankError, Stopped

COMMANDS = {
    "train": "train a draft head",
    "plan": "show how an epoch would be packed, without training",
    "measure": "decode prompts with a head: acceptance and speed-up",
    "plot": "draw runs from their metrics.jsonl",
    "export": "write a head as one engine needs it",
    "check": "look for faults in a head, and say which engines take it",
}
TRAIN_DESCRIPTION = (
    "Train an EAGLE-3 draft head. Without --target, --data and --config: the bundled demo, under the options "
    "of eagle_train/demo/config.yaml."
)
PLAN_DESCRIPTION = (
    "Plan an epoch without training, to see steps, fill, balance and shapes of every packing mode (or of the "
    "one that --packing names). Takes the flags of train, so that `plan` can be put before a training's own."
)
MEASURE_DESCRIPTION = (
    "Decode prompts with a target and its draft head, and report acceptance per position, acceptance length "
    "with intervals and by category, and the speed-up over decoding without the head."
)
PLOT_DESCRIPTION = "Draw loss, acceptance, fill and speed of one or several runs from their metrics.jsonl."
EXPORT_DESCRIPTION = (
    "Write a draft head as the directory that one engine needs, with a model card, and print how it is "
    "served. OpenVINO and llama.cpp convert it further: the steps are printed and written to steps.sh."
)
CHECK_DESCRIPTION = (
    "`check DIR` looks at a draft head in any published layout: layout and algorithm, every fault and every "
    "mismatch with --target, and what each engine makes of it. Exit code 0: sound; 1: not sound; 2: cannot "
    "be read."
)
DEMO_CONFIG = DEMO / "config.yaml"


def main(args: Sequence[str]) -> int:
    """Run a command; 0 on success, 1 for an unsound head in `check`, 2 on bad input, 130 if interrupted,
    143 for a training that SIGTERM ended.
    """
    is_named = bool(args) and not args[0].startswith("-")
    if not is_named and {"-h", "--help"} & set(args):
        print(list_commands())
    command, rest = (args[0], args[1:]) if is_named else ("train", args)
    try:
        if command not in COMMANDS:
            raise InputError(f"unknown command {command!r}; the commands are: {', '.join(COMMANDS)}")
        return run_command(command, rest)
    except InputError as error:
        print(f"eagle_train: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except RankError as error:
        print(f"eagle_train: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(f"eagle_train: {stopped}", file=sys.stderr)
        return stopped.code
    except BrokenPipeError:  # the reader of our output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt as interrupt:
        # `train` says what to do where it had begun; before that nothing has changed.
        remedy = str(interrupt) or ("the same command starts again" if command == "train" else "")
        print(f"eagle_train: interrupted{remedy and f'; {remedy}'}", file=sys.stderr)
        return 130


def list_commands() -> str:
    """The commands with one line each, for the help of `train`, which is the one without a name."""
    lines = [f"  {name:<9}{what}" for name, what in COMMANDS.items()]
    return "\n".join(["commands, each with a --help of its own; without one: train", *lines, ""])


def run_command(command: str, args: Sequence[str]) -> int:
    if command == "check":
        return run_check(args)
    run = {
        "train": run_train,
        "plan": run_plan,
        "measure": run_measure,
        "plot": run_plot,
        "export": run_export,
    }[command]
    run(args)
    return 0


def run_train(args: Sequence[str]) -> None:
    # Imported here, as below, so that --help and mistakes in flags answer before PyTorch is loaded.
    from eagle_train.config import TrainConfig
    from eagle_train.flags import named_options, parse

    named = named_options(TrainConfig, args, command="train", description=TRAIN_DESCRIPTION)
    if named.get("resume") and not named.get("overwrite"):
        from eagle_train.train.resume import resumed_config

        config = resumed_config(named)
    else:
        config = parse(TrainConfig, with_demo_config(args), command="train", description=TRAIN_DESCRIPTION)
    from eagle_train.train.loop import train

    train(config)


def run_plan(args: Sequence[str]) -> None:
    from eagle_train.config import PlanConfig, TrainConfig
    from eagle_train.flags import parse_two

    args = with_demo_config(args)
    options, config = parse_two(PlanConfig, TrainConfig, args, command="plan", description=PLAN_DESCRIPTION)
    from eagle_train.train.plan import plan

    is_named = any(flag.split("=")[0] == "--packing" for flag in args) or config.packing != "multipack"
    plan(options, config, compare=not is_named)


def run_measure(args: Sequence[str]) -> None:
    from eagle_train.config_measure import MeasureConfig
    from eagle_train.flags import parse

    options = parse(MeasureConfig, args, command="measure", description=MEASURE_DESCRIPTION)
    from eagle_train.train.measure import measure

    measure(options)


def run_plot(args: Sequence[str]) -> None:
    from eagle_train.config_measure import PlotConfig
    from eagle_train.flags import parse

    options = parse(PlotConfig, args, command="plot", description=PLOT_DESCRIPTION)
    from eagle_train.train.plots import plot

    print(f"plot: {plot(options)}")


def run_export(args: Sequence[str]) -> None:
    from eagle_train.config_export import ExportConfig
    from eagle_train.flags import parse

    config = parse(ExportConfig, args, command="export", description=EXPORT_DESCRIPTION)
    from eagle_train.export.engines import IN_PYTHON
    from eagle_train.export.write import STEPS, export_draft_head

    exported = export_draft_head(
        config.draft, config.to, config.out, config.target and target_path(config.target)
    )
    print(f"{exported.directory}: written for {exported.engine}")
    if exported.steps:
        script = shlex.quote(str(exported.directory / STEPS))
        print("\n".join([f"next, bash {script}, which runs:", *exported.steps]))
    where = f", inside {exported.directory}" if exported.steps else ""
    where += ", in Python" if exported.engine in IN_PYTHON else ""
    print(f"serve it{where}: {exported.serve}")


def run_check(args: Sequence[str]) -> int:
    from eagle_train.config_export import CheckConfig
    from eagle_train.flags import parse

    config = parse(CheckConfig, args, command="check", description=CHECK_DESCRIPTION)
    from eagle_train.export.check import check_draft_head, format_report
    from eagle_train.files import write_json

    report = check_draft_head(config.draft, config.target and target_path(config.target))
    print(format_report(report))
    if config.json:
        write_json(Path(config.json), report.to_dict())
    return 0 if report.is_sound else 1


def with_demo_config(args: Sequence[str]) -> list[str]:
    """The demo's own options under the given flags, unless these name a target, data or a config."""
    named = {flag.split("=")[0] for flag in args}
    if named & {"--target", "--data", "--config", "--mock_data", "--mock_target", "--lengths"}:
        return list(args)
    # The demo counts steps and fills rows; a user who counts epochs, or packs none, means it.
    aside = ["--max_steps", "none"] if "--num_epochs" in named else []
    unpacked = "--packing=none" in args or ("--packing", "none") in pairwise(args)
    aside += ["--tokens_per_row", "none"] if unpacked else []
    return ["--config", str(DEMO_CONFIG), *aside, *args]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
