"""Recall of candidates: ties and scores that are no numbers find nothing."""

import numpy as np
import pytest

from modelwright.evaluate.retrieval import recall

RELEVANT = np.eye(8, dtype=bool)


def test_what_is_first_is_found() -> None:
    assert recall(RELEVANT.astype(float), RELEVANT).at_1 == 1.0


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_scores_that_say_nothing_find_nothing(value: float) -> None:
    """Those of a model that has diverged are no numbers."""
    found = recall(np.full((8, 8), value), RELEVANT)
    assert (found.at_1, found.at_5) == (0.0, 0.0)
