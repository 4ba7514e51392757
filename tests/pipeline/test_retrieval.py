"""Recall against candidates that are sorted one by one, and chance against all orders of a few candidates."""

import itertools

import numpy as np
import pytest

from modelwright.pipeline.stages.align import bag_of_words, chance, recall, words


def naive(scores: np.ndarray, is_relevant: np.ndarray, most: int) -> float:
    """Recall written out: among equal scores the relevant candidates come last."""
    found = []
    for row, relevant in zip(scores, is_relevant, strict=True):
        order = sorted(range(len(row)), key=lambda place: (-row[place], relevant[place]))
        found.append(any(relevant[place] for place in order[:most]))
    return float(np.mean(found))


def test_recall_is_that_of_sorted_candidates() -> None:
    dice = np.random.default_rng(0)
    scores = dice.integers(0, 6, (40, 9)).astype(float)  # with many ties
    is_relevant = dice.random((40, 9)) < 0.2
    is_relevant[np.arange(40), dice.integers(0, 9, 40)] = True
    found = recall(scores, is_relevant)
    assert (found.at_1, found.at_5) == (naive(scores, is_relevant, 1), naive(scores, is_relevant, 5))
    assert 0 < found.at_1 < found.at_5 < 1


@pytest.mark.parametrize("score", [0.0, float("nan")])
def test_a_method_that_tells_nothing_apart_finds_nothing(score: float) -> None:
    found = recall(np.full((8, 8), score), np.eye(8, dtype=bool))
    assert (found.at_1, found.at_5) == (0.0, 0.0)


def test_chance_is_the_mean_over_all_orders() -> None:
    is_relevant = np.array([[True, False, True, False, False, False], [False, True, False, False, False, False]])
    orders = [list(order) for order in itertools.permutations(range(6))]
    expected = [np.mean([row[order[:most]].any() for row in is_relevant for order in orders]) for most in (1, 5)]
    found = chance(is_relevant)
    assert (found.at_1, found.at_5) == pytest.approx(tuple(expected))


def test_identifiers_are_taken_apart_into_words() -> None:
    assert words("parseURL of HTTP_server2") == ["parse", "url", "of", "http", "server", "2"]
    assert words("()") == [""]
    scores = bag_of_words(["open the file", "add two numbers"], ["def add_numbers(): ...", "def openFile(): ..."])
    assert scores.argmax(axis=1).tolist() == [1, 0]
