"""The demo that comes with the package: a tiny target, its conversations and its options."""

from pathlib import Path

DEMO = Path(__file__).resolve().parent / "demo"
DEMO_NAME = "demo"  # the --target under which it goes


def target_path(target: str) -> str:
    """--target as an id or directory: the demo's name stands for its directory."""
    return str(DEMO / "target") if target == DEMO_NAME else target
