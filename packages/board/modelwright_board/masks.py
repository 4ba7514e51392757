"""Texts of data and requests, as the board shows them: shortened, with what looks like personal data covered."""

import re

_PERSONAL = re.compile(r"[^\s@<>\"']{1,64}@[^\s@<>\"']{1,255}|(?<![\w.])\+?\d[\d ()/.-]{6,}\d(?![\w.])")


def masked(text: object, most: int = 400) -> str:
    """Returns the beginning of a text, in which addresses and long numbers are covered."""
    words = str(text)[: 4 * most]
    words = _PERSONAL.sub("▮▮▮", words)
    return words if len(words) <= most else words[: most - 3] + "..."
