"""Prompt files for measuring: Spec-Bench, MT-Bench, Vicuna, Arena-Hard, GSM8K, HumanEval and plain JSONL,
known by their keys.

    {"turns": [text, ...], "category": ...}  the benchmarks of FastChat's form; the first turn is asked
    {"question": text}                       GSM8K
    {"prompt": text}                         HumanEval, or a prompt of one's own
    {"messages": [...]}                      a conversation up to a user turn; an answer behind it is left out
    {"input_ids": [...]}                     token ids, taken as they are

A category may stand beside any of them; the demo's files call it family, and join several by "+".

Texts go through the target's chat template by the very functions that training uses, so that the ids are
those that the head was trained behind.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_train.data.chat import Chat, open_chat, prompt_token_ids
from eagle_train.data.conversations import (
    Conversation,
    check_text,
    known_roles,
    parse_json_object,
    parse_row,
    parse_token_ids,
    read_lines,
)
from eagle_train.decode.results import Prompt
from eagle_train.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT_FORMS = ("turns", "question", "prompt", "messages", "conversations", "input_ids")
MT_BENCH = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)
# A file that has one of these is Spec-Bench, which counts MT-Bench's categories as one of its six groups.
SPEC_BENCH = frozenset(("translation", "summarization", "qa", "math_reasoning", "rag"))


@dataclass(frozen=True, slots=True)
class PromptReport:
    """What became of some prompt files: rows_read = prompts + rows_not_measured + long_prompts_left_out; the
    rest are counts within the prompts that were read.
    """

    rows_read: int
    rows_not_measured: int
    later_turns_left_out: int
    answers_left_out: int
    long_prompts_left_out: int = 0

    def notes(self) -> list[str]:
        """What a person should know, one line each."""
        texts = {
            "rows are not measured, because --max_prompts says how many are": self.rows_not_measured,
            "later turns are left out: each conversation is asked its first": self.later_turns_left_out,
            "conversations end with an answer, which is left out": self.answers_left_out,
            "prompts are left out, because with --max_new_tokens they exceed the target's context": (
                self.long_prompts_left_out
            ),
        }
        return [f"{count:,} {text}" for text, count in texts.items() if count]


@dataclass(frozen=True, slots=True)
class _Row:
    """A row before it is tokenised: a conversation up to a user turn, or token ids."""

    conversation: Conversation
    category: str
    num_later_turns: int = 0
    has_answer: bool = False


def read_prompts(
    paths: Iterable[str | Path],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    template_options: Mapping[str, Any] | None = None,
    max_prompts: int | None = None,
) -> tuple[list[Prompt], PromptReport]:
    """Read and tokenise prompt files (`.jsonl` or `.jsonl.gz`), in order.

    template_options: as in training; max_prompts: that many, evenly spaced over all rows, so that a sorted
    file keeps its categories.
    Raises InputError, as file:line, for a row that is no prompt, an empty prompt, and what the chat template
    refuses; for a missing or empty file; and for a tokenizer without a chat template.
    """
    rows = [row for path in paths for row in _read_file(Path(path))]
    chosen = rows
    if max_prompts is not None and max_prompts < len(rows):
        chosen = [rows[index * len(rows) // max_prompts] for index in range(max_prompts)]
    needs_template = any(row.conversation.input_ids is None for row in chosen)
    chat = open_chat(tokenizer, template_options or {}) if needs_template else None
    report = PromptReport(
        rows_read=len(rows),
        rows_not_measured=len(rows) - len(chosen),
        later_turns_left_out=sum(row.num_later_turns for row in chosen),
        answers_left_out=sum(row.has_answer for row in chosen),
    )
    return [_tokenize(row, chat) for row in chosen], report


def _tokenize(row: _Row, chat: Chat | None) -> Prompt:
    conversation = row.conversation
    if conversation.input_ids is not None:
        ids = conversation.input_ids
    else:
        assert chat is not None
        ids = prompt_token_ids(conversation, chat)
    return Prompt(tuple(ids.tolist()), conversation.source, row.category)


def _read_file(path: Path) -> list[_Row]:
    roles = known_roles({})
    rows = []
    for number, line in read_lines(path, flag="--prompts"):
        try:
            rows.append(_parse(line, f"{path}:{number}", roles))
        except RecursionError as error:
            raise InputError(
                f"{path}:{number}: objects nested too deeply to be read; mend the line"
            ) from error
    found = Counter(row.category for row in rows)
    if not SPEC_BENCH & found.keys():
        return rows
    return [replace(row, category="mt_bench") if row.category in MT_BENCH else row for row in rows]


def _parse(line: bytes, source: str, roles: Mapping[str, str]) -> _Row:
    row = parse_json_object(line, source)
    forms = [key for key in PROMPT_FORMS if row.get(key) is not None]
    if len(forms) != 1:
        found = " and ".join(forms) if forms else f"keys {', '.join(sorted(row)) or 'none'}"
        raise InputError(f"{source}: found {found}; a prompt has exactly one of {', '.join(PROMPT_FORMS)}")
    form = forms[0]
    category = row.get("category", row.get("family"))
    if category is None:
        category = {"question": "math", "prompt": "code" if "entry_point" in row else ""}.get(form, "")
    elif "category" not in row and "+" in str(category):
        category = "several"
    if not isinstance(category, str):
        raise InputError(f"{source}: category is {category!r}; expected text")
    if form == "input_ids":
        return _Row(Conversation(source=source, input_ids=parse_token_ids(row, source)), category)
    if form in ("messages", "conversations"):
        return _parse_messages(parse_row(line, source, roles), category)
    texts = _texts(row[form], form, source)
    check_text(texts, source, form)
    if not texts[0].strip():
        raise InputError(f"{source}: the prompt is empty; give {form} a text, or remove the row")
    asked = Conversation(source=source, messages=({"role": "user", "content": texts[0]},))
    return _Row(asked, category, num_later_turns=len(texts) - 1)


def _parse_messages(conversation: Conversation, category: str) -> _Row:
    messages: Sequence[Mapping[str, Any]] = conversation.messages
    has_answer = messages[-1]["role"] == "assistant"
    asked = messages[:-1] if has_answer else messages
    last = asked[-1] if asked else None
    if last is None or last["role"] not in ("user", "tool"):
        found = "nothing" if last is None else f"a turn of {last['role']}"
        raise InputError(
            f"{conversation.source}: found {found} where the last question is expected; a prompt ends with a "
            "user turn (or with one and its answer, which is left out)"
        )
    if not str(last["content"]).strip():
        raise InputError(f"{conversation.source}: the last user turn is empty; give it a text")
    return _Row(replace(conversation, messages=tuple(asked)), category, has_answer=has_answer)


def _texts(value: Any, form: str, source: str) -> list[str]:
    """A text, or the texts of `turns`, which Arena-Hard wraps in objects."""
    turns = value if form == "turns" and isinstance(value, list) else [value]
    contents = [turn.get("content") if isinstance(turn, dict) and form == "turns" else turn for turn in turns]
    texts = [content for content in contents if isinstance(content, str)]
    if not texts or len(texts) < len(contents):
        expected = "a list of at least one text" if form == "turns" else "text"
        raise InputError(f"{source}: {form} is not {expected}; mend or remove the line")
    return texts
