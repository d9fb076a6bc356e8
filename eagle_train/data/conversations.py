"""Read conversations from JSONL files: what a row may look like, and one clear line for each row that does
not.

Nothing here knows a tokenizer or a template. Roles are mapped to the five that chat templates know; an
unknown role is refused, never dropped and never guessed (marin, LlamaFactory and others lost system turns
that way).
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from eagle_train.data.samples import IntArray
from eagle_train.errors import InputError

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
# Other names in wide use: ShareGPT (human, gpt, observation, function_call), OASST (prompter), Gemma (model),
# OpenAI's older API (function), Llama 3 (ipython).
ROLE_ALIASES: Mapping[str, str] = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}
# ShareGPT gives a tool call a role of its own, with the call as JSON text.
CALL_ROLES = ("function_call", "tool_call")
ROW_FORMS = ("messages", "conversations", "input_ids")

MAX_TOKEN_ID = 2**31 - 1  # Sample.input_ids is int32


@dataclass(frozen=True, slots=True)
class Conversation:
    """One row of a data file: either messages, or token ids with a mask.

    source: "file:line"; messages: dicts with a role of `ROLES`, content as text (or None beside tool calls)
    and any further keys, which the chat template sees; tools: JSON schemas or None; finish_reason: why the
    answer ended ("length": it was cut); input_ids: int32 `[L]` or None; loss_mask: int32 0/1 `[L]` or None.
    """

    source: str
    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] | None = None
    finish_reason: str | None = None
    input_ids: IntArray | None = None
    loss_mask: IntArray | None = None


def read_conversations(
    paths: Iterable[str | Path], *, role_map: Mapping[str, str] | None = None
) -> Iterator[Conversation]:
    """Yield the rows of JSONL files (`.jsonl` or `.jsonl.gz`) in order.

    role_map: the user's own role names, to be read as a role of `ROLES` or a name of `ROLE_ALIASES`.
    Raises InputError at the first faulty row, and for a missing, empty or unreadable file.
    """
    for row in read_rows(paths, role_map=role_map):
        if isinstance(row, InputError):
            raise row
        yield row


def read_rows(
    paths: Iterable[str | Path], *, role_map: Mapping[str, str] | None = None
) -> Iterator[Conversation | InputError]:
    """Like `read_conversations`, but a faulty row is yielded as its error, so that the caller may go on.

    Raises InputError for what concerns a whole file, or the role map.
    """
    roles = known_roles(role_map or {})
    for path in paths:
        for line_number, line in read_lines(Path(path)):
            source = f"{path}:{line_number}"
            try:
                yield parse_row(line, source, roles)
            except InputError as error:
                yield error
            except RecursionError:
                yield InputError(f"{source}: objects nested too deeply to be read; mend or remove the line")


def count_rows(paths: Iterable[str | Path]) -> int:
    """The number of rows (lines that are not blank). Raises InputError for a missing, empty or unreadable
    file."""
    return sum(sum(1 for _ in read_lines(Path(path))) for path in paths)


def known_roles(role_map: Mapping[str, str]) -> dict[str, str]:
    """Every role name that rows may use, and the role of `ROLES` (or `CALL_ROLES`) that it means."""
    roles = {**{role: role for role in ROLES}, **ROLE_ALIASES, **{role: role for role in CALL_ROLES}}
    for name, role in role_map.items():
        if role not in roles:
            raise InputError(
                f"--role_map {name}={role}: {role!r} is not a role; use one of {', '.join(ROLES)}"
            )
    return {**roles, **{name: roles[role] for name, role in role_map.items()}}


def read_lines(path: Path, *, flag: str = "--data") -> Iterator[tuple[int, bytes]]:
    """Yield (1-based line number, bytes) of every line that is not blank, without a UTF-8 byte order mark.

    flag: what named the file, for messages. Raises InputError for a missing, empty or unreadable file.
    """
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise InputError(f"{path}: data files are JSONL, one JSON object a line, named *.jsonl or *.jsonl.gz")
    if not path.is_file():
        raise InputError(
            f"{path}: {'is not a file' if path.exists() else 'no such file'}; check the path given as {flag}"
        )
    empty = True
    try:
        with _open(path) as file:
            for line_number, line in enumerate(file, start=1):
                if line_number == 1:
                    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
                        raise InputError(f"{path}:1: the file is UTF-16 (byte order mark); save it as UTF-8")
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    empty = False
                    yield line_number, line
    except (OSError, EOFError) as error:  # gzip reports a damaged archive as either
        raise InputError(f"{path}: cannot be read ({error}); check the file and its permissions") from error
    if empty:
        raise InputError(f"{path}: the file has no rows; expected one JSON object a line")


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def parse_row(line: bytes, source: str, roles: Mapping[str, str]) -> Conversation:
    """One line as a conversation; roles: every known name and the role that it means, from `known_roles`."""
    row = parse_json_object(line, source)
    forms = [key for key in ROW_FORMS if row.get(key) is not None]
    if len(forms) != 1:
        found = " and ".join(forms) if forms else f"keys {', '.join(sorted(row)) or 'none'}"
        raise InputError(f"{source}: found {found}; a row has exactly one of {', '.join(ROW_FORMS)}")
    if forms == ["input_ids"]:
        return _parse_token_row(row, source)
    if b"\\u" in line:  # the only way in for a lone surrogate or a NUL: raw ones do not decode
        check_text({key: row.get(key) for key in (*forms, "system", "tools")}, source, "")
    finish_reason = row.get("finish_reason")
    if finish_reason is not None and not isinstance(finish_reason, str):
        raise InputError(
            f'{source}: finish_reason is {_kind(finish_reason)}; expected text such as "stop" or "length"'
        )
    return Conversation(
        source=source,
        messages=_parse_messages(row, forms[0], source, roles),
        tools=_parse_tools(row.get("tools"), source),
        finish_reason=finish_reason,
    )


def parse_json_object(line: bytes, source: str) -> dict[str, Any]:
    """One line as a JSON object. Raises InputError, as file:line, for anything else."""
    row = _parse_json(line, source)
    if not isinstance(row, dict):
        raise InputError(f"{source}: found {_kind(row)} where a JSON object is expected (one row a line)")
    return row


def _parse_json(line: bytes, source: str) -> Any:
    if b"\x00" in line:
        raise InputError(
            f"{source}: found a NUL byte at byte {line.index(0) + 1} of the line; save the file as UTF-8 text"
        )
    try:
        return json.loads(line.rstrip().decode("utf-8"))
    except UnicodeDecodeError as error:
        found = f"byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line"
        raise InputError(f"{source}: {found} is not UTF-8; save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise InputError(
            f"{source}: not valid JSON ({error.msg} at column {error.colno}); mend or remove the line"
        ) from error
    except ValueError as error:  # an integer of thousands of digits
        raise InputError(f"{source}: JSON that cannot be read ({error}); mend or remove the line") from error


def check_text(value: Any, source: str, where: str) -> None:
    """Refuse lone surrogates (the tokenizer would raise a type error that names no text) and NUL
    characters."""
    if isinstance(value, dict):
        for key, item in value.items():
            check_text(key, source, f"a key of {where or 'the row'}")
            check_text(item, source, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_text(item, source, f"{where}[{index}]")
    elif isinstance(value, str):
        for position, character in enumerate(value, start=1):
            if character == "\0" or "\ud800" <= character <= "\udfff":
                found = (
                    "a NUL character" if character == "\0" else f"a lone surrogate \\u{ord(character):04x}"
                )
                raise InputError(
                    f"{source}: found {found} at character {position} of {where}; remove or replace it"
                )


def parse_token_ids(row: Mapping[str, Any], source: str) -> IntArray:
    """A row's input_ids, int32 `[L]`, at least one. Raises InputError for anything else."""
    ids = row["input_ids"]
    if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
        raise InputError(f"{source}: input_ids must be a list of at least one integer token id")
    if min(ids) < 0 or max(ids) > MAX_TOKEN_ID:
        bad = min(ids) if min(ids) < 0 else max(ids)
        raise InputError(f"{source}: input_ids has the id {bad}; token ids lie in 0..{MAX_TOKEN_ID}")
    return np.asarray(ids, dtype=np.int32)


