"""Hints for words that are not known: the nearest known one, and what to do with the name of a model hub."""

import difflib
import os
import re
from collections.abc import Iterable

SIMILARITY = 0.65
"""Least ratio of `difflib` at which a name is taken for a misspelling of another: that of `rum` and `run` is 0.67."""

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def nearest(word: str, known: Iterable[str], *, similarity: float = SIMILARITY) -> str:
    """Returns the known word with `word` as initials (`lr` for `learning_rate`), or the most similar; "" for none."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=similarity)
    # Initials first: short words resemble many names, but few names have them as initials.
    by_initials = [name for name in known if "_" in name and "".join(part[:1] for part in name.split("_")) == word]
    return [*by_initials, *near, ""][0]


def did_you_mean(word: str, known: Iterable[str], *, prefix: str = "") -> str:
    """Returns `; did you mean NAME?` with the nearest known word, or ""."""
    near = nearest(word, known)
    return f"; did you mean {prefix + near!r}?" if near else ""


def hub_hint(word: str) -> str:
    """Returns a hint for the name of a model on a hub (`owner/name`): nothing is downloaded, and how to get a folder;
    "" for other words.
    """
    owner = word.partition("/")[0]
    if not _HUB_NAME.fullmatch(word) or os.path.isdir(owner) or owner in (".", ".."):
        return ""
    return (
        f"; if this is the name of a model on a hub: nothing is downloaded here, so fetch its folder first "
        f"(hf download {word} --local-dir FOLDER, on a machine with a connection) and name FOLDER"
    )
