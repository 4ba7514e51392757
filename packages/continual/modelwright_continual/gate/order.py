"""Detection of word salads, texts whose words have no order: their words are common and so are their costs.

The cost of a salad to a small model is within the range of other texts, so the order is judged by pairs of adjacent
words. A text's score is the mean log-ratio of the probability of a word after the preceding one to its probability
anywhere. It is compared with the scores of the same words in other orders, so the subject, the vocabulary and the
length of a text do not matter: the words of a salad are exchangeable, and its actual order wins no more often than any
other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from modelwright.core.config import derive_seed
from modelwright.data.clean.features import hash_words, split_words
from modelwright.data.document import Document

NUM_ORDERS = 39
"""Number of random orders of a text's words with which its actual order is compared."""
_MOST_ALIKE = 1
"""Number of random orders that may score as high as the actual one; 5% of salads have no more (permutation test)."""
_MOST_WORDS = 400
"""Maximum number of words of a text that are read."""
_PRIOR_PAIRS = 1.0
"""Pseudo-count, in pairs, with which the overall distribution of words smooths that after a word."""

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class WordPairs:
    """Counts of the texts in which each pair of adjacent words occurs. keys [P]: `first * len(first_counts) + second`,
    ascending; counts [P]; first_counts, second_counts [V]: sums of the counts by the first and by the second word.
    """

    keys: Ids
    counts: Ids
    first_counts: Ids
    second_counts: Ids

    @classmethod
    def of(cls, texts: Sequence[Ids], num_words: int) -> "WordPairs":
        """Counts the pairs. texts: for each text, the ids [2, W] of the first and last parts of its words, below
        num_words.
        """
        keys, counts = np.unique(np.concatenate([_pairs(text, num_words) for text in texts]), return_counts=True)
        firsts, seconds = (np.bincount(words, counts, num_words) for words in np.divmod(keys, num_words))
        return cls(keys, counts, firsts.astype(np.int64), seconds.astype(np.int64))

    def scores(self, text: Ids, orders: Ids) -> NDArray[np.float64]:
        """Returns the scores [O] of a text [2, W] in the given orders [O, W], excluding the text's contribution to the
        counts.
        """
        num_words = len(self.first_counts)
        own = _pairs(text, num_words)
        own_firsts, own_seconds = np.divmod(own, num_words)
        firsts, seconds = text[1][orders[:, :-1]], text[0][orders[:, 1:]]
        keys = firsts * num_words + seconds
        places = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        pairs = np.where(self.keys[places] == keys, self.counts[places], 0) - np.isin(keys, own)
        before = self.first_counts[firsts] - _occurrences(firsts, own_firsts)
        anywhere = self.second_counts[seconds] - _occurrences(seconds, own_seconds)
        share = (anywhere + 1.0) / (self.second_counts.sum() - len(own) + 1.0)
        return np.log((pairs / share + _PRIOR_PAIRS) / (before + _PRIOR_PAIRS)).mean(1)


def without_order(documents: Sequence[Document]) -> list[bool]:
    """Returns, for each document, whether its word order is indistinguishable from a random one. Pairs are counted in
    the other documents, so the documents of a new subject supply its pairs to each other.
    """
    words = [_words(document) for document in documents]
    unique, flat = np.unique(np.concatenate(words, axis=1), return_inverse=True)
    texts = np.split(flat.reshape(2, -1).astype(np.int64), np.cumsum([one.shape[1] for one in words])[:-1], axis=1)
    pairs = WordPairs.of(texts, len(unique))
    return [_has_no_order(document, text, pairs) for document, text in zip(documents, texts, strict=True)]


def _has_no_order(document: Document, text: Ids, pairs: WordPairs) -> bool:
    own = np.arange(text.shape[1])
    if len(own) < 2:
        return True
    draw = np.random.default_rng(derive_seed(0, "order", document.id, document.text))
    others = draw.permuted(np.tile(own, (NUM_ORDERS, 1)), axis=1)
    scores = pairs.scores(text, np.concatenate([own[None], others]))
    # Ties count against the text; the tolerance keeps rounding from breaking them.
    return int(np.count_nonzero(scores[1:] >= scores[0] - 1e-9)) > _MOST_ALIKE


def _words(document: Document) -> NDArray[np.uint64]:
    """Hashes [2, W] the first and last parts of words. Everything without a space, such as `torch.nn` or a path, is one
    word, because a salad leaves it intact; in scripts without spaces each character is one. All numbers are the same
    word.
    """
    parts = [split_words(unit) for unit in document.text.split()]
    units = [unit for one in parts for unit in ([one] if " ".join(one).isascii() else [[word] for word in one]) if unit]
    ends = [[_masked(unit[place]) for unit in units[:_MOST_WORDS]] for place in (0, -1)]
    return np.stack([hash_words(words) for words in ends])


def _masked(word: str) -> str:
    return "0" if any(map(str.isdigit, word)) else word


def _pairs(text: Ids, num_words: int) -> Ids:
    """Returns the distinct pairs of a text's words, ascending."""
    return np.unique(text[1, :-1] * num_words + text[0, 1:])


def _occurrences(wanted: Ids, values: Ids) -> Ids:
    """Counts how often each wanted number occurs in `values`."""
    ordered = np.sort(values)
    return np.searchsorted(ordered, wanted, "right") - np.searchsorted(ordered, wanted, "left")
