import random

import pytest

from modelwright.evaluate.scoring import Window, cut_windows, pack_windows


@pytest.mark.parametrize("context", [1, 2, 7, 16])
@pytest.mark.parametrize("first", [0, 3, 20])
def test_each_prediction_counts_once_and_sees_enough(context: int, first: int) -> None:
    for stride in {1, max(1, context // 2), context}:
        for num_predictions in (0, 1, context, context + 1, 5 * context + 3):
            counted = []
            for window in cut_windows(0, num_predictions, first, context=context, stride=stride):
                assert 0 < window.length <= context
                assert window.end <= num_predictions
                for i in range(window.scored_from, window.end):
                    counted.append(i)
                    assert i - window.start >= min(i, context - stride)
            assert counted == list(range(first, num_predictions))


def test_a_short_sequence_is_one_window() -> None:
    assert list(cut_windows(3, 5, 0, context=8, stride=4)) == [Window(3, 0, 5, 0)]


def test_packing_keeps_every_window_and_fills_rows() -> None:
    rng = random.Random(0)
    windows = [Window(i, 0, rng.randint(1, 64), 0) for i in range(500)]
    rows = pack_windows(windows, 64)
    assert sorted(w.sequence for row in rows for w in row) == list(range(500))
    assert max(sum(w.length for w in row) for row in rows) <= 64
    total = sum(w.length for w in windows)
    assert len(rows) <= 1.02 * total / 64 + 1
    assert rows == pack_windows(windows[::-1], 64)