def _parse_token_row(row: Mapping[str, Any], source: str) -> Conversation:
    ids, mask = parse_token_ids(row, source), row.get("loss_mask")
    if not isinstance(mask, list):
        raise InputError(
            f"{source}: input_ids without loss_mask; add a list of 0 and 1, one a token (1: trained on)"
        )
    if len(mask) != len(ids):
        raise InputError(
            f"{source}: {len(ids)} input_ids but {len(mask)} loss_mask values; give one mask value a token"
        )
    bad_values = [value for value in mask if type(value) not in (int, bool) or value not in (0, 1)]
    if bad_values:
        raise InputError(f"{source}: loss_mask has the value {bad_values[0]!r}; only 0 and 1 are allowed")
    return Conversation(source=source, input_ids=ids, loss_mask=np.asarray(mask, dtype=np.int32))


def _parse_messages(
    row: Mapping[str, Any], form: str, source: str, roles: Mapping[str, str]
) -> tuple[Message, ...]:
    items = row[form]
    if not isinstance(items, list):
        raise InputError(f"{source}: {form} is {_kind(items)}; expected a list of messages")
    if not items:
        raise InputError(f"{source}: {form} is empty; a conversation needs at least one assistant turn")
    messages = tuple(
        _parse_message(item, f"{form}[{index}]", source, roles) for index, item in enumerate(items)
    )
    system = row.get("system")  # ShareGPT files may keep the system prompt beside the turns
    if system is None or system == "":
        return messages
    if not isinstance(system, str):
        raise InputError(f"{source}: system is {_kind(system)}; expected text")
    if messages[0]["role"] == "system":
        raise InputError(f"{source}: a system prompt both as row key and as first turn; keep one of them")
    return ({"role": "system", "content": system}, *messages)


