"""Data files to samples: every row is used or refused, and everything is counted."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tqdm import tqdm

from eagle_train.data.chat import (
    Chat,
    TokenizedConversation,
    TrainOn,
    open_chat,
    take_token_row,
    tokenize_messages,
)
from eagle_train.data.conversations import Conversation, count_rows, read_rows
from eagle_train.data.samples import Sample
from eagle_train.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OnBadRow = Literal["error", "skip"]
MAX_KEPT_REFUSALS = 5


@dataclass(frozen=True, slots=True)
class DataReport:
    """What became of the rows of some data files. rows_used + rows_refused = rows_read.

    answer_tokens: supervised tokens, end-of-turn tokens among them; rows_without_supervision: used rows that
    have none; warnings: notes counted by kind; messages: the first note of each kind and the first refusals,
    with file:line.
    """

    rows_read: int
    rows_used: int
    rows_refused: int
    rows_without_supervision: int
    samples: int
    tokens: int
    answer_tokens: int
    turns_used: int
    turns_left_out: int
    warnings: Mapping[str, int] = field(default_factory=dict)
    messages: tuple[str, ...] = ()


def load_samples(
    paths: Iterable[str | Path],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    vocab_size: int,
    train_on: TrainOn = "all",
    template_options: Mapping[str, Any] | None = None,
    role_map: Mapping[str, str] | None = None,
    on_bad_row: OnBadRow = "error",
    max_rows: int | None = None,
    progress: bool = True,
) -> tuple[list[Sample], DataReport]:
    """Read and tokenise data files; samples are in file order and not yet cut to a length.

    vocab_size: the target's number of token ids; on_bad_row: raise at the first faulty row, or count it and
    go on; max_rows: read no more than that; progress: show a bar on stderr. Samples without supervision are
    kept and counted.
    Raises InputError for a faulty row, a file that is missing, empty or without a supervised token, and a
    tokenizer that is slow or has no chat template (unless all rows are pre-tokenised).
    """
    paths = list(paths)
    if not paths:
        raise InputError("no data file; name at least one with --data")
    results: list[TokenizedConversation | InputError] = []
    chat: Chat | None = None
    num_rows = count_rows(paths)
    if max_rows is not None:
        num_rows = min(num_rows, max_rows)
    with tqdm(total=num_rows, desc="tokenise", unit=" rows", disable=not progress) as bar:
        for path in paths:
            num_earlier = len(results)
            left = None if max_rows is None else max_rows - num_earlier
            if left == 0:
                break
            for row in islice(read_rows([path], role_map=role_map), left):
                if chat is None and isinstance(row, Conversation) and row.input_ids is None:
                    chat = open_chat(tokenizer, template_options or {})
                result = _tokenize_row(row, chat, train_on, vocab_size)
                if isinstance(result, InputError) and on_bad_row == "error":
                    raise InputError(f"{result} (to leave faulty rows out: --on_bad_row skip)") from result
                results.append(result)
                bar.update()
            _check_supervised(path, results[num_earlier:])
    used = [result for result in results if isinstance(result, TokenizedConversation)]
    return [sample for result in used for sample in result.samples], _sum_up(results)


def _tokenize_row(
    row: Conversation | InputError, chat: Chat | None, train_on: TrainOn, vocab_size: int
) -> TokenizedConversation | InputError:
    if isinstance(row, InputError):
        return row
    try:
        if row.input_ids is not None:
            result = take_token_row(row.input_ids, row, train_on)
        else:
            assert chat is not None
            result = tokenize_messages(row, chat, train_on)
    except InputError as error:
        return error
    highest = max(int(sample.input_ids.max(initial=0)) for sample in result.samples)
    if highest < vocab_size:
        return result
    return InputError(
        f"{row.source}: token id {highest} is beyond the target's vocabulary of {vocab_size} "
        f"(ids 0..{vocab_size - 1}); use the target's own tokenizer"
    )


def _count_answer_tokens(result: TokenizedConversation) -> int:
    # A first token that nothing precedes cannot be predicted, so it is not counted.
    return sum(int((sample.answer_remaining >= 1).sum()) for sample in result.samples)


def _check_supervised(path: str | Path, results: Sequence[TokenizedConversation | InputError]) -> None:
    """Raise InputError, with the first row's fault, if no row of the file has a supervised token."""
    if any(isinstance(result, TokenizedConversation) and _count_answer_tokens(result) for result in results):
        return
    first = results[0]
    if isinstance(first, InputError):
        reason = str(first)
    elif first.notes:
        reason = first.notes[0].message
    else:
        reason = f"{first.samples[0].source}: no token is supervised"
    raise InputError(
        f"{reason}; nor can any other row that was read of {path} be trained on: give it answers with text"
    )


def _sum_up(results: Sequence[TokenizedConversation | InputError]) -> DataReport:
    used = [result for result in results if isinstance(result, TokenizedConversation)]
    refusals = [str(result) for result in results if isinstance(result, InputError)]
    notes = [note for result in used for note in result.notes]
    first_notes = {note.kind: note.message for note in reversed(notes)}
    answer_tokens = [_count_answer_tokens(result) for result in used]
    samples = [sample for result in used for sample in result.samples]
    return DataReport(
        rows_read=len(results),
        rows_used=len(used),
        rows_refused=len(refusals),
        rows_without_supervision=answer_tokens.count(0),
        samples=len(samples),
        tokens=sum(map(len, samples)),
        answer_tokens=sum(answer_tokens),
        turns_used=sum(result.turns_used for result in used),
        turns_left_out=sum(result.turns_left_out for result in used),
        warnings=dict(Counter(note.kind for note in notes)),
        messages=(*first_notes.values(), *refusals[:MAX_KEPT_REFUSALS]),
    )
