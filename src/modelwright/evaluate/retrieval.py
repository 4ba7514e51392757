"""Retrieval: measures how often the relevant candidate of a query is among the best, against chance and bags of words.

Legend: Q queries, C candidates.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RANKS = (1, 5)
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
"""Words, and the words inside identifiers."""


@dataclass(frozen=True, kw_only=True)
class Recall:
    """Shares of the queries with a relevant candidate among the best 1 and 5."""

    at_1: float
    at_5: float


def recall(scores_QC: NDArray[np.floating], is_relevant_QC: NDArray[np.bool_]) -> Recall:
    """Recall of candidates by descending score. Of equal scores the worst order counts, so that equal scores for all
    candidates find nothing; NaN scores are the lowest.
    """
    scores_QC = np.where(np.isnan(scores_QC), -np.inf, scores_QC)
    best_Q = np.where(is_relevant_QC, scores_QC, -np.inf).max(axis=1)
    # `>=`: ties count as ranked before, which is the worst order.
    num_before_Q = ((scores_QC >= best_Q[:, None]) & ~is_relevant_QC).sum(axis=1)
    at_1, at_5 = (float((num_before_Q < most).mean()) for most in RANKS)
    return Recall(at_1=at_1, at_5=at_5)


def chance(is_relevant_QC: NDArray[np.bool_]) -> Recall:
    """Expected recall of candidates in random order."""
    num_candidates = is_relevant_QC.shape[1]
    at: list[float] = []
    for rank in RANKS:
        most = min(rank, num_candidates)
        # Probability that none of the relevant candidates is among the first: hypergeometric.
        missed = [
            math.comb(num_candidates - relevant, most) / math.comb(num_candidates, most)
            for relevant in is_relevant_QC.sum(axis=1).tolist()
        ]
        at.append(float(np.mean([1 - probability for probability in missed])))
    return Recall(at_1=at[0], at_5=at[1])


def bag_of_words(queries: Sequence[str], candidates: Sequence[str]) -> NDArray[np.float64]:
    """Cosines of TF-IDF vectors [Q, C]; identifiers are split into their words."""
    from sklearn.feature_extraction.text import TfidfVectorizer  # takes a second

    options: dict[str, Any] = {"token_pattern": None}  # or scikit-learn warns that the tokenizer replaces it
    vectorizer = TfidfVectorizer(tokenizer=words, lowercase=False, sublinear_tf=True, **options)
    vectors = vectorizer.fit_transform([*queries, *candidates])
    return np.asarray((vectors[: len(queries)] @ vectors[len(queries) :].T).todense())


def words(text: str) -> list[str]:
    """Splits a text or code into words in lower case; a placeholder for a text without any."""
    return [word.lower() for word in _WORDS.findall(text)] or [""]
