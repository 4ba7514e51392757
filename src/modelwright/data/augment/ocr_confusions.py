"""OCR confusions: characters that recognition of printed text takes for similar ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from modelwright.data.augment.augmentation import Augmentation, check_fraction, prose_augmentation
from modelwright.data.augment.word_spans import Span, draw, find_words, replace_spans

CONFUSIONS: Mapping[str, tuple[str, ...]] = {
    "rn": ("m",), "m": ("rn",), "cl": ("d",), "d": ("cl",), "vv": ("w",), "w": ("vv",), "ri": ("n",), "nn": ("rm",),
    "l": ("1", "I"), "I": ("l", "1"), "i": ("l", "j"), "O": ("0", "Q"), "o": ("0", "c"), "S": ("5",), "s": ("5",),
    "B": ("8",), "b": ("h", "6"), "h": ("b",), "e": ("c",), "c": ("e",), "g": ("9", "q"), "q": ("g",), "Z": ("2",),
    "z": ("2",), "G": ("6",), "f": ("t",), "t": ("f",), "u": ("ii",), "n": ("ri",), "y": ("v",), "E": ("F",),
    "D": ("O",), "U": ("V",), "a": ("o",), "li": ("h",), "tt": ("ll",),
}  # fmt: skip
"""What printed characters are taken for: pairs of similar shape, most of them in both directions."""
_MAX_LEN = max(map(len, CONFUSIONS))


@dataclass(frozen=True, kw_only=True)
class OcrConfusionsConfig:
    """Errors of optical character recognition."""

    fraction: float = 0.05
    """Fraction of the words that get one confusion."""

    def __post_init__(self) -> None:
        check_fraction("fraction", self.fraction)


def ocr_confusions(config: OcrConfusionsConfig) -> Augmentation:
    return prose_augmentation(
        "ocr_confusions", lambda text, rng: confuse(text, config.fraction, rng), keeps=("word_count", "lines")
    )


def confuse(text: str, fraction: float, rng: Random) -> str | None:
    """One confusion in each of some words."""
    words = [(word, places) for word in find_words(text) if len(word.text) > 2 and (places := _places(word.text))]
    edits = []
    for word, places in draw(words, fraction, rng):
        start, end = rng.choice(places)
        wrong = rng.choice(CONFUSIONS[word.text[start:end]])
        edits.append(Span(word.start + start, word.start + end, wrong))
    return replace_spans(text, edits)


def _places(word: str) -> list[tuple[int, int]]:
    """Where characters stand that can be confused."""
    ends = ((start, start + size) for start in range(len(word)) for size in range(1, _MAX_LEN + 1))
    return [(start, end) for start, end in ends if end <= len(word) and word[start:end] in CONFUSIONS]
