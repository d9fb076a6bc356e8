"""A frozen dataclass of options as command line and YAML file: one line a flag, errors in one line.

Every field carries `group`, `help`, `choices` and `positional` in its metadata (`config.option`). Types are
str, int, float, bool, tuples of them, and None.
"""

import argparse
import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml

from eagle_train.errors import InputError

Config = TypeVar("Config")
Other = TypeVar("Other")
NONE = "none"  # of an optional option, on the command line and in YAML: as if it were not named
Fields = tuple["dataclasses.Field[Any]", ...]


def parse(cls: type[Config], args: Sequence[str], *, command: str, description: str) -> Config:
    """Flags, over the YAML file that --config names, over the defaults.

    Raises InputError for an unknown flag or key, naming the nearest known one, and for a value of another
    type.
    """
    return cls(**_read(_fields(cls), args, command, description))


def named_options(cls: type[Any], args: Sequence[str], *, command: str, description: str) -> dict[str, Any]:
    """As `parse`, but only the options that a flag or the YAML file names."""
    return _read(_fields(cls), args, command, description)


def parse_two(
    first: type[Config], second: type[Other], args: Sequence[str], *, command: str, description: str
) -> tuple[Config, Other]:
    """As `parse`, where a command has options of its own beside those of another one."""
    own = {f.name for f in _fields(first)}
    values = _read((*_fields(first), *_fields(second)), args, command, description)
    return (
        first(**{name: value for name, value in values.items() if name in own}),
        second(**{name: value for name, value in values.items() if name not in own}),
    )


def _read(fields: Fields, args: Sequence[str], command: str, description: str) -> dict[str, Any]:
    flags = vars(_parser(fields, command, description).parse_args(list(args)))
    config_path = flags.pop("config", None)
    values = _read_yaml(fields, Path(config_path)) if config_path else {}
    return values | {key: _of_flag(key, value) for key, value in flags.items()}


def _of_flag(name: str, value: Any) -> Any:
    """A flag's value as the dataclass has it: argparse gives lists, and tuples keep it immutable."""
    if not isinstance(value, list):
        return value
    if None in value and len(value) > 1:
        raise InputError(f"--{name} names none beside other values; name none alone, or leave it out")
    return None if None in value else tuple(value)


def _read_yaml(known: Fields, path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--config {path} cannot be read: {error.strerror}; name a YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise InputError(f"--config {path} holds {type(values).__name__}; it must hold `key: value` lines")
    fields = {f.name: f for f in known}
    for key, value in values.items():
        if key not in fields:
            raise InputError(f"{path}: unknown key {key!r}{_nearest(str(key), fields)}")
        values[key] = _checked(f"{path}: {key}", fields[key], value)
    return values


def _checked(where: str, f: "dataclasses.Field[Any]", value: Any) -> Any:
    """A YAML value in the field's type; a single value stands for a list of one, the word none for null."""
    base, many, optional = _shape(f.type)
    if optional and value in (None, NONE):
        return None
    items = value if many and isinstance(value, list) else [value]
    if base is float:
        items = [_number(item) for item in items]
    for item in items:
        fits = isinstance(item, base) and (base is bool or not isinstance(item, bool))
        if not fits and not (base is float and type(item) is int):
            raise InputError(f"{where} is {item!r}; it must be of type {base.__name__}")
        choices = f.metadata["choices"]
        if choices and item not in choices:
            raise InputError(f"{where} is {item!r}; it must be one of {', '.join(choices)}")
    return tuple(items) if many else base(items[0])


def _number(value: Any) -> Any:
    """YAML 1.1 takes 1e-4 for text, because it has no point."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _fields(cls: type[Any]) -> Fields:
    return dataclasses.fields(cls)


def _shape(annotation: Any) -> tuple[type, bool, bool]:
    """(scalar type, is a tuple, may be None) of a field's annotation."""
    optional = isinstance(annotation, types.UnionType)
    if optional:
        annotation = next(part for part in typing.get_args(annotation) if part is not types.NoneType)
    many = typing.get_origin(annotation) is tuple
    return (typing.get_args(annotation)[0] if many else annotation), many, optional


def _or_none(base: Callable[[str], Any]) -> Callable[[str], Any]:
    """`none` on the command line takes back what a config file names."""

    def parse_value(text: str) -> Any:
        return None if text == NONE else base(text)

    parse_value.__name__ = base.__name__  # argparse shows it: "invalid int value"
    return parse_value


def _parse_bool(text: str) -> bool:
    if text.lower() in ("true", "1", "yes", "on"):
        return True
    if text.lower() in ("false", "0", "no", "off"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are InputErrors and which names the nearest flag."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            unknown = message.removeprefix("unrecognized arguments: ").split()[0]
            known = [flag for action in self._actions for flag in action.option_strings]
            message = f"unknown flag {unknown}{_nearest(unknown.split('=')[0], known)}"
        raise InputError(f"{message}. See {self.prog} --help")


def _nearest(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}" if matches else ""


def _parser(fields: Fields, command: str, description: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"python -m eagle_train {command}",
        description=description,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=118),
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with the same keys; flags win")
    groups: dict[str, Any] = {}
    for f in fields:
        base, many, optional = _shape(f.type)
        name = f.metadata["group"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        default = " ".join(map(str, f.default)) if isinstance(f.default, tuple) else f.default
        extra: dict[str, Any] = (
            {"choices": f.metadata["choices"]} if f.metadata["choices"] else {"metavar": base.__name__}
        )
        if base is bool:
            parse_value = _or_none(_parse_bool) if optional else _parse_bool
            extra |= {"type": parse_value, "nargs": "?", "const": True}
        else:
            # A repeated list flag adds to the list: replacing would lose files without a word.
            extra |= {"type": _or_none(base) if optional else base}
            extra |= {"nargs": "+", "action": "extend"} if many else {}
        shown = "" if default in (None, "") else f" [{default}]"
        flag = f"--{f.name}"
        if f.metadata["positional"]:
            flag, extra["metavar"] = f.name, f.name
        groups[name].add_argument(flag, help=f.metadata["help"].replace("%", "%%") + shown, **extra)
    return parser
