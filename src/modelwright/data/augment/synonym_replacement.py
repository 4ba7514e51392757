"""Synonym replacement by words of a WordNet synset (Zhang et al. 2015, https://arxiv.org/abs/1509.01626)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from modelwright.data.augment import augmentation as aug
from modelwright.data.augment import related_words


@dataclass(frozen=True, kw_only=True)
class SynonymReplacementConfig:
    """Replacement of words by synonyms."""

    fraction: float = 0.1
    """Fraction of the words that are replaced, limited by the number of words with a synonym that fits."""
    wordnet: Path = related_words.DEFAULT_FOLDER
    """Folder of a WordNet database; Debian's package `wordnet-base` has one."""

    __post_init__ = aug.check_fraction


def synonym_replacement(config: SynonymReplacementConfig) -> aug.Augmentation:
    wordnet = related_words.open_wordnet(config.wordnet)
    return aug.text_augmentation(
        "synonym_replacement",
        lambda text, rng: replace_words(text, wordnet, synonyms, config.fraction, rng),
        keeps=("word_count", "lines"),
    )


def synonyms(wordnet: related_words.WordNet, lemma: str, part: related_words.PartOfSpeech) -> Sequence[str]:
    """Returns common words of the lemma's main meaning that seldom have another meaning."""
    sense = related_words.main_sense(wordnet, lemma, part)
    if sense is None:
        return ()
    others = wordnet.synset(sense, part).words
    return [
        word
        for word in others
        if related_words.main_sense(wordnet, word, part) == sense and related_words.is_common(wordnet, word, part)
    ]


def replace_words(
    text: str, wordnet: related_words.WordNet, alternatives: related_words.Alternatives, fraction: float, rng: Random
) -> str | None:
    """Replaces `fraction` of the words of a text by alternatives, or all that have any if these are fewer."""
    candidates = [
        word for sentence in related_words.replaceable_words(text, wordnet, alternatives) for word in sentence
    ]
    if not candidates:
        return None
    # The fraction is one of all words; the draw is among those with alternatives.
    share = min(1.0, fraction * len(aug.find_words(text)) / len(candidates))
    edits = [
        aug.Span(candidate.word.start, candidate.word.end, rng.choice(candidate.alternatives))
        for candidate in aug.draw(candidates, share, rng)
    ]
    return aug.repair_articles(aug.replace_spans(text, edits), text)
