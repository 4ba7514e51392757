"""Random swap: words of a sentence trade places (EDA, Wei & Zou 2019, https://arxiv.org/abs/1901.11196)."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from modelwright.data.augment import augmentation as aug


@dataclass(frozen=True, kw_only=True)
class RandomSwapConfig:
    """Exchange of words within a sentence."""

    fraction: float = 0.1
    """Fraction of the words that change places; EDA's alpha."""

    __post_init__ = aug.check_fraction


def random_swap(config: RandomSwapConfig) -> aug.Augmentation:
    return aug.text_augmentation(
        "random_swap", lambda text, rng: swap_words(text, config.fraction, rng), keeps=("word_count", "lines")
    )


def swap_words(text: str, fraction: float, rng: Random) -> str | None:
    """Swaps words within sentences. The first word of a sentence and words with a capital stay in place, so that the
    case remains correct. The articles "a" and "an" are adapted to the word that now comes after them.
    """
    edits: list[aug.Span] = []
    longest: tuple[list[aug.Span], int] = ([], 0)
    for sentence in aug.spans_of_sentences(text):
        words = [
            word
            for word in aug.find_words(sentence.text)
            if word.text.islower() and aug.stands_free(sentence.text, word)
        ]
        # Rounded at random: most sentences are too short for one whole pair.
        expected = fraction * len(words) / 2
        num_pairs = min(int(expected) + (rng.random() < expected % 1), len(words) // 2)
        edits += _swap_pairs(words, num_pairs, sentence.start, rng)
        if len(words) > len(longest[0]):
            longest = words, sentence.start
    if not edits and len(longest[0]) > 1:  # a short text gets one pair at least
        edits = _swap_pairs(longest[0], 1, longest[1], rng)
    return aug.repair_articles(aug.replace_spans(text, edits), text)


def _swap_pairs(words: Sequence[aug.Span], num_pairs: int, start: int, rng: Random) -> list[aug.Span]:
    """Returns the edits that swap random pairs of words of a sentence that begins at `start`."""
    places = rng.sample(words, 2 * num_pairs)
    pairs = zip(places[::2], places[1::2], strict=True)
    return [
        aug.Span(start + at.start, start + at.end, new)
        for one, other in pairs
        for at, new in ((one, other.text), (other, one.text))
    ]
