"""An encoder and an augmentation method that a worker process loads in a moment, because nothing here needs PyTorch."""

from dataclasses import dataclass
from random import Random

from modelwright.data.augment.augmentation import Augmentation, text_augmentation
from modelwright.data.augment.augmenter import Encode
from modelwright.data.document import Document
from modelwright.data.rows.pack import TokenSequence


def encode(document: Document) -> list[TokenSequence]:
    """Each word is a token; a conversation has a mask."""
    ids = [2 + int(word) for word in document.text.split()]
    if document.kind == "qa":
        return [TokenSequence(ids, [number % 3 == 0 for number in range(len(ids))])]
    return [TokenSequence(ids)]


@dataclass(frozen=True)
class Words:
    def load(self) -> Encode:
        return encode


def reversed_words(text: str, rng: Random) -> str:
    """Another order and another number of words: longer or shorter."""
    words = text.split()[::-1]
    return " ".join(words[: -(len(words) // 4) or None] if rng.random() < 0.5 else [*words, *words[:5]])


def methods() -> list[Augmentation]:
    return [text_augmentation("reversed_words", reversed_words)]
