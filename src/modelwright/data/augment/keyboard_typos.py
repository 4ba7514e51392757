"""Keyboard typos: slips to a neighboring key, transpositions, omissions and doubled letters."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Literal

from modelwright.data.augment import augmentation as aug

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
"""Offset of each row in widths of a key, as on staggered keyboards."""
_MIN_WORD_LEN = 4


@dataclass(frozen=True, kw_only=True)
class KeyboardTyposConfig:
    """Slips of the typing hand."""

    fraction: float = 0.05
    """Fraction of the words with a typo, among those with four letters or more."""
    layout: Layout = "qwerty"
    """Keyboard on which the neighbors of a key are looked up."""

    __post_init__ = aug.check_fraction


def keyboard_typos(config: KeyboardTyposConfig) -> aug.Augmentation:
    return aug.text_augmentation(
        "keyboard_typos", lambda text, rng: add_typos(text, config, rng), keeps=("word_count", "lines")
    )


def add_typos(text: str, config: KeyboardTyposConfig, rng: Random) -> str | None:
    """Makes one typo in some words; the first letter of a word stays, as it nearly always does when people type."""
    words = [word for word in aug.find_words(text) if word.text.isalpha() and len(word.text) >= _MIN_WORD_LEN]
    edits: list[aug.Span] = []
    for word in aug.draw(words, config.fraction, rng):
        place = rng.randrange(1, len(word.text) - 1)
        letter, following = word.text[place], word.text[place + 1]
        before, after = word.text[:place], word.text[place + 1 :]
        near = neighbors(config.layout).get(letter.lower(), "")
        # Slips count twice, as the most common typo. Swapping two equal letters would change nothing.
        kinds = ["omission", "doubling"] + ["slip"] * 2 * bool(near) + ["transposition"] * (letter != following)
        match rng.choice(kinds):
            case "slip":
                slip = rng.choice(near)
                typo = before + (slip.upper() if letter.isupper() else slip) + after
            case "transposition":
                typo = before + following + letter + after[1:]
            case "doubling":
                typo = before + letter + letter + after
            case _:
                typo = before + after
        edits.append(aug.Span(word.start, word.end, typo))
    return aug.replace_spans(text, edits)


@cache
def neighbors(layout: Layout) -> Mapping[str, str]:
    """Returns the letters on the keys that touch each key on its left, on its right, above and below."""
    keys = {
        letter: (column + _OFFSETS[row], row)
        for row, letters in enumerate(_ROWS[layout])
        for column, letter in enumerate(letters)
        if letter != " "
    }
    # A key touches those of the next row that overlap it, because the rows are staggered by less than a key.
    return {
        letter: "".join(
            other for other, (u, v) in keys.items() if other != letter and abs(x - u) <= 1 and abs(y - v) <= 1
        )
        for letter, (x, y) in keys.items()
    }
