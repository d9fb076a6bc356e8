"""python -m eagle_train [train] [flags]: `train` when the first word is a flag."""

import sys
from collections.abc import Sequence
from pathlib import Path

from eagle_train.errors import InputError

COMMANDS = ("train",)
TRAIN_DESCRIPTION = (
    "Train an EAGLE-3 draft head. Without --target, --data and --config: the bundled demo, under the options "
    "of eagle_train/demo/config.yaml."
)
DEMO_CONFIG = Path(__file__).parent / "demo" / "config.yaml"


def main(args: Sequence[str]) -> int:
    """Run a command; 0 on success, 2 on bad input, 130 when interrupted."""
    command, rest = (args[0], args[1:]) if args and not args[0].startswith("-") else ("train", args)
    try:
        if command not in COMMANDS:
            raise InputError(f"unknown command {command!r}; the commands are: {', '.join(COMMANDS)}")
        # Imported here so that --help and mistakes in flags answer before PyTorch is loaded.
        from eagle_train.config import TrainConfig
        from eagle_train.flags import parse

        config = parse(TrainConfig, with_demo_config(rest), command="train", description=TRAIN_DESCRIPTION)
        from eagle_train.train.loop import train

        train(config)
    except InputError as error:
        print(f"eagle_train: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("eagle_train: interrupted; --resume goes on from the last saved state", file=sys.stderr)
        return 130
    return 0


def with_demo_config(args: Sequence[str]) -> list[str]:
    """The demo's own options under the given flags, unless these name a target, data or a config."""
    named = {flag.split("=")[0] for flag in args}
    if named & {"--target", "--data", "--config"}:
        return list(args)
    # The demo counts steps; a user who counts epochs means it.
    steps = ["--max_steps", "none"] if "--num_epochs" in named else []
    return ["--config", str(DEMO_CONFIG), *steps, *args]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
