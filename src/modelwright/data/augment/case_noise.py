"""Case and punctuation noise: capitals and punctuation marks as careless writers leave them."""

import re
from dataclasses import dataclass
from random import Random

from modelwright.data.augment import augmentation as aug

_MARK = re.compile(r"(?<=[^\W\d_])(?:(?<=\w\w)[.,;:!?](?=\s|$)|['’](?=[^\W\d_])| [—–] )")
"""Punctuation after a word, apostrophes within one and dashes between words; not in figures or in "e.g."."""
_MIN_WORD_LEN = 3
_REPLACEMENTS = {
    ",": "", ";": ",", ":": "", ".": "", "!": ".", "?": "", "'": "", "’": "'", " — ": ", ", " – ": ", ",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CaseNoiseConfig:
    """Careless capitals and punctuation."""

    fraction: float = 0.05
    """Fraction of the words whose capitals change, and of the punctuation marks that are left out or replaced."""

    __post_init__ = aug.check_fraction


def case_noise(config: CaseNoiseConfig) -> aug.Augmentation:
    return aug.text_augmentation(
        "case_noise", lambda text, rng: add_noise(text, config.fraction, rng), keeps=("letters", "lines")
    )


def add_noise(text: str, fraction: float, rng: Random) -> str | None:
    """Forgets capitals, capitalizes other words or, for emphasis, writes them in capitals; drops or replaces marks."""
    words: list[aug.Span] = []
    for word in aug.find_words(text):
        if len(word.text) < _MIN_WORD_LEN and word.text not in ("I", "A", "In", "It", "He", "We"):
            continue  # "C" is a unit
        if word.text != word.text.lower():
            other = word.text.lower()
        else:
            other = word.text.upper() if rng.random() < 0.3 else word.text[:1].upper() + word.text[1:]
        if other != word.text:
            words.append(aug.Span(word.start, word.end, other))
    marks = [aug.Span(match.start(), match.end(), _REPLACEMENTS[match[0]]) for match in _MARK.finditer(text)]
    changed = aug.draw(words, fraction, rng)
    # The apostrophe of "don't" lies within a word: edits must not overlap.
    taken = {place for word in changed for place in range(word.start, word.end)}
    return aug.replace_spans(
        text, [*changed, *aug.draw([mark for mark in marks if mark.start not in taken], fraction, rng)]
    )
