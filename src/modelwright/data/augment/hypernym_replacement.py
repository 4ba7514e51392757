"""Hypernym replacement: broader nouns of WordNet replace nouns, as "dog" replaces "spaniel"."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from modelwright.data.augment import related_words
from modelwright.data.augment.augmentation import Augmentation, check_fraction, text_augmentation
from modelwright.data.augment.synonym_replacement import replace_words

_MAX_STEPS = 2
"""Maximum number of levels from a noun up to its replacement."""
_MIN_DEPTH = 5
"""Minimum number of levels above a replacement; the top of the hierarchy has words such as "entity" and "object"."""
_TOO_BROAD = frozenset({
    "aerosol", "alteration", "approximation", "area", "associate", "belief", "capital", "chemical", "collection",
    "commerce", "compartment", "concept", "consciousness", "distance", "emotion", "energy", "goal", "grownup",
    "idea", "imagery", "inhabitant", "instrumentation", "integer", "interaction", "leader", "matter", "month",
    "move", "nonfiction", "peer", "number", "object", "organ", "organism", "papers", "parent", "person", "personnel",
    "process", "selection", "series", "share", "standing", "substance", "text", "thinker", "thinking", "wave",
    "weather", "worker",
})  # fmt: skip
"""Broader nouns that are too vague in place of a narrower one, or that nobody would use there."""


@dataclass(frozen=True, kw_only=True)
class HypernymReplacementConfig:
    """Replacement of nouns by broader ones."""

    fraction: float = 0.1
    """Fraction of the words that are replaced, limited by the number of nouns with a broader noun that fits."""
    wordnet: Path = related_words.DEFAULT_FOLDER
    """Folder of a WordNet database; Debian's package `wordnet-base` has one."""

    __post_init__ = check_fraction


def hypernym_replacement(config: HypernymReplacementConfig) -> Augmentation:
    wordnet = related_words.open_wordnet(config.wordnet)
    return text_augmentation(
        "hypernym_replacement",
        lambda text, rng: replace_words(text, wordnet, hypernyms, config.fraction, rng),
        keeps=("word_count", "lines"),
    )


def hypernyms(wordnet: related_words.WordNet, lemma: str, part: related_words.PartOfSpeech) -> Sequence[str]:
    """Returns the most common of the nearest broader nouns that seldom have another meaning; empty if they are rare."""
    sense = related_words.main_sense(wordnet, lemma, part)
    if sense is None or part != "noun":
        return ()
    level = wordnet.synset(sense, part).hypernyms
    for _ in range(_MAX_STEPS):
        synsets = [wordnet.synset(offset, part) for offset in level]
        fitting: list[str] = []
        for synset in synsets:
            depth, broader = 0, synset.hypernyms
            while broader:
                depth, broader = depth + 1, wordnet.synset(broader[0], part).hypernyms
            for word in synset.words if depth >= _MIN_DEPTH else ():
                is_usual = word not in _TOO_BROAD and related_words.main_sense(wordnet, word, part) == synset.offset
                if is_usual and related_words.is_common(wordnet, word, part):
                    fitting.append(word)
        if fitting:
            return [max(fitting, key=lambda word: wordnet.counts(word, part))]
        level = tuple(offset for synset in synsets for offset in synset.hypernyms)
    return ()
