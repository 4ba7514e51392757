"""OCR confusions: characters that recognition of printed text mistakes for similar ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from modelwright.data.augment import augmentation as aug

CONFUSIONS: Mapping[str, tuple[str, ...]] = {
    "rn": ("m",), "m": ("rn",), "cl": ("d",), "d": ("cl",), "vv": ("w",), "w": ("vv",), "ri": ("n",), "nn": ("rm",),
    "l": ("1", "I"), "I": ("l", "1"), "i": ("l", "j"), "O": ("0", "Q"), "o": ("0", "c"), "S": ("5",), "s": ("5",),
    "B": ("8",), "b": ("h", "6"), "h": ("b",), "e": ("c",), "c": ("e",), "g": ("9", "q"), "q": ("g",), "Z": ("2",),
    "z": ("2",), "G": ("6",), "f": ("t",), "t": ("f",), "u": ("ii",), "n": ("ri",), "y": ("v",), "E": ("F",),
    "D": ("O",), "U": ("V",), "a": ("o",), "li": ("h",), "tt": ("ll",),
}  # fmt: skip
"""Characters of similar shape for printed characters, most of them in both directions."""
_MAX_LEN = max(map(len, CONFUSIONS))


@dataclass(frozen=True, kw_only=True)
class OcrConfusionsConfig:
    """Errors of optical character recognition."""

    fraction: float = 0.05
    """Fraction of the words with one confusion."""

    __post_init__ = aug.check_fraction


def ocr_confusions(config: OcrConfusionsConfig) -> aug.Augmentation:
    return aug.text_augmentation(
        "ocr_confusions", lambda text, rng: confuse(text, config.fraction, rng), keeps=("word_count", "lines")
    )


def confuse(text: str, fraction: float, rng: Random) -> str | None:
    """Replaces one place in each of some words by a similar shape."""
    candidates: list[list[aug.Span]] = []
    for word in aug.find_words(text):
        letters = word.text
        ends = ((start, start + size) for start in range(len(letters)) for size in range(1, _MAX_LEN + 1))
        places = [
            aug.Span(word.start + start, word.start + end, letters[start:end])
            for start, end in ends
            if end <= len(letters) and letters[start:end] in CONFUSIONS  # a slice at the end would be shorter
        ]
        if len(letters) > 2 and places:
            candidates.append(places)
    edits: list[aug.Span] = []
    for places in aug.draw(candidates, fraction, rng):
        place = rng.choice(places)
        edits.append(aug.Span(place.start, place.end, rng.choice(CONFUSIONS[place.text])))
    return aug.replace_spans(text, edits)
