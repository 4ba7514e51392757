"""Exact duplicates, and training text that gives a held-out document away.

Texts are compared without their titles and without regard to spacing. What is held out wins: a training document is
dropped when its text, its answer or its summary is that of a held-out document of any kind. Among documents of one
kind and side the first stays. Memory: about 100 bytes a document; the documents themselves wait on disk.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from modelwright.data.document import Document
from modelwright.data.steps.step import Drop, Spool


@dataclass(frozen=True, kw_only=True)
class DuplicatesConfig:
    """`across_kinds`: whether a held-out answer also drops training prose that begins with the same summary."""

    across_kinds: bool = True


@dataclass(frozen=True)
class Duplicates:
    config: DuplicatesConfig
    folder: Path
    name: str = "duplicates"

    def __call__(self, documents: Iterator[Document], drop: Drop) -> Iterator[Document]:
        spool = Spool(self.folder)
        try:
            heldout: set[bytes] = set()
            for document in documents:
                spool.add(document)
                if document.split == "heldout":
                    heldout.update(self._keys(document))
            yield from self._first_ones(spool.documents(), heldout, drop)
        finally:
            spool.close()

    def _first_ones(self, documents: Iterator[Document], heldout: set[bytes], drop: Drop) -> Iterator[Document]:
        seen: set[bytes] = set()
        for document in documents:
            own = _digest(f"{document.kind} {document.split} {document.body}")
            if document.split == "train" and not heldout.isdisjoint(self._keys(document)):
                drop(document, "in the held-out set")
            elif own in seen:
                drop(document, "duplicate")
            else:
                seen.add(own)
                yield document

    def _keys(self, document: Document) -> list[bytes]:
        if not self.config.across_kinds:
            return [_digest(f"{document.kind} {document.body}")]
        return [_digest(text) for text in (document.body, document.meta.get("summary", "")) if text]


def _digest(text: str) -> bytes:
    return hashlib.blake2b(" ".join(text.split()).encode("utf-8"), digest_size=16).digest()
