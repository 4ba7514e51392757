"""Random deletion: words are left out (EDA, Wei & Zou 2019, https://arxiv.org/abs/1901.11196)."""

from dataclasses import dataclass
from random import Random

from modelwright.data.augment import augmentation as aug


@dataclass(frozen=True, kw_only=True)
class RandomDeletionConfig:
    """Omission of words."""

    fraction: float = 0.1
    """Fraction of the words that are left out; EDA's alpha."""

    __post_init__ = aug.check_fraction


def random_deletion(config: RandomDeletionConfig) -> aug.Augmentation:
    return aug.text_augmentation(
        "random_deletion", lambda text, rng: delete_words(text, config.fraction, rng), keeps=("lines",)
    )


def delete_words(text: str, fraction: float, rng: Random) -> str | None:
    """Leaves out words, except the first of a sentence and those between two punctuation marks."""
    candidates = [
        aug.Span(sentence.start + word.start, sentence.start + word.end, word.text)
        for sentence in aug.spans_of_sentences(text)
        for word in aug.find_words(sentence.text)[1:]
        if aug.stands_free(sentence.text, word)
    ]
    edits: list[aug.Span] = []
    for word in aug.draw(candidates, fraction, rng):
        # One space goes with the word; a line break stays, so that the number of lines does.
        if text[word.start - 1] == " ":
            edits.append(aug.Span(word.start - 1, word.end, ""))
        else:
            edits.append(aug.Span(word.start, word.end + (text[word.end : word.end + 1] == " "), ""))
    return aug.repair_articles(aug.replace_spans(text, edits), text) if edits else None
