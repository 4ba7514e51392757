"""Conversations fitted into rows: nothing wrong is learned where one is cut, and every one is counted."""

import numpy as np
import pytest

from modelwright.data.rows.examples import ConversationFit

END, EOS = 8, 9
STOPS = (END, EOS)


def conversation(question_len: int, answer_len: int, *after: int) -> tuple[np.ndarray, np.ndarray]:
    """A question of 1s, an answer of 2s with its end token, and what the template writes after it."""
    ids = np.array([1] * question_len + [2] * (answer_len - 1) + [END] + list(after), dtype=np.int64)
    mask = np.array([0] * question_len + [1] * answer_len + [0] * len(after), dtype=np.uint8)
    return ids, mask


def test_what_fits_stays_and_nothing_follows_the_last_answer() -> None:
    fit = ConversationFit(seq_len=8, overlong="split")
    for after in ((), (5,), (5, 1, 1, 1, 1, 1, 1)):
        fitted = fit.fit(*conversation(3, 4, *after), stop_ids=STOPS)
        assert fitted is not None
        assert fitted[0].tolist() == [1, 1, 1, 2, 2, 2, END]
        assert fitted[1].tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert (fit.num_conversations, fit.num_overlong) == (3, 0)


def test_an_answer_without_an_end_gets_one() -> None:
    ids, mask = conversation(2, 3, 5)
    ids[ids == END] = 2
    fitted = ConversationFit(seq_len=8, overlong="split").fit(ids, mask, stop_ids=STOPS)
    assert fitted is not None
    assert fitted[0].tolist() == [1, 1, 2, 2, 2, END]
    assert fitted[1].tolist() == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("overlong", ["split", "skip"])
def test_pairs_longer_than_a_row_are_counted(overlong) -> None:
    fit = ConversationFit(seq_len=8, overlong=overlong)
    fitted = [fit.fit(*conversation(*lengths), stop_ids=STOPS) for lengths in ((4, 4), (4, 9), (8, 2), (20, 20))]
    first, second, *others = [None if pair is None else (pair[0].tolist(), pair[1].tolist()) for pair in fitted]
    assert first == ([1, 1, 1, 1, 2, 2, 2, END], [0, 0, 0, 0, 1, 1, 1, 1])
    assert second == (([1, 1, 1, 1, 2, 2, 2, 2], [0, 0, 0, 0, 1, 1, 1, 1]) if overlong == "split" else None)
    assert others == [None, None], "no token of the answer fits"
    facts = fit.facts()
    assert facts["num_conversations"] == 4
    assert (facts["num_truncated"], facts["num_dropped"]) == ((1, 2) if overlong == "split" else (0, 3))


def test_the_row_that_holds_nearly_all() -> None:
    fit = ConversationFit(seq_len=4, overlong="split")
    assert fit.row_len() == 0
    for length in range(2, 202):
        fit.fit(*conversation(1, length - 1), stop_ids=STOPS)
    assert fit.row_len() == 199
    assert fit.row_len(0.5) == 101
    assert fit.facts()["row_len_for_99_percent"] == 199
