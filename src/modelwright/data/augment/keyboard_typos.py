"""Keyboard typos: slips to a neighboring key, transpositions, omissions and doubled letters."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Literal

from modelwright.data.augment.augmentation import Augmentation, check_fraction, prose_augmentation
from modelwright.data.augment.word_spans import Span, draw, find_words, replace_spans

Layout = Literal["qwerty", "qwertz", "azerty", "dvorak", "jcuken"]

_ROWS: Mapping[Layout, tuple[str, str, str]] = {
    "qwerty": ("qwertyuiop", "asdfghjkl", "zxcvbnm"),
    "qwertz": ("qwertzuiopü", "asdfghjklöä", "yxcvbnm"),
    "azerty": ("azertyuiop", "qsdfghjklm", "wxcvbn"),
    "dvorak": ("   pyfgcrl", "aoeuidhtns", " qjkxbmwvz"),
    "jcuken": ("йцукенгшщзхъ", "фывапролджэ", "ячсмитьбю"),
}
"""Letters of the three rows; a space is a key without a letter."""
_OFFSETS = (0.0, 0.25, 0.75)
"""Where the rows begin, in widths of a key, as on staggered keyboards."""
_MIN_WORD_LEN = 4


@dataclass(frozen=True, kw_only=True)
class KeyboardTyposConfig:
    """Slips of the typing hand."""

    fraction: float = 0.05
    """Fraction of the words with four letters or more that get one typo."""
    layout: Layout = "qwerty"
    """Keyboard on which the neighbors of a key are looked up."""

    def __post_init__(self) -> None:
        check_fraction("fraction", self.fraction)


def keyboard_typos(config: KeyboardTyposConfig) -> Augmentation:
    return prose_augmentation(
        "keyboard_typos", lambda text, rng: add_typos(text, config, rng), keeps=("word_count", "lines")
    )


def add_typos(text: str, config: KeyboardTyposConfig, rng: Random) -> str | None:
    """One typo in some words; the first letter of a word stays, as it nearly always does when people type."""
    words = [word for word in find_words(text) if word.text.isalpha() and len(word.text) >= _MIN_WORD_LEN]
    chosen = draw(words, config.fraction, rng)
    return replace_spans(text, [Span(word.start, word.end, _typo(word.text, config.layout, rng)) for word in chosen])


def _typo(word: str, layout: Layout, rng: Random) -> str:
    place = rng.randrange(1, len(word) - 1)
    letter, following = word[place], word[place + 1]
    near = neighbors(layout).get(letter.lower(), "")
    kinds = ["omission", "doubling"] + ["slip"] * 2 * bool(near) + ["transposition"] * (letter != following)
    match rng.choice(kinds):
        case "slip":
            slip = rng.choice(near)
            return word[:place] + (slip.upper() if letter.isupper() else slip) + word[place + 1 :]
        case "transposition":
            return word[:place] + following + letter + word[place + 2 :]
        case "doubling":
            return word[:place] + letter + word[place:]
        case _:
            return word[:place] + word[place + 1 :]


@cache
def neighbors(layout: Layout) -> Mapping[str, str]:
    """The letters on the keys that touch each key: beside it, above it and below it."""
    keys = {
        letter: (column + _OFFSETS[row], row)
        for row, letters in enumerate(_ROWS[layout])
        for column, letter in enumerate(letters)
        if letter != " "
    }
    return {
        letter: "".join(
            other for other, (u, v) in keys.items() if other != letter and abs(x - u) <= 1 and abs(y - v) <= 1
        )
        for letter, (x, y) in keys.items()
    }
