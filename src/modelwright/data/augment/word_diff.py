"""What changed between two texts, word by word, for people to read."""

import re
from collections.abc import Iterator
from difflib import SequenceMatcher

_PIECES = re.compile(r"\s+|\w+|[^\w\s]")


def word_diff(before: str, after: str) -> Iterator[tuple[str, str]]:
    """Pairs of corresponding pieces: equal where nothing changed; "" for one that has no counterpart."""
    old, new = _PIECES.findall(before), _PIECES.findall(after)
    for _, i, j, k, m in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        yield "".join(old[i:j]), "".join(new[k:m])
