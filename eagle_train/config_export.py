"""Options of the commands that hand a head to engines and look at heads: `export` and `check`."""

from dataclasses import dataclass

from eagle_train.config import option
from eagle_train.errors import InputError

EXPORT_FORMATS = ("vllm", "sglang", "speculators", "openvino", "llamacpp")


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Options of `python -m eagle_train export`."""

    draft: str = option("", "export", "directory of the draft head")
    to: str = option("", "export", "engine or format that the directory is for", EXPORT_FORMATS)
    out: str = option("", "export", "directory to write; new or empty")
    target: str | None = option(
        None,
        "export",
        "Hugging Face id or directory of the target, or demo; none: the one that the head's run recorded",
    )

    def __post_init__(self) -> None:
        for name, remedy in (
            ("draft", "the directory of a draft head"),
            ("to", f"one of {', '.join(EXPORT_FORMATS)}"),
            ("out", "a directory to write"),
        ):
            if not getattr(self, name):
                raise InputError(f"--{name} is not named; name {remedy}")


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """Options of `python -m eagle_train check`."""

    draft: str = option("", "check", "directory of the draft head", positional=True)
    target: str | None = option(
        None,
        "check",
        "Hugging Face id or directory of the target to compare with, or demo; none: no comparison",
    )
    json: str | None = option(None, "check", "JSON file for the report")
