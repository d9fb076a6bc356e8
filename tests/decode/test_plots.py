"""Pictures of a measurement show the numbers that they are given."""

import pytest

from eagle_train.decode.plots import TEXT_COLUMNS, draw_answer


def test_an_answer_has_a_box_a_token_and_deeper_ground_for_longer_runs() -> None:
    tokens = ["Dear", " Anna", ",", "\n", "$x", " rain", "s" * (TEXT_COLUMNS - 3), "."]
    runs = [(0, 0, 1), (1, 3, 4), (4, 5, 6), (6, 7, 8)]
    panel = draw_answer(tokens, runs).axes[0]
    boxes = [(p.get_x(), int(p.get_y()), p.get_width(), p.get_alpha()) for p in panel.patches]
    assert [width for _, _, width, _ in boxes] == [len(token) for token in tokens]
    assert [(left, line) for left, line, _, _ in boxes[:6]] == [
        (0, 0),
        (4, 0),
        (9, 0),
        (10, 0),
        (0, 1),
        (2, 1),
    ]
    assert [(left, line) for left, line, _, _ in boxes[6:]] == [(0, 2), (TEXT_COLUMNS - 3, 2)]
    depths = [alpha for _, _, _, alpha in boxes]
    assert [depth is None for depth in depths] == [True, False, False, True, False, True, False, True]
    assert depths[1] == depths[2] == pytest.approx(0.6)
    assert depths[4] == depths[6] == pytest.approx(0.375)
    assert "".join(text.get_text() for text in panel.texts) == "".join(tokens).replace("\n", "\u21b5")
