"""Sentence shuffle: reorders the sentences of a paragraph."""

import re
from dataclasses import dataclass
from random import Random

from modelwright.data.augment.augmentation import Augmentation, spans_of_sentences, text_augmentation

_PARAGRAPH_BREAK = re.compile(r"(\n\s*\n)")
_STRUCTURE = re.compile(r"^\s*(?:[-*+•|>#]|\d+[.)]\s|\S+\s*:\s*$)|\t|```", re.MULTILINE)
"""Lines of lists, tables, quotations and headings, whose order has a meaning."""
_PAIRS = (("(", ")"), ("[", "]"), ("“", "”"), ("«", "»"))


@dataclass(frozen=True, kw_only=True)
class SentenceShuffleConfig:
    """Order of sentences within paragraphs."""

    language: str = "en"
    """ISO 639-1 code of the language whose rules find the ends of sentences."""


def sentence_shuffle(config: SentenceShuffleConfig) -> Augmentation:
    return text_augmentation(
        "sentence_shuffle", lambda text, rng: shuffle_sentences(text, config.language, rng), keeps=("words",)
    )


def shuffle_sentences(text: str, language: str, rng: Random) -> str | None:
    """Reorders the sentences of every paragraph but not the white space between them; lists, tables and code stay."""
    parts = _PARAGRAPH_BREAK.split(text)
    for number in range(0, len(parts), 2):  # the parts between are the paragraph breaks
        if _STRUCTURE.search(parts[number]):
            continue
        pieces = [span.text for span in spans_of_sentences(parts[number], language)]
        sentences = [piece.strip() for piece in pieces if piece.strip()]
        # Every quotation and parenthesis must begin and end within its sentence, and a mark must end it.
        is_whole = all(
            all(sentence.count(left) == sentence.count(right) for left, right in _PAIRS)
            and sentence.count('"') % 2 == 0
            and sentence[-1] in '.!?…"”’)]。！？」'
            for sentence in sentences
        )
        if len(sentences) < 2 or not is_whole:
            continue
        order = list(range(len(sentences)))
        while order == sorted(order):  # every order but the original is equally likely
            rng.shuffle(order)
        moved = iter(sentences[place] for place in order)
        parts[number] = "".join(
            piece.replace(piece.strip(), next(moved)) if piece.strip() else piece for piece in pieces
        )
    return "".join(parts)