def _parse_message(item: Any, where: str, source: str, roles: Mapping[str, str]) -> Message:
    if not isinstance(item, dict):
        raise InputError(f"{source}: {where} is {_kind(item)}; expected an object with role and content")
    name = item.get("from") if item.get("role") is None else item["role"]
    if name is None:
        raise InputError(
            f"{source}: {where} has neither role nor from; found keys {', '.join(sorted(item)) or 'none'}"
        )
    role = roles.get(name) if isinstance(name, str) else None
    if role is None:
        raise InputError(
            f"{source}: {where} has the unknown role {name!r}; known are {', '.join(sorted(roles))}; "
            f"say what it means with --role_map {name}=user (or assistant, ...)"
        )
    content = item.get("value") if item.get("content") is None else item["content"]
    rest = {key: value for key, value in item.items() if key not in ("role", "from", "content", "value")}
    if role in CALL_ROLES:
        return {
            **rest,
            "role": "assistant",
            "content": None,
            "tool_calls": _parse_call_text(content, where, source),
        }
    if not rest.get("tool_calls"):
        rest.pop("tool_calls", None)  # Llama 3.1's template takes the key itself for a call
    else:
        rest["tool_calls"] = _parse_tool_calls(rest["tool_calls"], where, source)
    may_be_null = role == "assistant" and (rest.get("tool_calls") or rest.get("reasoning_content"))
    if content is None and not may_be_null:
        raise InputError(
            f"{source}: {where} ({role}) has no content; only an assistant turn with tool calls may lack it"
        )
    return {
        **rest,
        "role": role,
        "content": None if content is None else _content_text(content, where, source),
    }


def _content_text(content: Any, where: str, source: str) -> str:
    """Text, or the text parts joined without a separator, which is what templates that know parts do with
    them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError(f"{source}: the content of {where} is {_kind(content)}; expected text")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            found = part.get("type", "text") if isinstance(part, dict) else _kind(part)
            raise InputError(
                f"{source}: the content of {where} has a part of type {found!r}; only text can be trained "
                "on: remove the row or the part"
            )
        texts.append(text)
    return "".join(texts)


def _parse_call_text(text: Any, where: str, source: str) -> list[dict[str, Any]]:
    try:
        parsed = json.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        raise InputError(f"{source}: {where} is a function call whose text is not JSON ({error})") from error
    return _parse_tool_calls(parsed if isinstance(parsed, list) else [parsed], where, source)


def _parse_tool_calls(calls: Any, where: str, source: str) -> list[dict[str, Any]]:
    """OpenAI's form, with arguments as an object: engines decode the JSON text before the template sees
    it."""
    if not isinstance(calls, list):
        raise InputError(f"{source}: tool_calls of {where} is {_kind(calls)}; expected a list")
    parsed = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or not function["name"]
        ):
            raise InputError(
                f"{source}: a tool call of {where} has no function name; expected name and arguments"
            )
        outer = {key: value for key, value in call.items() if key in ("id", "type")}
        arguments = _decoded(function.get("arguments", {}))
        parsed.append({"type": "function", **outer, "function": {**function, "arguments": arguments}})
    return parsed


def _decoded(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        decoded = json.loads(arguments)
    except ValueError:
        return arguments
    return decoded if isinstance(decoded, dict) else arguments


def _parse_tools(tools: Any, source: str) -> tuple[Mapping[str, Any], ...] | None:
    if isinstance(tools, str) and tools.strip():  # LlamaFactory's ShareGPT form: a JSON text
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise InputError(f"{source}: tools is text that is not JSON ({error})") from error
    if not tools:
        return None
    if not isinstance(tools, Sequence) or any(
        not isinstance(tool, dict) or not isinstance(tool.get("function", {}), dict) for tool in tools
    ):
        raise InputError(f"{source}: tools must be a list of JSON schemas")
    return tuple(tools)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
