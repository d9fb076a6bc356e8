"""From conversations to samples. The only file that knows chat templates.

What is supervised follows from what serving does: the engine renders the messages before a turn with a
generation prompt, tokenises that text, and the target goes on from there until its end-of-turn token. So, for
each assistant turn,

    prompt = render(messages before it, add_generation_prompt=True)
    answer = what render(messages up to it) adds to the prompt, up to and including the end-of-turn token

and both must be found again in the rendering of the whole conversation, character for character and token for
token. A turn for which they are not (thinking stripped from history; a token across the border of prompt and
answer) becomes a sample of its own, with the history as serving would show it. Positions decide, never words,
separators or token ids.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from eagle_train.data.conversations import Conversation, Message
from eagle_train.data.samples import IntArray, Sample, answer_remaining_from_spans, spans_from_mask
from eagle_train.data.template_options import check_template_options
from eagle_train.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TrainOn = Literal["all", "last"]

# What servers write when an answer ran into the limit of new tokens (OpenAI; Anthropic, Google).
CUT_REASONS = ("length", "max_tokens", "MAX_TOKENS")
# Stands for an answer when a template is asked what it writes around one.
PROBE = "eagle-train-probe"
# transformers' own test for `{% generation %}` marks (utils/chat_template_utils.py, 5.24).
GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Note:
    """Something about a conversation that a person should know: counted by kind, shown with its message."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class TokenizedConversation:
    """The samples of one conversation; turns_used + turns_left_out are its assistant turns."""

    samples: tuple[Sample, ...]
    turns_used: int
    turns_left_out: int
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True)
class _Encoding:
    """ids int32 `[L]`; starts `[L]`: character at which each token begins; anchors: indices of added tokens.

    Only starts are used: some tokenizers report an end equal to the start (tokenizers#1620).
    """

    ids: IntArray
    starts: IntArray
    anchors: IntArray


@dataclass(frozen=True, slots=True)
class _Turn:
    """One assistant turn as serving would see it.

    index: of its message; opening: what the template writes between prompt and content; has_end: the template
    writes an end-of-turn token; cut: the answer ended at a length limit, so that token is not in `answer`.
    """

    index: int
    prompt: str
    answer: str
    opening: str
    has_end: bool
    cut: bool


