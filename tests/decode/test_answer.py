"""What counts as a verify step, a drafted and an accepted token; where an answer ends; what is a loop."""

import pytest

from eagle_train.decode.answer import Answer, DecodeOptions
from eagle_train.decode.results import Prompt, answer_runs, answer_samples, is_looping

STOP = 9


def answer(max_new_tokens: int, *, cap_last_step: bool = False) -> Answer:
    """An answer to a prompt of two tokens, three drafts a step, whose prefill gave token 1."""
    options = DecodeOptions(
        num_drafts=3,
        max_new_tokens=max_new_tokens,
        temperature=0.0,
        samples_proposal=False,
        seed=0,
        cap_last_step=cap_last_step,
        stop_ids=frozenset({STOP}),
    )
    started = Answer(Prompt((5, 6), "a:1"), 0, options)
    started.add([1])
    return started


def take(answer: Answer, accepted: list[int], own: int) -> None:
    answer.count_step(accepted)
    answer.add([*accepted, own])


def test_the_prefill_counts_as_nothing() -> None:
    result = answer(1).result()
    assert (result.token_ids, result.verify_steps, result.drafted) == ((1,), 0, 0)
    assert result.accepted_per_position == (0, 0, 0)
    assert not result.stopped


def test_accepted_tokens_beyond_the_limit_count_and_are_not_kept() -> None:
    row = answer(4)
    take(row, [], 2)
    assert not row.is_done
    take(row, [3, 4, 5], 6)
    result = row.result()
    assert row.is_done
    assert (result.token_ids, result.verify_steps, result.drafted) == ((1, 2, 3, 4), 2, 6)
    assert result.accepted_per_position == (1, 1, 1)
    assert answer_runs(result) == [(0, 0, 1), (1, 1, 2), (2, 4, 4)]


def test_a_capped_step_drafts_what_is_left_less_one() -> None:
    row = answer(4, cap_last_step=True)
    assert row.num_drafted == 2
    take(row, [2], 3)
    assert row.num_drafted == 0
    take(row, [], 4)
    result = row.result()
    assert (result.token_ids, result.verify_steps, result.drafted) == ((1, 2, 3, 4), 1, 2)
    assert result.accepted_per_position == (1, 0, 0)
    assert result.accepted_per_step == (1,)
    assert answer_runs(result) == [(0, 0, 1), (1, 2, 3), (3, 3, 4)]


@pytest.mark.parametrize(
    ("accepted", "own", "kept", "counts"),
    [
        ([2, STOP, 3], 4, (1, 2, STOP), (1, 1, 0)),
        ([STOP, 2, 3], 4, (1, STOP), (1, 0, 0)),
        ([2], STOP, (1, 2, STOP), (1, 0, 0)),
    ],
)
def test_an_end_of_text_is_kept_and_what_lies_behind_it_is_not_counted(
    accepted: list[int], own: int, kept: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    row = answer(20)
    take(row, accepted, own)
    result = row.result()
    assert row.is_done
    assert (result.token_ids, result.stopped) == (kept, True)
    assert (result.verify_steps, result.accepted_per_position) == (1, counts)
    assert result.accepted_per_step == (sum(counts),)
    assert answer_runs(result)[-1] == (1, 1 + sum(counts), len(kept))


def test_an_end_of_text_beyond_the_limit_does_not_stop_the_answer() -> None:
    row = answer(2)
    take(row, [2, STOP], 4)
    assert (row.result().token_ids, row.result().stopped) == ((1, 2), False)


def test_looping_means_more_than_three_tenths_of_the_8_grams_repeat() -> None:
    assert not is_looping(())
    assert not is_looping([1] * 8)
    assert is_looping([1] * 9)  # two 8-grams, one a repeat
    # 20 8-grams: a period of 14 tokens repeats 6 of them, one of 13 repeats 7.
    assert not is_looping([i % 14 for i in range(27)])
    assert is_looping([i % 13 for i in range(27)])


def test_answers_become_samples_with_the_answer_supervised() -> None:
    row = answer(20)
    take(row, [2], STOP)
    (sample,) = answer_samples([row.prompt], [row.result()])
    assert sample.input_ids.tolist() == [5, 6, 1, 2, STOP]
    assert sample.answer_remaining.tolist() == [0, 3, 2, 1, 0]
    assert sample.source == "a:1"
