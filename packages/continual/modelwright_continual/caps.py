"""Caps on the share of an update's new texts from one source, one user and one template, so that none of them decides
what the model learns, however harmless each of its texts looks.

A template is a group of near-duplicates after names (words that begin with a capital) and words with digits are masked.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from modelwright.core.config import ConfigError, derive_seed
from modelwright.data.clean.fingerprints import fingerprints, jaccard
from modelwright.data.document import Document

USER_FIELD = "user"
"""Name of the record field that identifies its user, as in exports of the request log."""
LEAST = 20
"""Number of texts per group that always pass: in a small update a share alone would drop texts that only look alike."""
MIN_JACCARD = 0.5
"""Minimum similarity of masked texts of one template. Groups are transitive, so copies of a template are found even
though many pairs of them share no MinHash band."""
_MASK = "\0"
_MOST_MASKED = 0.5
"""Largest share of masked words; a text above it, such as a headline or one in capitals, keeps its names."""


@dataclass(frozen=True, kw_only=True)
class Caps:
    """Largest shares of an update's new texts from one source (file), one user and one template; 1 means no cap."""

    source: float = 1.0
    """No cap by default, because one file with all texts is the usual case; set it if files differ in trust."""
    user: float = 0.05
    template: float = 0.01

    def __post_init__(self) -> None:
        for name, share in vars(self).items():
            if not 0.0 < share <= 1.0:
                raise ConfigError(f"--{name}-cap: must be above 0 and at most 1, got {share:g}; 1 means no cap")

    def apply(self, documents: Sequence[Document], seed: int) -> tuple[list[Document], list[Document], dict[str, Any]]:
        """Returns the documents within all caps and those beyond the cap of their template, both without their users,
        and a record of the capping: the number of texts by cap, and the groups that lost the most. The texts of a group
        that stay are drawn at random, whatever their order.
        """
        order = sorted(documents, key=lambda document: derive_seed(seed, "caps", document.id, document.identity))
        record: dict[str, Any] = {}
        beyond: list[Document] = []
        # Each cap sees only the texts that the caps before it left, but its limit is a share of all texts.
        caps: tuple[tuple[str, float, Callable[[Sequence[Document]], Sequence[str]]], ...] = (
            ("user", self.user, lambda group: [str(one.meta.get(USER_FIELD, "")) for one in group]),
            ("source", self.source, lambda group: [one.source for one in group]),
            ("template", self.template, template_groups),
        )
        for name, share, groups_of in caps:
            if share == 1.0:
                continue
            limit, taken, lost, kept = max(LEAST, int(share * len(documents))), Counter[str](), Counter[str](), []
            for document, group in zip(order, groups_of(order), strict=True):
                taken[group] += 1
                if group and taken[group] > limit:
                    lost[group] += 1
                    if name == "template":
                        beyond.append(_without_user(document))
                else:
                    kept.append(document)
            order = kept
            if lost:
                # a user is personal data, so the record has the counts alone
                named = [{"example": "" if name == "user" else g[:200], "capped": n} for g, n in lost.most_common(10)]
                record[name] = {"limit": limit, "capped": lost.total(), "groups": len(lost), "largest": named}
        # By identity, because documents may be equal.
        ids = {id(document) for document in order}
        return [_without_user(document) for document in documents if id(document) in ids], beyond, record


def template_groups(documents: Sequence[Document]) -> list[str]:
    """Returns, for each document, the text of the first document of its template, or "" if no other document shares its
    template.
    """
    texts = [masked(document.text) for document in documents]
    # as prose, so that whole conversations are compared and titles count
    bare = [Document(id="", text=text, kind="prose", split="open", source="") for text in texts]
    prints = fingerprints(bare)
    shingles = [np.unique(prints.shingles[a:b]) for a, b in zip(prints.offsets[:-1], prints.offsets[1:], strict=True)]
    # Union-find; the smaller number becomes the root, so a group is represented by its first document.
    parent = list(range(len(texts)))

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = number = parent[parent[number]]
        return number

    first: dict[Any, int] = {}
    for number, text in enumerate(texts):
        # A text too short for shingles is grouped with equal texts only.
        bands = list(enumerate(prints.bands[number].tolist())) if len(shingles[number]) else [(-1, text)]
        for band in bands:
            other = first.setdefault(band, number)
            if (a := root(number)) != (b := root(other)) and (
                not len(shingles[number]) or jaccard(shingles[number], shingles[other]) >= MIN_JACCARD
            ):
                parent[max(a, b)] = min(a, b)
    roots = [root(number) for number in range(len(texts))]
    sizes: Mapping[int, int] = Counter(roots)
    return [documents[one].text if sizes[one] > 1 else "" for one in roots]


def masked(text: str) -> str:
    """Replaces each run of names and numbers by one mask."""
    words = re.findall(r"\w+", text)
    is_number = [any(map(str.isdigit, word)) for word in words]
    is_name = [word[0].isupper() for word in words]
    if sum(map(max, is_number, is_name)) <= _MOST_MASKED * len(words):
        is_number = list(map(max, is_number, is_name))
    shown = [_MASK if hide else word for word, hide in zip(words, is_number, strict=True)]
    runs = [(word, list(run)) for word, run in groupby(shown)]
    return " ".join("0" if word == _MASK else " ".join(run) for word, run in runs)


def _without_user(document: Document) -> Document:
    return replace(document, meta={name: value for name, value in document.meta.items() if name != USER_FIELD})