@dataclass(frozen=True, slots=True)
class Chat:
    """A tokenizer with everything that its template sees apart from the messages."""

    tokenizer: "PreTrainedTokenizerBase"
    options: Mapping[str, Any]
    tools: list[Mapping[str, Any]] | None
    source: str
    added_ids: frozenset[int]
    special: re.Pattern[str]

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Raises InputError with the template's own words."""
        return str(self._apply(messages, tokenize=False, add_generation_prompt=add_generation_prompt))

    def marks(self, messages: Sequence[Message]) -> IntArray:
        """0/1 for each token of the rendering, from the template's generation marks."""
        encoded = self._apply(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return np.asarray(encoded["assistant_masks"], dtype=np.int32)

    def encode(self, text: str) -> _Encoding:
        # The template writes BOS itself, so the tokenizer must not add another (TRL#1400).
        encoded = self.tokenizer(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        ids = encoded["input_ids"]
        starts = [start for start, _ in encoded["offset_mapping"]]
        anchors = [index for index, token in enumerate(ids) if token in self.added_ids]
        return _Encoding(*(np.asarray(values, dtype=np.int32) for values in (ids, starts, anchors)))

    def _apply(self, messages: Sequence[Message], **how: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], tools=self.tools, **how, **self.options
            )
        except Exception as error:  # a template is somebody else's program: it raises what it likes
            words = " ".join(f"{type(error).__name__}: {error}".split())
            raise InputError(
                f"{self.source}: the chat template refuses the conversation ({words})"
            ) from error


def check_chat_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise InputError unless the tokenizer is a fast one with a chat template."""
    if not tokenizer.is_fast:
        raise InputError(
            f"the tokenizer {type(tokenizer).__name__} is a slow one, without character offsets; "
            "give the target a fast one, saved as tokenizer.json"
        )
    if not tokenizer.chat_template:
        raise InputError("the tokenizer has no chat template; name one with --chat_template FILE")


def tokenize_conversation(
    conversation: Conversation,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    train_on: TrainOn = "all",
    template_options: Mapping[str, Any] | None = None,
) -> TokenizedConversation:
    """Turn a conversation into samples: usually one, with the ids of `apply_chat_template` on the whole.

    train_on: supervise all assistant turns, or the last one only; template_options: variables for the
    template, such as enable_thinking. A conversation of which no token can be supervised still gives a
    sample, with a note that says why; a token row keeps its ids and its mask.
    Raises InputError (file:line) for what the template refuses, no assistant turn, or a tool call that is
    not rendered; without file:line for a tokenizer that is slow or has no chat template.
    """
    if conversation.input_ids is not None:
        return take_token_row(conversation.input_ids, conversation, train_on)
    return tokenize_messages(conversation, open_chat(tokenizer, template_options or {}), train_on)


def take_token_row(input_ids: IntArray, row: Conversation, train_on: TrainOn) -> TokenizedConversation:
    """A pre-tokenised row as it is; each run of its mask is a turn."""
    runs = spans_from_mask([] if row.loss_mask is None else row.loss_mask)
    spans = runs[-1:] if train_on == "last" else runs
    sample = Sample(input_ids, answer_remaining_from_spans(len(input_ids), spans), row.source)
    return TokenizedConversation((sample,), turns_used=len(spans), turns_left_out=0)


def open_chat(tokenizer: "PreTrainedTokenizerBase", options: Mapping[str, Any]) -> Chat:
    """Raises InputError for a tokenizer that is slow or has no chat template, and for options that the
    template never reads.
    """
    check_chat_tokenizer(tokenizer)
    check_template_options(tokenizer, options)
    added = tokenizer.added_tokens_decoder
    special = {token.content for token in added.values() if token.special} | set(tokenizer.all_special_tokens)
    return Chat(
        tokenizer=tokenizer,
        options=options,
        tools=None,
        source="",
        added_ids=frozenset(added),
        special=re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"),
    )


def prompt_token_ids(conversation: Conversation, chat: Chat) -> IntArray:
    """Token ids `[L]` of messages up to a generation prompt: what serving sees, and what training puts before
    an answer. Raises InputError, as file:line, for what the template refuses.
    """
    tools = None if conversation.tools is None else list(conversation.tools)
    chat = replace(chat, tools=tools, source=conversation.source)
    return chat.encode(chat.render(conversation.messages, add_generation_prompt=True)).ids


def tokenize_messages(conversation: Conversation, chat: Chat, train_on: TrainOn) -> TokenizedConversation:
    tools = None if conversation.tools is None else list(conversation.tools)
    chat = replace(chat, tools=tools, source=conversation.source)
    turn_indices = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if not turn_indices:
        raise InputError(f"{chat.source}: no assistant turn, nothing to train on; add one or remove the row")
    messages, whole = _render_whole(chat, conversation.messages)
    turns: list[_Turn] = []
    notes = _tool_notes(chat, whole)
    for index in turn_indices if train_on == "all" else turn_indices[-1:]:
        shown = whole if index == len(messages) - 1 else chat.render(messages[: index + 1])
        cut = conversation.finish_reason in CUT_REASONS and index == turn_indices[-1]
        turn = _read_turn(chat, messages[: index + 1], shown, cut=cut)
        if isinstance(turn, Note):
            notes.append(turn)
            continue
        _check_tool_calls(chat, messages[: index + 1], shown, turn)
        notes += _turn_notes(chat, turn)
        turns.append(turn)
    return _place_turns(chat, messages, whole, turns, notes, len(turn_indices))


def _render_whole(chat: Chat, messages: Sequence[Message]) -> tuple[Sequence[Message], str]:
    """Offer missing content as it is; a template that cannot take it gets an empty text (slime#1073)."""
    try:
        return messages, chat.render(messages)
    except InputError:
        filled = [{**message, "content": message.get("content") or ""} for message in messages]
        if filled == list(messages):
            raise
        return filled, chat.render(filled)


def _read_turn(chat: Chat, messages: Sequence[Message], shown: str, *, cut: bool) -> _Turn | Note:
    """Read the last of `messages`, all rendered as `shown`, as prompt and answer; a note if it cannot be."""
    index = len(messages) - 1
    history = messages[:index]
    probed = chat.render([*history, {"role": "assistant", "content": PROBE}])
    before, found, after = probed.rpartition(PROBE)
    if not found:
        text = f"{chat.source}: the chat template prints nothing for assistant turn {index}"
        return Note("turn_not_rendered", text)
    # A conversation that the assistant opens has no messages to render a generation prompt for.
    prompt = chat.render(history, add_generation_prompt=True) if history else before
    if not shown.startswith(prompt):
        text = (
            f"{chat.source}: turn {index} as rendered does not continue its generation prompt, which ends in "
            f"{prompt[-40:]!r}; left out (look for a template option that makes the two agree)"
        )
        return Note("turn_not_continued", text)
    content_stop, stop = _find_end(chat, shown, len(prompt), after)
    answer = shown[len(prompt) : content_stop if cut else stop]
    if not answer:
        text = f"{chat.source}: assistant turn {index} is empty; nothing of it can be supervised"
        return Note("empty_answer", text)
    opening = before[len(prompt) :] if before.startswith(prompt) else ""
    return _Turn(
        index=index,
        prompt=prompt,
        answer=answer,
        opening=opening if answer.startswith(opening) else "",
        has_end=stop > content_stop,
        cut=cut,
    )


def _find_end(chat: Chat, shown: str, start: int, after: str) -> tuple[int, int]:
    """The characters at which an answer's content and its end-of-turn token end; it begins at `start`.

    after: what the template writes after an answer. Its first special token closes the turn; what follows
    that, such as a line break, is never generated. Where there is none, the closing words are ordinary text
    without the blanks that follow them.
    """
    if shown.endswith(after):
        content_stop = len(shown) - len(after)
        closing = chat.special.search(after)
        return content_stop, content_stop + (closing.end() if closing else len(after.rstrip()))
    # A turn that closes in a way of its own, such as Llama 3's tool calls: its last special token.
    specials = list(chat.special.finditer(shown, start))
    if specials:
        return specials[-1].start(), specials[-1].end()
    return len(shown.rstrip()), len(shown.rstrip())


def _place_turns(
    chat: Chat,
    messages: Sequence[Message],
    whole: str,
    turns: list[_Turn],
    notes: list[Note],
    num_assistant_turns: int,
) -> TokenizedConversation:
    has_marks = GENERATION_MARK.search(chat.tokenizer.get_chat_template(tools=chat.tools)) is not None
    encoding = chat.encode(whole)
    marks = chat.marks(messages) if has_marks else None
    spans: list[tuple[int, int]] = []
    alone: list[Sample] = []
    for turn in turns:
        span = _find_span(chat, whole, encoding, turn)
        if span is None:
            sample, first = _sample_alone(chat, turn)
            marked = not has_marks or bool(chat.marks(messages[: turn.index + 1])[first - 1 :].any())
        else:
            marked = marks is None or bool(marks[slice(*span)].any())
        if not marked:
            text = f"{chat.source}: no generation mark in turn {turn.index}; left out"
            notes.append(Note("turn_not_marked", text))
        elif span is None:
            text = (
                f"{chat.source}: turn {turn.index} is trained on as a sample of its own, with the history "
                "that serving shows it, because the whole conversation renders it otherwise (such as "
                "without its thinking, or with a token across its border)"
            )
            notes.append(Note("turn_trained_on_as_a_sample_of_its_own", text))
            alone.append(sample)
        else:
            spans.append(span)
            if marks is not None:
                notes += _compare_marks(chat, encoding, marks, span, turn)
    samples = list(alone)
    if spans or not alone:
        remaining = answer_remaining_from_spans(len(encoding.ids), spans)
        samples.append(Sample(encoding.ids, remaining, chat.source))
    used = len(spans) + len(alone)
    return TokenizedConversation(tuple(samples), used, num_assistant_turns - used, tuple(notes))


def _find_span(chat: Chat, whole: str, encoding: _Encoding, turn: _Turn) -> tuple[int, int] | None:
    """The turn's token range in the rendering of the whole, or None where serving would see other tokens."""
    if not whole.startswith(turn.prompt + turn.answer):
        return None
    start = _find_border(chat, whole, encoding, len(turn.prompt))
    stop = _find_border(chat, whole, encoding, len(turn.prompt) + len(turn.answer))
    return None if start is None or stop is None else (start, stop)


def _find_border(chat: Chat, text: str, encoding: _Encoding, position: int) -> int | None:
    r"""The number of tokens in `text[:position]`, or None if that text alone has other tokens.

    It is not enough that a token begins at `position`: with GPT-2's splitting "\n\n" is one token, yet
    "\n\nyes" is three. Added tokens split the text, so comparing from the last one before the border on is
    comparing everything.
    """
    ids, starts, anchors = encoding.ids, encoding.starts, encoding.anchors
    next_anchor = int(np.searchsorted(starts[anchors], position))
    if next_anchor < len(anchors) and starts[anchors[next_anchor]] == position:
        return int(anchors[next_anchor])
    anchor = int(anchors[next_anchor - 1]) if next_anchor else 0
    tail = chat.encode(text[int(starts[anchor]) if next_anchor else 0 : position]).ids
    return anchor + len(tail) if np.array_equal(ids[anchor : anchor + len(tail)], tail) else None


def _sample_alone(chat: Chat, turn: _Turn) -> tuple[Sample, int]:
    """A sample that ends with the turn, and the index of its first answer token."""
    encoding = chat.encode(turn.prompt + turn.answer)
    ids, start = encoding.ids, _find_border(chat, turn.prompt + turn.answer, encoding, len(turn.prompt))
    if start is None:
        prompt_ids = chat.encode(turn.prompt).ids
        ids, start = np.concatenate([prompt_ids, chat.encode(turn.answer).ids]), len(prompt_ids)
    return Sample(ids, answer_remaining_from_spans(len(ids), [(start, len(ids))]), chat.source), start


def _compare_marks(
    chat: Chat, encoding: _Encoding, marks: IntArray, span: tuple[int, int], turn: _Turn
) -> list[Note]:
    """One turn's generation marks against its rendering, which decides: it shows what serving generates."""
    start, stop = span
    first, last = start, stop
    while first > 0 and marks[first - 1]:
        first -= 1
    # Marks cannot know that an answer was cut and the end-of-turn token is not the target's own.
    while last < len(marks) and marks[last] and not turn.cut:
        last += 1
    if (first, last) == span and marks[start:stop].all():
        return []
    marked = chat.tokenizer.decode(encoding.ids[first:last][marks[first:last] == 1].tolist())
    text = (
        f"{chat.source}: turn {turn.index}: the template's generation marks cover {marked!r}, but after its "
        f"generation prompt comes {turn.answer!r}; the latter is supervised"
    )
    return [Note("marks_disagree", text)]


def _tool_notes(chat: Chat, whole: str) -> list[Note]:
    names = [tool.get("function", tool).get("name") for tool in chat.tools or ()]
    if not names or any(isinstance(name, str) and name in whole for name in names):
        return []
    return [Note("tools_not_rendered", f"{chat.source}: the chat template renders none of the row's tools")]


def _turn_notes(chat: Chat, turn: _Turn) -> list[Note]:
    notes = []
    if turn.opening.strip():
        text = (
            f"{chat.source}: the answer opens with {turn.opening!r}, which the template writes but its "
            "generation prompt does not end with; if serving supplies it, set that template option (such as "
            "enable_thinking=false)"
        )
        notes.append(Note("answer_opens_with_template_text", text))
    if not turn.has_end and not turn.cut:
        text = f"{chat.source}: the chat template writes no end-of-turn token after an answer"
        notes.append(Note("no_end_of_turn", text))
    return notes


def _check_tool_calls(chat: Chat, messages: Sequence[Message], shown: str, turn: _Turn) -> None:
    """Raise InputError if the last message has tool calls that its rendering `shown` lacks."""
    *history, message = messages
    calls = message.get("tool_calls") or ()
    missing = [call["function"]["name"] for call in calls if call["function"]["name"] not in turn.answer]
    if calls and not missing:
        bare = {key: value for key, value in message.items() if key != "tool_calls"}
        try:  # the content may name the function, too
            same = chat.render([*history, {**bare, "content": message["content"] or ""}]) == shown
        except InputError:
            same = False
        missing = [call["function"]["name"] for call in calls if same]
    if missing:
        raise InputError(
            f"{chat.source}: the chat template does not render the tool call {missing[0]!r} of turn "
            f"{turn.index}; remove the row or name a template that knows tools with --chat_template FILE"
        )
