"""Masks from chat templates: cases U01-U11 and U13-U15 of user_cases.md, with expectations drawn by hand."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from eagle_train.data.chat import PROBE, TokenizedConversation, tokenize_conversation
from eagle_train.data.conversations import Conversation
from eagle_train.data.loading import load_samples
from eagle_train.data.samples import Sample, answer_remaining_from_spans, spans_from_mask, truncate
from eagle_train.errors import InputError
from tests.data.templates import (
    DEFAULT_SYSTEM,
    EMPTY,
    EOS_AT_THE_END,
    FUSE,
    GEMMA,
    GEN,
    LLAMA3,
    NO_ASSISTANT,
    ORDINARY_END,
    OWN,
    STRIP,
    TOOLS,
    make_tokenizer,
    supervised_spans,
    supervised_texts,
    turns,
)

VOCAB_SIZE = 1000


def tokenise(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **how: Any
) -> TokenizedConversation:
    row = {key: how.pop(key) for key in ("finish_reason", "tools") if key in how}
    return tokenize_conversation(Conversation("data.jsonl:1", tuple(messages), **row), tokenizer, **how)


def only_sample(result: TokenizedConversation) -> Sample:
    assert len(result.samples) == 1
    return result.samples[0]


def whole_ids(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **options: Any
) -> list[int]:
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)


def texts(result: TokenizedConversation, tokenizer: PreTrainedTokenizerFast) -> list[list[str]]:
    return [supervised_texts(sample, tokenizer) for sample in result.samples]


def kinds(result: TokenizedConversation) -> list[str]:
    return [note.kind for note in result.notes]


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# U01


def test_u01_without_marks_the_answer_and_its_end_are_supervised() -> None:
    tokenizer = make_tokenizer(OWN)
    messages = turns("2+2?", "4")
    sample = only_sample(tokenise(tokenizer, messages))
    assert sample.input_ids.tolist() == whole_ids(tokenizer, messages)
    assert sample.input_ids.dtype == np.int32
    pieces = tokenizer.convert_ids_to_tokens(sample.input_ids.tolist())
    # ... <|im_start|> assistant \n 4 <|im_end|> \n: the two before the last line break.
    assert pieces[-3:] == ["4", "<|im_end|>", "Ċ"]
    length = len(pieces)
    assert supervised_spans(sample) == [(length - 3, length - 1)]
    assert sample.answer_remaining.tolist() == [0] * (length - 4) + [2, 1, 0, 0]


def test_u01_a_template_without_assistant_turns_is_refused_with_its_line(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "data.jsonl", {"messages": turns("2+2?", "4")}, {"messages": turns("1?", "2")}
    )
    with pytest.raises(
        InputError, match=r"data\.jsonl:\d: the chat template prints nothing for assistant turn 1"
    ):
        load_samples([path], make_tokenizer(NO_ASSISTANT), vocab_size=VOCAB_SIZE, progress=False)


def test_u01_rows_without_supervision_are_counted(tmp_path: Path) -> None:
    empty = {"messages": turns("2+2?", ""), "finish_reason": "length"}
    path = write_rows(tmp_path / "data.jsonl", {"messages": turns("2+2?", "4")}, empty)
    samples, report = load_samples([path], make_tokenizer(OWN), vocab_size=VOCAB_SIZE, progress=False)
    assert (report.rows_used, report.rows_without_supervision, report.answer_tokens) == (2, 1, 2)
    assert (report.turns_used, report.turns_left_out) == (1, 1)
    assert report.tokens == sum(map(len, samples))
    assert report.warnings == {"empty_answer": 1}


# U02


def test_u02_system_text_is_rendered_once_and_never_supervised() -> None:
    tokenizer = make_tokenizer(OWN)
    talk = turns("yes?", "no")
    brief = [{"role": "system", "content": "Be brief."}, *talk]
    blank = [{"role": "system", "content": ""}, *talk]
    for messages, copies in ((talk, 1), (brief, 0), (blank, 0)):
        sample = only_sample(tokenise(tokenizer, messages))
        assert sample.input_ids.tolist() == whole_ids(tokenizer, messages)
        assert tokenizer.decode(sample.input_ids.tolist()).count(DEFAULT_SYSTEM) == copies
        assert supervised_texts(sample, tokenizer) == ["no<|im_end|>"]


# U03


@pytest.mark.parametrize("train_on", ["all", "last"])
def test_u03_stripped_thinking_gives_a_sample_per_changed_turn(train_on: Any) -> None:
    tokenizer = make_tokenizer(STRIP)
    messages = turns("one", "<think>abc</think>yes", "two", "<think>d</think>no")
    result = tokenise(tokenizer, messages, train_on=train_on)
    first = ["<think>abc</think>yes<|im_end|>"]
    second = ["<think>d</think>no<|im_end|>"]
    assert texts(result, tokenizer) == ([first, second] if train_on == "all" else [second])
    assert (result.turns_used, result.turns_left_out) == ((2, 0) if train_on == "all" else (1, 1))
    assert result.samples[-1].input_ids.tolist() == whole_ids(tokenizer, messages)
    assert "abc" not in tokenizer.decode(result.samples[-1].input_ids.tolist())
    if train_on == "all":
        assert tokenizer.decode(result.samples[0].input_ids.tolist()) == (
            "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n<think>abc</think>yes<|im_end|>"
        )


# U04


def test_u04_what_the_generation_prompt_holds_is_prompt() -> None:
    tokenizer = make_tokenizer(EMPTY)
    messages = turns("one?", "yes")
    options = {"enable_thinking": False}
    result = tokenise(tokenizer, messages, template_options=options)
    assert texts(result, tokenizer) == [["yes<|im_end|>"]]
    assert "answer_opens_with_template_text" not in kinds(result)
    # "\n\n" is one token where the prompt ends and two before "yes": serving sees the former.
    prompt = whole_ids(tokenizer, messages[:1], add_generation_prompt=True, **options)
    sample = only_sample(result)
    assert sample.input_ids[: len(prompt)].tolist() == prompt
    assert whole_ids(tokenizer, messages, **options)[: len(prompt)] != prompt


def test_u04_an_opening_that_the_prompt_does_not_supply_is_a_counted_warning(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(EMPTY)
    path = write_rows(tmp_path / "data.jsonl", *[{"messages": turns("one?", "yes", "two?", "no")}] * 3)
    samples, report = load_samples([path], tokenizer, vocab_size=VOCAB_SIZE, progress=False)
    assert supervised_texts(samples[0], tokenizer) == [
        "<think>\n\n</think>\n\nyes<|im_end|>",
        "<think>\n\n</think>\n\nno<|im_end|>",
    ]
    assert report.warnings == {"answer_opens_with_template_text": 6}
    assert "data.jsonl:1" in report.messages[0]
    assert "enable_thinking" in report.messages[0]


# U05


@pytest.mark.parametrize("template", [OWN, GEN, LLAMA3])
def test_u05_position_decides_not_words(template: str) -> None:
    tokenizer = make_tokenizer(template)
    same = only_sample(tokenise(tokenizer, turns("yes", "yes", "yes", "yes")))
    control = only_sample(tokenise(tokenizer, turns("no", "yes", "no", "yes")))
    assert len(same) == len(control)
    assert supervised_spans(same) == supervised_spans(control)
    end = "<|eot_id|>" if template == LLAMA3 else "<|im_end|>"
    assert supervised_texts(same, tokenizer) == ["yes" + end, "yes" + end]
    quoted = only_sample(tokenise(tokenizer, turns("one", "yes", "yes" + end, "two")))
    assert supervised_texts(quoted, tokenizer) == ["yes" + end, "two" + end]


# U06


def test_u06_the_end_of_turn_need_not_be_eos() -> None:
    tokenizer = make_tokenizer(OWN)
    tokenizer.eos_token = "<|endoftext|>"
    sample = only_sample(tokenise(tokenizer, turns("one", "yes", "two", "no")))
    assert supervised_texts(sample, tokenizer) == ["yes<|im_end|>", "no<|im_end|>"]
    newline = tokenizer.convert_tokens_to_ids("Ċ")
    assert all(sample.input_ids[stop] == newline for _, stop in supervised_spans(sample))


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (LLAMA3, "<|eot_id|>"),
        (GEMMA, "<end_of_turn>"),
        (EOS_AT_THE_END, "<|im_end|>"),
        (ORDINARY_END, " [stop]"),
    ],
)
def test_u06_each_template_closes_a_turn_in_its_own_way(template: str, end: str) -> None:
    tokenizer = make_tokenizer(template)
    messages = turns("one", "yes", "two", "no")
    sample = only_sample(tokenise(tokenizer, messages))
    assert sample.input_ids.tolist() == whole_ids(tokenizer, messages)
    assert [text.removeprefix(" ") for text in supervised_texts(sample, tokenizer)] == [
        "yes" + end,
        "no" + end,
    ]


def test_a_template_without_an_end_of_turn_supervises_the_content_and_says_so() -> None:
    tokenizer = make_tokenizer(FUSE)
    result = tokenise(tokenizer, turns("one", "yes", "two", "no"))
    # "assistant: " + "yes" would be "assistant", ":", " yes": the border lies inside a token.
    assert texts(result, tokenizer) == [["yes"], ["no"]]
    assert kinds(result).count("no_end_of_turn") == 2
    prompt = whole_ids(tokenizer, turns("one", "yes", "two"), add_generation_prompt=True)
    assert result.samples[1].input_ids[: len(prompt)].tolist() == prompt
    assert result.samples[1].answer_remaining.tolist()[len(prompt) - 1] == len(result.samples[1]) - len(
        prompt
    )


@pytest.mark.parametrize("trims_offsets", [False, True])
def test_a_fused_token_is_never_supervised(trims_offsets: bool) -> None:
    """Offsets without blanks hide that " yes" begins before the border."""
    tokenizer = make_tokenizer(FUSE, trims_offsets=trims_offsets)
    fused = tokenizer.convert_tokens_to_ids("Ġyes")
    assert fused in whole_ids(tokenizer, turns("one", "yes"))
    assert fused not in only_sample(tokenise(tokenizer, turns("one", "yes"))).input_ids.tolist()


# U07


def test_u07_end_tokens_inside_a_prompt_change_nothing() -> None:
    tokenizer = make_tokenizer(OWN)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    for side in ("left", "right"):
        tokenizer.padding_side = side
        sample = only_sample(tokenise(tokenizer, turns("one<|im_end|>two<|im_end|>", "yes")))
        assert supervised_texts(sample, tokenizer) == ["yes<|im_end|>"]


# U08


def test_u08_one_bos_where_template_and_tokenizer_both_write_it() -> None:
    tokenizer = make_tokenizer(LLAMA3, adds_bos=True)
    messages = turns("one", "yes")
    assert tokenizer("one").input_ids[0] == tokenizer.bos_token_id
    sample = only_sample(tokenise(tokenizer, messages))
    assert sample.input_ids.tolist().count(tokenizer.bos_token_id) == 1
    assert sample.input_ids.tolist() == whole_ids(tokenizer, messages)
    prompt = whole_ids(tokenizer, messages[:1], add_generation_prompt=True)
    assert sample.input_ids[: len(prompt)].tolist() == prompt
    assert supervised_spans(sample)[0][0] == len(prompt)


# U09


def test_u09_a_cut_by_length_is_no_end_of_turn() -> None:
    limit = 64
    crossing = Sample(np.arange(80, dtype=np.int32), answer_remaining_from_spans(80, [(40, 80)]), "a:1")
    long_prompt = Sample(np.arange(80, dtype=np.int32), answer_remaining_from_spans(80, [(70, 80)]), "a:2")
    one_token = Sample(np.arange(70, dtype=np.int32), answer_remaining_from_spans(70, [(63, 70)]), "a:3")
    cut = [truncate(sample, limit) for sample in (crossing, long_prompt, one_token)]
    assert [len(sample) for sample in cut] == [64, 64, 64]
    assert [sample.num_cut_tokens for sample in cut] == [16, 16, 6]
    # (a) keeps 24 answer tokens, 40..63: rows 39..61 predict two or more of them; (c) keeps one.
    assert [sample.num_supervised_rows for sample in cut] == [23, 0, 0]
    assert [int((sample.answer_remaining >= 4).sum()) for sample in cut] == [21, 0, 0]
    assert cut[0].answer_remaining[[38, 39, 61, 62, 63]].tolist() == [0, 24, 2, 1, 0]
    assert cut[2].answer_remaining[[61, 62, 63]].tolist() == [0, 1, 0]


@pytest.mark.parametrize("template", [OWN, GEN, LLAMA3, GEMMA, ORDINARY_END, FUSE])
def test_an_answer_that_was_cut_when_made_has_no_end_of_turn(template: str) -> None:
    tokenizer = make_tokenizer(template)
    result = tokenise(tokenizer, turns("one", "yes", "two", "no"), finish_reason="length")
    first, last = [text.removeprefix(" ") for sample in texts(result, tokenizer) for text in sample]
    assert last == "no"
    assert first.startswith("yes")
    assert first != "yes" or template == FUSE
    assert "marks_disagree" not in kinds(result)


# U10

TALKS = [
    turns("2+2?", "4"),
    turns("yes", "yes", "yes", "yes"),
    turns("one", "<think>abc</think>yes", "two", "<think>d</think>no"),
    [{"role": "system", "content": "Be brief."}, *turns("one", "yes")],
    [{"role": "system", "content": ""}, *turns("one", "yes")],
    turns("yes", "one", "no", first="assistant"),
    turns("one", "ends in blanks  ", "two", "and a line\n\n"),
    turns("one", "  begins with blanks", "two", "\n\nand lines"),
    turns("one", "\u0bb8\u0bcd three bytes", "two", "\U0001f600\U0001f600", "three", "\U0001f600"),
    turns("one\u00e9", "\u00e9", "two\U0001f600", "e\u0301"),
    turns("one<|im_end|>", "yes"),
    [*turns("one", "yes"), *turns("two", "no")[:1]],
    [*turns("one"), *turns("two", "no")],
    [*turns("one", "yes"), *turns("no", first="assistant")],
]


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("trims_offsets", [False, True])
def test_u10_marks_and_rendering_agree(talk: list[dict[str, Any]], trims_offsets: bool) -> None:
    marked = make_tokenizer(GEN, trims_offsets=trims_offsets)
    plain = make_tokenizer(
        GEN.replace("{% generation %}", "").replace("{% endgeneration %}", ""), trims_offsets=trims_offsets
    )
    by_rendering, by_both = tokenise(plain, talk), tokenise(marked, talk)
    assert "marks_disagree" not in kinds(by_both)
    assert [s.input_ids.tolist() for s in by_rendering.samples] == [
        s.input_ids.tolist() for s in by_both.samples
    ]
    answers = [m["content"] + "<|im_end|>" for m in talk if m["role"] == "assistant"]
    for result in (by_rendering, by_both):
        assert sorted(itertools.chain(*texts(result, plain))) == sorted(answers)
    encoded = marked.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
    if len(by_rendering.samples) == 1 and "turn_trained_on_as_a_sample_of_its_own" not in kinds(by_rendering):
        assert supervised_spans(by_rendering.samples[0]) == spans_from_mask(encoded["assistant_masks"])
    else:  # "\n" of the prompt and "\n\n" of the answer are one token; by marks it would be supervised
        assert any(m["content"].startswith(("\n", "  ")) for m in talk)


@pytest.mark.parametrize(
    ("mark", "covered"),
    [
        ("{% generation %}{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>' }}", "'yes'"),
        (
            "{% generation %}{{ message['content'] + '<|im_end|>!' }}{% endgeneration %}",
            "'yes<|im_end|>!'",
        ),
    ],
)
def test_u10_disagreement_is_reported_and_rendering_decides(mark: str, covered: str) -> None:
    ours = "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    tokenizer = make_tokenizer(GEN.replace(ours, mark))
    assert tokenizer.chat_template != GEN
    result = tokenise(tokenizer, turns("one", "yes"))
    assert kinds(result) == ["marks_disagree"]
    assert f"marks cover {covered}, but" in result.notes[0].message
    assert texts(result, tokenizer) == [["yes<|im_end|>"]]


def test_a_turn_without_any_mark_is_left_out() -> None:
    first_only = GEN.replace("{% if message['role'] == 'assistant' %}", "{% if loop.index0 == 1 %}")
    tokenizer = make_tokenizer(first_only)
    result = tokenise(tokenizer, turns("one", "yes", "two", "no"))
    assert texts(result, tokenizer) == [["yes<|im_end|>"]]
    assert (result.turns_used, result.turns_left_out, kinds(result)) == (1, 1, ["turn_not_marked"])


def test_u10_tokenizers_without_offsets_or_template_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no chat template; name one with --chat_template FILE"):
        tokenise(make_tokenizer(None), turns("one", "yes"))
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", property(lambda self: False))
    with pytest.raises(InputError, match=r"slow one.*tokenizer\.json"):
        tokenise(make_tokenizer(OWN), turns("one", "yes"))


# U11


def test_u11_supervised_rows_of_three_documents(tmp_path: Path) -> None:
    masks = ([0] * 3 + [1] * 4, [1] * 5, [0] * 6 + [1] * 2)
    rows = [{"input_ids": list(range(len(mask))), "loss_mask": mask} for mask in masks]
    path = write_rows(tmp_path / "data.jsonl", *rows)
    samples, report = load_samples([path], make_tokenizer(None), vocab_size=10, progress=False)
    counts = [[int((s.answer_remaining >= k + 2).sum()) for s in samples] for k in range(3)]
    assert counts == [[3, 3, 1], [2, 2, 0], [1, 1, 0]]
    assert samples[0].answer_remaining.tolist() == [0, 0, 4, 3, 2, 1, 0]
    assert (report.rows_read, report.turns_used, report.answer_tokens) == (3, 3, 4 + 4 + 2)


# U13

ORDERS: dict[str, list[dict[str, Any]]] = {
    "empty": [],
    "system only": [{"role": "system", "content": "Be brief."}],
    "assistant first": turns("yes", "one", "no", first="assistant"),
    "user, user": [*turns("one"), *turns("two", "no")],
    "ends with user": turns("one", "yes", "two"),
    "assistant, assistant": [*turns("one", "yes"), *turns("no", first="assistant")],
}
ALTERNATE = "roles must alternate"


@pytest.mark.parametrize(
    ("order", "own", "strict"),
    [
        ("empty", "messages is empty", "messages is empty"),
        ("system only", "no assistant turn", "no assistant turn"),
        ("assistant first", ["yes", "no"], ALTERNATE),
        ("user, user", ["no"], ALTERNATE),
        ("ends with user", ["yes"], ["yes"]),
        ("assistant, assistant", ["yes", "no"], ALTERNATE),
    ],
)
def test_u13_order_of_turns(
    tmp_path: Path, order: str, own: str | list[str], strict: str | list[str]
) -> None:
    good = {"messages": turns("one", "two")}
    path = write_rows(tmp_path / "data.jsonl", good, {"messages": ORDERS[order]}, good)
    for template, end, expected in ((OWN, "<|im_end|>", own), (GEMMA, "<end_of_turn>", strict)):
        tokenizer = make_tokenizer(template)
        samples, report = load_samples(
            [path], tokenizer, vocab_size=VOCAB_SIZE, on_bad_row="skip", progress=False
        )
        assert report.rows_read == report.rows_used + report.rows_refused == 3
        if isinstance(expected, list):
            assert report.rows_refused == 0
            assert supervised_texts(samples[1], tokenizer) == [text + end for text in expected]
            continue
        assert report.rows_refused == 1
        assert f"{path}:2: " in report.messages[0]
        assert expected in report.messages[0]
        with pytest.raises(InputError, match=rf"data\.jsonl:2: .*{expected}.*--on_bad_row skip"):
            load_samples([path], tokenizer, vocab_size=VOCAB_SIZE, progress=False)


def test_a_template_that_refuses_the_system_role_is_quoted() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *turns("one", "yes")]
    with pytest.raises(InputError, match=r"data\.jsonl:1: .*System role not supported"):
        tokenise(make_tokenizer(GEMMA), messages)


# U14

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}


def tool_talk(**call_turn: Any) -> list[dict[str, Any]]:
    call = {"role": "assistant", "tool_calls": [CALL], **call_turn}
    return [*turns("weather?"), call, {"role": "tool", "content": "sunny"}, *turns("yes", first="assistant")]


@pytest.mark.parametrize("call_turn", [{"content": None}, {}, {"content": ""}])
def test_u14_tool_calls_are_supervised_and_results_are_not(tmp_path: Path, call_turn: dict[str, Any]) -> None:
    tokenizer = make_tokenizer(TOOLS)
    path = write_rows(tmp_path / "data.jsonl", {"messages": tool_talk(**call_turn), "tools": [TOOL]})
    samples, report = load_samples([path], tokenizer, vocab_size=VOCAB_SIZE, progress=False)
    assert [supervised_texts(sample, tokenizer) for sample in samples] == [
        ['<call>get_weather {"city": "Rome"}</call><|im_end|>', "yes<|im_end|>"]
    ]
    rendered = tokenizer.decode(samples[0].input_ids.tolist())
    assert "sunny" in rendered
    assert '"parameters"' in rendered
    assert report.warnings == {}


def test_u14_a_call_may_close_in_its_own_way() -> None:
    own_close = (
        TOOLS.replace("{{ '<|im_end|>\n' }}{% endfor %}{% if add", "{{ CLOSE }}{% endfor %}{% if add")
        .replace("{{ CLOSE }}", "{{ '<end_of_turn>\n' if message['tool_calls'] else '<|im_end|>\n' }}")
        .replace("'<call>'", "'<start_of_turn>'")
    )
    tokenizer = make_tokenizer(own_close)
    call = '<start_of_turn>get_weather {"city": "Rome"}</call>'
    result = tokenise(tokenizer, tool_talk(content=None))
    assert texts(result, tokenizer) == [[call + "<end_of_turn>", "yes<|im_end|>"]]
    cut = tokenise(tokenizer, tool_talk(content=None)[:2], finish_reason="length")
    assert texts(cut, tokenizer) == [[call]]


def test_words_of_ours_in_the_text_change_nothing() -> None:
    tokenizer = make_tokenizer(EOS_AT_THE_END)
    result = tokenise(tokenizer, turns(PROBE, f"{PROBE} yes", f"{PROBE}<|im_end|>", f"no {PROBE}"))
    assert texts(result, tokenizer) == [[f"{PROBE} yes<|im_end|>", f"no {PROBE}<|im_end|>"]]
    assert result.notes == ()


def test_u14_null_content_is_offered_as_it_is_before_an_empty_text() -> None:
    refuses_empty = TOOLS.replace(
        "{% if message['content'] %}",
        "{% if message['content'] == '' %}{{ raise_exception('empty') }}{% endif %}"
        "{% if message['content'] %}",
    )
    needs_text = TOOLS.replace("{% if message['content'] %}{{", "{% if true %}{{ '' +")
    for template in (refuses_empty, needs_text):
        tokenizer = make_tokenizer(template)
        sample = only_sample(tokenise(tokenizer, tool_talk(content=None)))
        assert supervised_texts(sample, tokenizer)[0] == '<call>get_weather {"city": "Rome"}</call><|im_end|>'


def test_u14_a_call_that_the_template_does_not_render_is_refused() -> None:
    for content in (None, "calling get_weather is not a call"):
        with pytest.raises(InputError, match=r"data\.jsonl:1: .*does not render the tool call 'get_weather'"):
            tokenise(make_tokenizer(OWN), tool_talk(content=content))


def test_tools_that_the_template_does_not_render_are_noted() -> None:
    assert kinds(tokenise(make_tokenizer(OWN), turns("one", "yes"), tools=(TOOL,))) == ["tools_not_rendered"]


# Rows between file and template


def test_load_samples_refuses_ids_beyond_the_vocabulary(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", {"input_ids": [1, 2, 10], "loss_mask": [0, 1, 1]})
    with pytest.raises(
        InputError, match=r"data\.jsonl:1: token id 10 is beyond .* vocabulary of 10 \(ids 0\.\.9\)"
    ):
        load_samples([path], make_tokenizer(None), vocab_size=10, progress=False)
    path = write_rows(tmp_path / "text.jsonl", {"messages": turns("one", "yes")})
    with pytest.raises(
        InputError, match=r"text\.jsonl:1: token id \d+ is beyond the target's vocabulary of 20"
    ):
        load_samples([path], make_tokenizer(OWN), vocab_size=20, progress=False)


def test_load_samples_refuses_a_file_without_supervision(tmp_path: Path) -> None:
    good = write_rows(tmp_path / "good.jsonl", {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]})
    bare = write_rows(tmp_path / "bare.jsonl", {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]})
    with pytest.raises(InputError, match=r"bare\.jsonl:1: no token is supervised; nor can any other row"):
        load_samples([good, bare], make_tokenizer(None), vocab_size=10, progress=False)


def test_load_samples_refuses_files_whose_rows_are_all_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", {"messages": []})
    with pytest.raises(InputError, match=r"data\.jsonl:1: messages is empty"):
        load_samples([path], make_tokenizer(OWN), vocab_size=VOCAB_SIZE, on_bad_row="skip", progress=False)


def test_a_tokenizer_without_template_is_no_fault_of_the_rows(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", {"messages": turns("one", "yes")})
    with pytest.raises(InputError, match="no chat template"):
        load_samples([path], make_tokenizer(None), vocab_size=10, on_bad_row="skip", progress=False)


def test_samples_say_where_they_come_from(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "data.jsonl", {"messages": turns("one", "yes")}, {"messages": turns("two", "no")}
    )
    samples, _ = load_samples([path], make_tokenizer(OWN), vocab_size=VOCAB_SIZE, progress=False)
    assert [sample.source for sample in samples] == [f"{path}:1", f"{path}:2"]


@pytest.mark.parametrize(("train_on", "supervised"), [("all", [(1, 3), (5, 8)]), ("last", [(5, 8)])])
def test_turns_of_a_token_row_are_chosen_as_those_of_a_conversation(
    train_on: str, supervised: list[tuple[int, int]], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input_ids": list(range(9)), "loss_mask": [0, 1, 1, 0, 0, 1, 1, 1, 0]}))
    samples, _ = load_samples(
        [path],
        make_tokenizer(OWN),
        vocab_size=400,
        train_on=train_on,
        progress=False,  # type: ignore[arg-type]
    )
    assert supervised_spans(samples[0]) == supervised
