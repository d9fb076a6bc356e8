"""Prompt files: known by their keys, rendered as in training, every fault as file:line."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from eagle_train.data.chat import tokenize_conversation
from eagle_train.data.conversations import Conversation
from eagle_train.decode.prompts import PromptReport, read_prompts
from eagle_train.decode.results import Prompt
from eagle_train.errors import InputError
from tests.commands import write_jsonl
from tests.data.templates import EMPTY, LLAMA3, OWN, make_tokenizer, supervised_spans, turns

TOKENIZER = make_tokenizer(OWN)


def read(path: Path, **how: Any) -> tuple[list[Prompt], PromptReport]:
    return read_prompts([path], TOKENIZER, **how)


def rendered(text: str) -> str:
    return TOKENIZER.apply_chat_template(turns(text), tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("row", "category"),
    [
        ({"question_id": 81, "category": "writing", "turns": ["yes no", "one two"]}, "writing"),
        ({"question_id": "a", "category": "arena", "turns": [{"content": "yes no"}]}, "arena"),
        ({"question": "yes no", "answer": "#### 4"}, "math"),
        ({"task_id": "HumanEval/0", "prompt": "yes no", "entry_point": "f", "test": "t"}, "code"),
        ({"prompt": "yes no"}, ""),
        ({"prompt": "yes no", "category": "mine"}, "mine"),
        ({"messages": turns("yes no")}, ""),
        ({"messages": turns("yes no", "4")}, ""),
        ({"conversations": [{"from": "human", "value": "yes no"}]}, ""),
    ],
)
def test_a_row_is_known_by_its_keys(tmp_path: Path, row: dict[str, Any], category: str) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [row])
    [prompt], _ = read(path)
    assert TOKENIZER.decode(prompt.token_ids) == rendered("yes no")
    assert (prompt.category, prompt.source) == (category, f"{path}:1")


def test_token_ids_are_taken_as_they_are_and_need_no_template(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"input_ids": [5, 6, 7]}])
    [prompt], _ = read_prompts([path], make_tokenizer(None))
    assert prompt.token_ids == (5, 6, 7)


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"turns": ["yes", "no", "one"]},
        {"turns": ["yes"]},
        {"messages": turns("yes", "no", "one", "two")},
        {"messages": turns("yes", "no", "one")},
    ]
    prompts, report = read(write_jsonl(tmp_path / "p.jsonl", rows))
    assert report == PromptReport(
        rows_read=4, rows_not_measured=0, later_turns_left_out=2, answers_left_out=1
    )
    assert prompts[2].token_ids == prompts[3].token_ids  # the history stays, its last answer goes
    assert len(report.notes()) == 2
    assert PromptReport(4, 0, 0, 0).notes() == []


def test_fewer_prompts_are_spread_over_the_file(tmp_path: Path) -> None:
    rows = [{"prompt": f"one {i}", "category": "ab"[i >= 6]} for i in range(12)]
    prompts, report = read(write_jsonl(tmp_path / "p.jsonl", rows), max_prompts=4)
    assert [int(prompt.source.split(":")[-1]) for prompt in prompts] == [1, 4, 7, 10]
    assert [prompt.category for prompt in prompts] == ["a", "a", "b", "b"]
    assert (report.rows_read, report.rows_not_measured) == (12, 8)


def test_spec_bench_counts_mt_benchs_categories_as_one_and_mt_bench_its_own(tmp_path: Path) -> None:
    mt_bench = [{"turns": ["yes"], "category": name} for name in ("writing", "math", "stem")]
    others = [{"turns": ["yes"], "category": name} for name in ("qa", "rag", "math_reasoning")]
    prompts, _ = read(write_jsonl(tmp_path / "mt.jsonl", mt_bench))
    assert [prompt.category for prompt in prompts] == ["writing", "math", "stem"]
    prompts, _ = read(write_jsonl(tmp_path / "spec.jsonl", mt_bench + others))
    assert [prompt.category for prompt in prompts] == ["mt_bench"] * 3 + ["qa", "rag", "math_reasoning"]


def test_u04_u08_a_prompt_is_what_training_puts_before_the_answer(tmp_path: Path) -> None:
    messages = turns("one", "yes")
    path = write_jsonl(tmp_path / "p.jsonl", [{"messages": messages}])
    for template, options in ((LLAMA3, {}), (EMPTY, {"enable_thinking": False}), (EMPTY, {})):
        tokenizer = make_tokenizer(template, adds_bos=True)
        conversation = Conversation(source="a:1", messages=tuple(messages))
        [sample] = tokenize_conversation(conversation, tokenizer, template_options=options).samples
        start = supervised_spans(sample)[0][0]
        [prompt], _ = read_prompts([path], tokenizer, template_options=options)
        assert prompt.token_ids == tuple(sample.input_ids[:start].tolist())
        assert prompt.token_ids.count(tokenizer.bos_token_id) == (template == LLAMA3)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": " \n"}, ("the prompt is empty", "prompt")),
        ({"turns": []}, ("turns is not a list of at least one text",)),
        ({"turns": ["yes", 4]}, ("turns is not a list of at least one text",)),
        ({"question": ["yes"]}, ("question is not text",)),
        ({"prompt": "yes", "turns": ["yes"]}, ("turns and prompt", "exactly one of")),
        ({"text": "yes"}, ("keys text", "exactly one of turns, question, prompt")),
        ({"input_ids": []}, ("at least one integer token id",)),
        ({"input_ids": [-3]}, ("-3",)),
        ({"messages": [{"role": "system", "content": "yes"}]}, ("a turn of system", "ends with a user turn")),
        ({"messages": turns("4", first="assistant")}, ("found nothing", "ends with a user turn")),
        ({"messages": turns(" ")}, ("the last user turn is empty",)),
        ({"messages": [{"role": "narrator", "content": "yes"}]}, ("narrator",)),
        ({"prompt": "yes", "category": 4}, ("category is 4",)),
        ({"prompt": "a\ud800"}, ("lone surrogate",)),
        (["yes"], ("a list where a JSON object is expected",)),
    ],
)
def test_a_faulty_row_is_named_with_its_line(tmp_path: Path, row: Any, words: tuple[str, ...]) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "yes"}, row])
    with pytest.raises(InputError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    for word in words:
        assert word in str(caught.value)


def test_a_file_without_rows_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n \n")
    deep = tmp_path / "deep.jsonl"
    deep.write_text('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    for path, words in (
        (empty, "no rows"),
        (tmp_path / "absent.jsonl", "no such file; check the path given as --prompts"),
        (tmp_path / "prompts.txt", "JSONL"),
        (deep, "nested too deeply"),
    ):
        with pytest.raises(InputError, match=words):
            read(path)
    with pytest.raises(InputError, match="no chat template"):
        read_prompts([write_jsonl(tmp_path / "p.jsonl", [{"prompt": "yes"}])], make_tokenizer(None))


def test_a_compressed_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"prompt": "yes", "entry_point": "f"}).encode()))
    assert read(path)[0][0].category == "code"


@pytest.mark.shared
def test_the_real_sets_give_their_known_categories(shared: Path) -> None:
    folder = shared / "data" / "eval"
    found = {}
    for name in ("spec_bench.jsonl", "mt_bench.jsonl", "gsm8k_test.jsonl", "HumanEval.jsonl.gz"):
        prompts, report = read(folder / name)
        found[name] = (dict(Counter(prompt.category for prompt in prompts)), report.later_turns_left_out)
    groups = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
    assert found["spec_bench.jsonl"] == (dict.fromkeys(groups, 80), 80)
    own = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
    assert found["mt_bench.jsonl"] == (dict.fromkeys(own, 10), 80)
    assert found["gsm8k_test.jsonl"] == ({"math": 1319}, 0)
    assert found["HumanEval.jsonl.gz"] == ({"code": 164}, 0)
