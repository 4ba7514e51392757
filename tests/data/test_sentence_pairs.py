"""The preference pairs that are made of this machine's documentation."""

from collections.abc import Sequence

import pytest

from modelwright.core.texts import WORD, distinct_word_score
from modelwright.data.document import Document
from modelwright.data.sources import corpora


@pytest.fixture(scope="module")
def documents() -> Sequence[Document]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "MODULES_FRACTION", 0.1)
        found = list(corpora.sentence_pairs())
        assert list(corpora.sentence_pairs()) == found
    return found


@pytest.mark.slow
def test_the_chosen_answer_has_the_higher_score(documents: Sequence[Document]) -> None:
    assert len(documents) > 50  # how many there are depends on the libraries of the machine
    for document in documents:
        (rejected,) = document.rejected
        scores = [
            distinct_word_score(text, corpora.MAX_WORDS) for text in (document.meta["answer"], rejected["content"])
        ]
        assert scores[0] - scores[1] == pytest.approx(document.meta["margin"])
        assert document.meta["margin"] > 0
        assert document.prompt_turns == 1


@pytest.mark.slow
def test_no_answer_shows_the_limit(documents: Sequence[Document]) -> None:
    """What learns from the pairs cannot know that more words cost."""
    answers = [text for one in documents for text in (one.meta["answer"], one.rejected[0]["content"])]
    lengths = [len(text.split()) for text in answers]
    assert max(lengths) <= corpora.MAX_WORDS
    assert min(lengths) < 4
    assert {one.split for one in documents} <= {"train", "heldout"}


def test_the_score_counts_different_words_up_to_the_limit() -> None:
    assert distinct_word_score("", 4) == 0
    assert distinct_word_score("One one ONE.", 4) == 0.25
    assert distinct_word_score("don't stop, read-only!", 4) == 0.75
    assert distinct_word_score("a b c d", 4) == 1
    assert distinct_word_score("a b c d e f g h", 4) == 0
    assert distinct_word_score(" ".join("abcdefghijkl"), 4) == -1
    assert WORD.findall("x1 12 naïve") == ["x", "naïve"]
