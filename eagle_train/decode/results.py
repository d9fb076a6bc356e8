"""What goes into a measurement and what comes out: prompts, one result a prompt, and results as samples."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eagle_train.data.samples import Sample, answer_remaining_from_spans

LOOP_NGRAM = 8  # tokens
LOOP_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered and tokenised prompt, up to where the answer begins. source: "file:line" or an id."""

    token_ids: tuple[int, ...]
    source: str
    category: str = ""


@dataclass(frozen=True, slots=True)
class PromptResult:
    """One decoded answer and its counts; see decode/answer.py for how passes are counted."""

    source: str  # "file:line" or an id
    category: str  # "" where prompts have none
    token_ids: tuple[int, ...]  # generated tokens, cut at the end of text (kept) or max_new_tokens
    verify_steps: int  # target passes after the prefill
    drafted: int  # draft tokens proposed (the last step capped at what is left, where `cap_last_step`)
    accepted_per_position: tuple[int, ...]  # [n]: verify steps whose draft token at position i was accepted
    is_looping: bool  # over 30 % of the answer's 8-grams are repeats
    stopped: bool  # ended by an end-of-text token rather than by max_new_tokens
    accepted_per_step: tuple[int, ...] = ()  # [verify_steps]: draft tokens accepted; see `answer_runs`


def is_looping(token_ids: Sequence[int]) -> bool:
    """Whether over 30 % of the 8-grams repeat an earlier one: such answers are easy to draft."""
    ngrams = [tuple(token_ids[i : i + LOOP_NGRAM]) for i in range(len(token_ids) - LOOP_NGRAM + 1)]
    return len(ngrams) - len(set(ngrams)) > LOOP_SHARE * len(ngrams)


def answer_samples(prompts: Sequence[Prompt], results: Sequence[PromptResult]) -> list[Sample]:
    """Each prompt with the decoded answer as a training sample, for the chain walk over the same answers.

    On greedy float32 answers the walk's verify steps and emitted tokens equal the decoder's (uncapped),
    prompt by prompt; accepted tokens too, except those that the last step drafted beyond max_new_tokens.
    """
    samples = []
    for prompt, result in zip(prompts, results, strict=True):
        ids = np.array(prompt.token_ids + result.token_ids, dtype=np.int32)
        remaining = answer_remaining_from_spans(len(ids), [(len(prompt.token_ids), len(ids))])
        samples.append(Sample(ids, remaining, result.source))
    return samples


def answer_runs(result: PromptResult) -> list[tuple[int, int, int]]:
    """How an answer came to be: half-open ranges (start, end of accepted, end) of its tokens, one a target
    pass. Tokens start..end of accepted were drafted, the rest is the target's own; the first is the prefill.
    """
    length = len(result.token_ids)
    runs = [(0, 0, min(1, length))]
    for accepted in result.accepted_per_step:
        start = runs[-1][2]
        runs.append((start, min(start + accepted, length), min(start + accepted + 1, length)))
    if (end := runs[-1][2]) < length:  # under cap_last_step: a pass that drafted nothing
        runs.append((end, end, length))
    return runs
