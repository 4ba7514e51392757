"""Sentence shuffle: the sentences of a paragraph in another order."""

import re
from dataclasses import dataclass
from random import Random

from modelwright.data.augment.augmentation import Augmentation, prose_augmentation
from modelwright.data.augment.word_spans import spans_of_sentences

_PARAGRAPH_BREAK = re.compile(r"(\n\s*\n)")
_STRUCTURE = re.compile(r"^\s*(?:[-*+•|>#]|\d+[.)]\s|\S+\s*:\s*$)|\t|```", re.MULTILINE)
"""Lines of lists, tables, quotations and headings, whose order says something."""
_PAIRS = (("(", ")"), ("[", "]"), ("“", "”"), ("«", "»"))


@dataclass(frozen=True, kw_only=True)
class SentenceShuffleConfig:
    """Order of sentences within paragraphs."""

    language: str = "en"
    """ISO 639-1 code of the language whose rules find the ends of sentences."""


def sentence_shuffle(config: SentenceShuffleConfig) -> Augmentation:
    return prose_augmentation(
        "sentence_shuffle", lambda text, rng: shuffle_sentences(text, config.language, rng), keeps=("words",)
    )


def shuffle_sentences(text: str, language: str, rng: Random) -> str | None:
    """Every paragraph with two sentences or more gets a new order of them; lists, tables and code keep theirs. White
    space between sentences stays at its place.
    """
    parts = _PARAGRAPH_BREAK.split(text)
    return "".join(part if number % 2 else _shuffle(part, language, rng) for number, part in enumerate(parts))


def _shuffle(paragraph: str, language: str, rng: Random) -> str:
    if _STRUCTURE.search(paragraph):
        return paragraph
    pieces = [span.text for span in spans_of_sentences(paragraph, language)]
    sentences = [piece.strip() for piece in pieces if piece.strip()]
    if len(sentences) < 2 or not all(map(_is_whole, sentences)):
        return paragraph
    order = list(range(len(sentences)))
    while order == sorted(order):
        rng.shuffle(order)
    moved = iter(sentences[place] for place in order)
    return "".join(_keep_space(piece, next(moved)) if piece.strip() else piece for piece in pieces)


def _is_whole(sentence: str) -> bool:
    """Whether no quotation and no parenthesis begins in one sentence and ends in another."""
    balanced = all(sentence.count(left) == sentence.count(right) for left, right in _PAIRS)
    return balanced and sentence.count('"') % 2 == 0 and sentence[-1] in '.!?…"”’)]。！？」'


def _keep_space(piece: str, sentence: str) -> str:
    start = len(piece) - len(piece.lstrip())
    return piece[:start] + sentence + piece[len(piece.rstrip()) :]
