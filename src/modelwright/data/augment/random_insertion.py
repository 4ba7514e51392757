"""Random insertion of synonyms into a sentence (EDA, Wei & Zou 2019, https://arxiv.org/abs/1901.11196)."""

from dataclasses import dataclass
from pathlib import Path
from random import Random

from modelwright.data.augment import augmentation as aug
from modelwright.data.augment import related_words
from modelwright.data.augment.synonym_replacement import synonyms


@dataclass(frozen=True, kw_only=True)
class RandomInsertionConfig:
    """Insertion of synonyms."""

    fraction: float = 0.1
    """Number of inserted words, as a fraction of the words, at most one per word with a synonym; EDA's alpha."""
    wordnet: Path = related_words.DEFAULT_FOLDER
    """Folder of a WordNet database; Debian's package `wordnet-base` has one."""

    __post_init__ = aug.check_fraction


def random_insertion(config: RandomInsertionConfig) -> aug.Augmentation:
    wordnet = related_words.open_wordnet(config.wordnet)
    return aug.text_augmentation(
        "random_insertion", lambda text, rng: insert_words(text, wordnet, config.fraction, rng), keeps=("lines",)
    )


def insert_words(text: str, wordnet: related_words.WordNet, fraction: float, rng: Random) -> str | None:
    """Inserts synonyms between two words of the sentence that has the original word, never at its beginning."""
    inserted: dict[int, str] = {}
    sentences = aug.spans_of_sentences(text)
    num_left = max(1, round(fraction * len(aug.find_words(text))))
    found = [
        (sentence, word)
        for sentence, words in zip(sentences, related_words.replaceable_words(text, wordnet, synonyms), strict=False)
        for word in words
    ]
    rng.shuffle(found)
    for sentence, word in found[:num_left]:
        places = [
            sentence.start + other.start
            for other in aug.find_words(sentence.text)[1:]
            if aug.stands_free(sentence.text, other) and text[sentence.start + other.start - 1] == " "
        ]
        if places:
            inserted.setdefault(rng.choice(places), rng.choice(word.alternatives).lower())
    edits = [aug.Span(place, place, f"{word} ") for place, word in inserted.items()]
    return aug.repair_articles(aug.replace_spans(text, edits), text) if edits else None
