"""Rows of data files: cases U12-U16 of user_cases.md and every refusal, with file and line."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_train.data.chat import tokenize_conversation
from eagle_train.data.conversations import Conversation, count_rows, read_conversations, read_rows
from eagle_train.data.loading import load_samples
from eagle_train.errors import InputError
from tests.data.templates import OWN, TOOLS, make_tokenizer, supervised_texts, turns

GOOD = json.dumps({"messages": turns("2+2?", "4")})


def write(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8"))
    return path


def read(tmp_path: Path, *rows: Any, **how: Any) -> list[Conversation]:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    return list(read_conversations([write(tmp_path / "data.jsonl", text)], **how))


# The three forms of a row


def test_three_forms_of_a_row(tmp_path: Path) -> None:
    said = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
    first, second, third, fourth = read(
        tmp_path,
        {"messages": turns("2+2?", "4"), "finish_reason": "length", "id": 7},
        {"conversations": said, "messages": None},
        {"conversations": turns("2+2?", "4")},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, True]},
    )
    assert first.messages == second.messages == third.messages == tuple(turns("2+2?", "4"))
    assert (first.finish_reason, second.finish_reason) == ("length", None)
    assert [row.source for row in (first, second)] == [f"{tmp_path}/data.jsonl:{line}" for line in (1, 2)]
    assert fourth.messages == ()
    assert fourth.input_ids is not None
    assert fourth.loss_mask is not None
    assert fourth.input_ids.dtype == np.int32
    assert (fourth.input_ids.tolist(), fourth.loss_mask.tolist()) == ([5, 6, 7], [0, 1, 1])


def test_several_files_and_gzip(tmp_path: Path) -> None:
    plain = write(tmp_path / "a.jsonl", GOOD + "\n")
    packed = write(tmp_path / "b.jsonl.gz", gzip.compress((GOOD + "\n\n" + GOOD).encode()))
    rows = list(read_conversations([plain, packed]))
    assert [row.source for row in rows] == [f"{plain}:1", f"{packed}:1", f"{packed}:3"]
    assert count_rows([plain, packed]) == 3


@pytest.mark.parametrize(
    ("name", "data", "found"),
    [
        ("none.jsonl", None, r"none\.jsonl: no such file; check the path"),
        ("empty.jsonl", b"", r"empty\.jsonl: the file has no rows"),
        ("blank.jsonl", b"\n  \r\n\n", r"blank\.jsonl: the file has no rows"),
        ("data.csv", b"a,b\n", r"data\.csv: data files are JSONL.*\*\.jsonl or \*\.jsonl\.gz"),
        ("broken.jsonl.gz", b"not gzip", r"broken\.jsonl\.gz: cannot be read"),
        ("short.jsonl.gz", gzip.compress(GOOD.encode() * 50)[:-12], r"short\.jsonl\.gz: cannot be read"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, name: str, data: bytes | None, found: str) -> None:
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    for use in (lambda: list(read_rows([path])), lambda: count_rows([path])):
        with pytest.raises(InputError, match=found):
            use()


def test_a_folder_is_not_a_data_file(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").mkdir()
    with pytest.raises(InputError, match=r"data\.jsonl: is not a file"):
        count_rows([tmp_path / "data.jsonl"])


FAULTS: list[tuple[Any, str]] = [
    ('{"messages": [', r"not valid JSON \(Expecting value at column 15\)"),
    (GOOD + GOOD, r"not valid JSON \(Extra data"),
    ("[1, 2]", "found a list where a JSON object is expected"),
    ("[" * 100_000, "."),
    ({}, "found keys none; a row has exactly one of messages, conversations, input_ids"),
    ({"text": "hello"}, "found keys text; a row has exactly one of"),
    (
        {"messages": turns("a", "b"), "conversations": turns("a", "b")},
        "found messages and conversations; a row has",
    ),
    ({"messages": "hello"}, "messages is text; expected a list"),
    ({"messages": ["hello"]}, r"messages\[0\] is text; expected an object"),
    ({"messages": [{"content": "hello"}]}, r"messages\[0\] has neither role nor from; found keys content"),
    ({"messages": [{"role": "user"}]}, r"messages\[0\] \(user\) has no content"),
    (
        {"messages": [*turns("a"), {"role": "assistant", "content": None}]},
        r"messages\[1\] \(assistant\) has no content",
    ),
    ({"messages": [{"role": "user", "content": 4}]}, r"content of messages\[0\] is a number; expected text"),
    ({"messages": turns("a", "b"), "finish_reason": 3}, "finish_reason is a number"),
    ({"messages": turns("a", "b"), "tools": "weather"}, "tools is text that is not JSON"),
    ({"messages": turns("a", "b"), "tools": [1]}, "tools must be a list of JSON schemas"),
    ({"messages": turns("a", "b"), "system": 4}, "system is a number"),
    ({"messages": [{"role": "system", "content": "x"}], "system": "y"}, "both as row key and as first turn"),
    (
        {"conversations": [{"from": "function_call", "value": "weather"}]},
        r"conversations\[0\] is a function call whose",
    ),
    ({"conversations": [{"from": "function_call", "value": "{}"}]}, "has no function name"),
    ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "tool_calls of .* is text; expected a list"),
    ({"input_ids": [], "loss_mask": []}, "input_ids must be a list of at least one integer"),
    ({"input_ids": [1.5], "loss_mask": [1]}, "input_ids must be a list of at least one integer"),
    ({"input_ids": [True], "loss_mask": [1]}, "input_ids must be a list of at least one integer"),
    ({"input_ids": [4, -1], "loss_mask": [1, 1]}, r"the id -1; token ids lie in 0\.\.2147483647"),
    ({"input_ids": [4, 2**31], "loss_mask": [1, 1]}, r"the id 2147483648; token ids lie in 0\.\.2147483647"),
    ({"input_ids": [4, 5]}, "input_ids without loss_mask; add a list"),
    ({"input_ids": [4, 5], "loss_mask": [1]}, "2 input_ids but 1 loss_mask values"),
    ({"input_ids": [4, 5], "loss_mask": [1, 2]}, "loss_mask has the value 2; only 0 and 1"),
    ({"input_ids": [4, 5], "loss_mask": [1, None]}, "loss_mask has the value None; only 0 and 1"),
]


@pytest.mark.parametrize(("row", "found"), FAULTS)
def test_a_faulty_row_is_refused_in_one_line_with_its_place(tmp_path: Path, row: Any, found: str) -> None:
    with pytest.raises(InputError, match=found) as caught:
        read(tmp_path, GOOD, row, GOOD)
    assert str(caught.value).startswith(f"{tmp_path}/data.jsonl:2: ")
    assert "\n" not in str(caught.value)
    rows = list(read_rows([tmp_path / "data.jsonl"]))
    assert [isinstance(item, Conversation) for item in rows] == [True, False, True]


# U12


def test_u12_known_role_names_mean_the_standard_ones(tmp_path: Path) -> None:
    call = {"name": "get_weather", "arguments": {"city": "Rome"}}
    tool = {"name": "get_weather", "parameters": {}}
    sharegpt = {
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "weather?"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "sunny"},
            {"from": "gpt", "value": "yes"},
        ],
        "tools": json.dumps([tool]),
    }
    as_text = {"type": "function", "function": {**call, "arguments": json.dumps(call["arguments"])}}
    standard = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": None, "tool_calls": [as_text]},
            {"role": "tool", "content": "sunny"},
            {"role": "assistant", "content": "yes"},
        ],
        "tools": [tool],
    }
    tokenizer = make_tokenizer(TOOLS)
    samples = [tokenize_conversation(row, tokenizer).samples[0] for row in read(tmp_path, sharegpt, standard)]
    assert samples[0].input_ids.tolist() == samples[1].input_ids.tolist()
    assert "Be brief." in tokenizer.decode(samples[0].input_ids.tolist())
    for sample in samples:
        assert supervised_texts(sample, tokenizer) == [
            '<call>get_weather {"city": "Rome"}</call><|im_end|>',
            "yes<|im_end|>",
        ]


@pytest.mark.parametrize(
    ("role", "names"),
    [
        ("system", ["system"]),
        ("developer", ["developer"]),
        ("user", ["user", "human", "prompter"]),
        ("assistant", ["assistant", "gpt", "chatgpt", "bot", "chatbot", "model"]),
        ("tool", ["tool", "observation", "function", "function_response", "tool_response", "ipython"]),
    ],
)
def test_u12_every_role_name(tmp_path: Path, role: str, names: list[str]) -> None:
    rows = read(tmp_path, *[{"conversations": [{"from": name, "value": "a"}]} for name in names])
    assert [row.messages[0]["role"] for row in rows] == [role] * len(names)


def test_an_empty_list_of_tool_calls_is_none(tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"messages": [{"role": "assistant", "content": "a", "tool_calls": []}]})
    assert row.messages == ({"role": "assistant", "content": "a"},)


def test_u12_messages_may_use_other_names_too(tmp_path: Path) -> None:
    (row,) = read(
        tmp_path, {"messages": [{"role": "human", "content": "a"}, {"role": "bot", "content": "b"}]}
    )
    assert row.messages == tuple(turns("a", "b"))


def test_u12_a_system_prompt_beside_the_turns_is_kept(tmp_path: Path) -> None:
    beside, blank = read(
        tmp_path,
        {"conversations": turns("a", "b"), "system": "x"},
        {"conversations": turns("a", "b"), "system": ""},
    )
    assert beside.messages == ({"role": "system", "content": "x"}, *turns("a", "b"))
    assert blank.messages == tuple(turns("a", "b"))


def test_u12_an_unknown_role_is_refused_unless_it_is_mapped(tmp_path: Path) -> None:
    row = {"messages": [*turns("a"), {"role": "my-model-7b", "content": "b"}]}
    unknown = r"data\.jsonl:1: messages\[1\] has the unknown role 'my-model-7b'; known are .*human.*system"
    with pytest.raises(InputError, match=unknown + r".*--role_map my-model-7b=user"):
        read(tmp_path, row)
    for meaning in ("assistant", "gpt"):
        (mapped,) = read(tmp_path, row, role_map={"my-model-7b": meaning})
        assert mapped.messages == tuple(turns("a", "b"))
    with pytest.raises(InputError, match="--role_map my-model-7b=robot: 'robot' is not a role"):
        read(tmp_path, row, role_map={"my-model-7b": "robot"})
    with pytest.raises(InputError, match="unknown role 'User'"):
        read(tmp_path, {"messages": [{"role": "User", "content": "a"}]})


# U14


def test_u14_missing_content_of_a_call_stays_missing(tmp_path: Path) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    with_null = {"role": "assistant", "content": None, "tool_calls": [call]}
    without_key = {"role": "assistant", "tool_calls": [call]}
    for row in read(tmp_path, {"messages": [with_null]}, {"messages": [without_key]}):
        assert row.messages[0]["content"] is None
        function = {"name": "f", "arguments": {"a": [1]}}
        assert row.messages[0]["tool_calls"] == [{"type": "function", "id": "1", "function": function}]


# U15


def test_u15_text_parts_become_the_text(tmp_path: Path) -> None:
    part = {"type": "text", "text": "2+2?"}
    rows = read(
        tmp_path,
        {"messages": [{"role": "user", "content": "2+2?"}, *turns("4", first="assistant")]},
        {"messages": [{"role": "user", "content": [part]}, *turns("4", first="assistant")]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "2+"}, "2?"]},
                *turns("", "4")[1:],
            ]
        },
    )
    tokenizer = make_tokenizer(OWN)
    one, two, three = (tokenize_conversation(row, tokenizer).samples[0].input_ids.tolist() for row in rows)
    assert one == two == three


@pytest.mark.parametrize("kind", ["image_url", "input_audio"])
def test_u15_other_parts_are_refused_by_type(tmp_path: Path, kind: str) -> None:
    bad = {
        "messages": [{"role": "user", "content": [{"type": kind, kind: {"text": "x"}}]}, *turns("a", "b")[1:]]
    }
    with pytest.raises(
        InputError, match=rf"data\.jsonl:2: the content of messages\[0\] has a part of type '{kind}'"
    ):
        read(tmp_path, GOOD, bad)
    _, report = load_samples(
        [tmp_path / "data.jsonl"], make_tokenizer(OWN), vocab_size=1000, on_bad_row="skip", progress=False
    )
    assert (report.rows_read, report.rows_used, report.rows_refused) == (2, 1, 1)
    assert kind in report.messages[0]


# U16


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbf" + GOOD.encode() + b"\n" + GOOD.encode() + b"\n",
        GOOD.encode() + b"\r\n" + GOOD.encode() + b"\r\n",
        b"\n\n" + GOOD.encode() + b"\n \t\n" + GOOD.encode() + b"\n\n",
        GOOD.encode() + b"\n" + GOOD.encode(),
    ],
    ids=["BOM", "CRLF", "blank lines", "no final newline"],
)
def test_u16_harmless_forms_are_accepted(tmp_path: Path, data: bytes) -> None:
    rows = list(read_conversations([write(tmp_path / "data.jsonl", data)]))
    assert [row.messages for row in rows] == [tuple(turns("2+2?", "4"))] * 2


def test_u16_text_beyond_ascii_is_kept(tmp_path: Path) -> None:
    text = "\U0001f600 e\u0301 \u2028 \x85"  # line separators of Unicode do not end a line of JSONL
    escaped, raw = (
        json.dumps({"messages": turns(text, text)}),
        json.dumps({"messages": turns(text, text)}, ensure_ascii=False),
    )
    assert "\\ud83d\\ude00" in escaped
    assert [row.messages for row in read(tmp_path, escaped, raw)] == [tuple(turns(text, text))] * 2


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (
            lambda: GOOD.replace("2+2?", r"ab\ud800c").encode(),
            r":2: found a lone surrogate \\ud800 at character 3 of mess",
        ),
        (
            lambda: GOOD.replace("2+2?", r"\udc00").encode(),
            r":2: found a lone surrogate \\udc00 at character 1 of mess",
        ),
        (
            lambda: GOOD.replace("2+2?", r"a\u0000").encode(),
            r":2: found a NUL character at character 2 of messages\[0\]",
        ),
        (lambda: GOOD.replace("2+2?", "\0").encode(), r":2: found a NUL byte at byte \d+ of the line"),
        (
            lambda: GOOD.replace("2+2?", "\xe9").encode("latin-1"),
            r":2: byte 0xe9 at byte \d+ of the line is not UTF-8",
        ),
        (
            lambda: GOOD.replace("2+2?", "\ud800").encode("utf-8", "surrogatepass"),
            r":2: byte 0xed .* is not UTF-8",
        ),
    ],
    ids=["high surrogate", "low surrogate", "escaped NUL", "NUL", "Latin-1", "raw surrogate"],
)
def test_u16_broken_text_is_refused_with_its_place(
    tmp_path: Path, make: Callable[[], bytes], found: str
) -> None:
    path = write(tmp_path / "data.jsonl", GOOD.encode() + b"\n" + make() + b"\n")
    with pytest.raises(InputError, match=r"data\.jsonl" + found):
        list(read_conversations([path]))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_u16_utf_16_is_named(tmp_path: Path, encoding: str) -> None:
    path = write(tmp_path / "data.jsonl", (GOOD + "\n").encode(encoding))
    found = "UTF-16" if encoding == "utf-16" else "NUL byte"
    with pytest.raises(InputError, match=rf"data\.jsonl:1: .*{found}.*UTF-8"):
        list(read_conversations([path]))


def test_a_lone_surrogate_in_a_call_is_found(tmp_path: Path) -> None:
    call = {"name": "f", "arguments": {"city": "R\ud800"}}
    row = {"messages": [{"role": "assistant", "tool_calls": [{"function": call}]}]}
    with pytest.raises(
        InputError, match=r"surrogate.*of messages\[0\]\.tool_calls\[0\]\.function\.arguments\.city"
    ):
        read(tmp_path, row)


def test_no_more_rows_are_read_than_asked_for(tmp_path: Path) -> None:
    rows = [
        json.dumps({"messages": turns("yes", "no")}),
        json.dumps({"messages": turns("one", "two")}),
        "broken",
    ]
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text("\n".join(rows))
    second.write_text("broken too")
    samples, report = load_samples(
        [first, second], make_tokenizer(OWN), vocab_size=400, max_rows=2, progress=False
    )
    assert [sample.source for sample in samples] == [f"{first}:1", f"{first}:2"]
    assert report.rows_read == 2
