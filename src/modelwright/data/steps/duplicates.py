"""Exact duplicates, and training text that gives a held-out document away.

Texts are compared without their titles and without regard to spacing, pairs by their answers; an answer of one or two
words ("yes", a label) belongs to many questions and is compared together with its own. A training document is dropped
when its text, its answer or its summary is that of a held-out document of any kind. Among documents of one kind and
side the first stays. A held-out document that stands word for word inside a longer training text is dropped itself,
because the longer one has more to teach. Memory: about 200 bytes a document; the documents themselves wait on disk.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from modelwright.data.document import Document
from modelwright.data.steps.step import Drop, Spool

HEAD_WORDS = 4
"""Words by which a place where a held-out text may begin is found; shorter texts are phrases that anyone may use."""

MIN_ANSWER_WORDS = 3
"""Shorter answers say nothing without their question."""

_WORD = re.compile(r"\w+")
_Head = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DuplicatesConfig:
    """Exact deduplication."""

    check_contained: bool = True
    """Also drop training documents that contain a whole validation document."""


@dataclass(frozen=True)
class Duplicates:
    config: DuplicatesConfig
    folder: Path
    name: str = "duplicates"

    def __call__(self, documents: Iterator[Document], drop: Drop) -> Iterator[Document]:
        spool = Spool(self.folder)
        try:
            heldout: set[bytes] = set()
            bodies = _Bodies()
            for document in documents:
                spool.add(document)
                if document.split == "heldout":
                    heldout.update(_keys(document))
                    bodies.add(document.body)
            contained: set[bytes] = set()
            if self.config.check_contained:
                training = (d for d in spool.documents() if d.split == "train" and heldout.isdisjoint(_keys(d)))
                contained = bodies.found_in(document.text for document in training)
            yield from _first_ones(spool.documents(), heldout, contained, drop)
        finally:
            spool.close()


def _first_ones(
    documents: Iterator[Document], heldout: set[bytes], contained: set[bytes], drop: Drop
) -> Iterator[Document]:
    seen: set[bytes] = set()
    for document in documents:
        own = _digest(f"{document.kind} {document.split} {_identity(document)}".split())
        if document.split == "train" and not heldout.isdisjoint(_keys(document)):
            drop(document, "in the held-out set")
        elif document.split == "heldout" and _digest(_words(document.body)) in contained:
            drop(document, "inside a training text")
        elif own in seen:
            drop(document, "duplicate")
        else:
            seen.add(own)
            yield document


class _Bodies:
    """Word sequences to look for in texts: by their first words, then by number and digest of all of them."""

    def __init__(self) -> None:
        self._by_head: dict[_Head, set[tuple[int, bytes]]] = {}

    def add(self, body: str) -> None:
        words = _words(body)
        if len(words) >= HEAD_WORDS:
            self._by_head.setdefault(tuple(words[:HEAD_WORDS]), set()).add((len(words), _digest(words)))

    def found_in(self, texts: Iterable[str]) -> set[bytes]:
        """Digests of the bodies that stand in one of the texts."""
        result: set[bytes] = set()
        for text in texts:
            words = _words(text)
            heads = zip(*(words[i:] for i in range(HEAD_WORDS)), strict=False)
            for at, head in enumerate(heads):
                if head in self._by_head:
                    entries = self._by_head[head]
                    result.update(digest for n, digest in entries if _digest(words[at : at + n]) == digest)
        return result


def _identity(document: Document) -> str:
    """The text by which a document is the same as another."""
    is_short = document.kind == "qa" and len(document.body.split()) < MIN_ANSWER_WORDS
    return document.text if is_short else document.body


def _keys(document: Document) -> list[bytes]:
    return [_digest(text.split()) for text in (_identity(document), document.meta.get("summary", "")) if text]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _digest(words: list[str]) -> bytes:
    return hashlib.blake2b(" ".join(words).encode("utf-8"), digest_size=16).digest()
