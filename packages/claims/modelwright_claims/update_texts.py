"""Four bodies of text of this machine for claims about updates: one to begin with, and three that come later.

At first the documentation of Python's standard library; then that of NumPy, that of PyTorch, and the standard library's
code. Modules are held out whole.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from modelwright.core.artifacts import write_atomic
from modelwright.core.seeds import derive_seed
from modelwright.data.document import Document
from modelwright.data.sources.stdlib_corpus import machine_corpus

OLD = "old"
UPDATES = ("numpy", "torch", "code")
"""In the order in which they come."""
SOURCES = {"python:stdlib": OLD, "python:topics": OLD, "python:numpy": "numpy", "python:torch": "torch"}
"""The body that prose of each source belongs to."""
HELDOUT_FRACTION = 1 / 8
"""Share of the modules that nothing is trained on."""
FEWEST_CHARS, MOST_CHARS = 100, 4_000
PIECE_CHARS = 1_000
"""Length of a piece of code, so that it is about as long as a docstring."""


@dataclass(frozen=True)
class UpdateTexts:
    """A JSON-lines file for each body and, with `-heldout`, for its held-out part."""

    folder: Path

    def train(self, body: str) -> str:
        return str((self.folder / f"{body}.jsonl").resolve())

    def heldout(self, body: str) -> str:
        return str((self.folder / f"{body}-heldout.jsonl").resolve())


def write_texts(folder: Path, *, fraction: float, most_old: int, most_new: int, most_heldout: int) -> UpdateTexts:
    """Write the files, unless they are there. fraction: of the modules; most: documents of a body, drawn by hash."""
    texts = UpdateTexts(folder)
    if (folder / "done").exists():
        return texts
    folder.mkdir(parents=True, exist_ok=True)
    by_file: dict[str, dict[str, Document]] = {}
    heldout: set[str] = set()
    documents = sorted(_documents(fraction), key=lambda one: not _is_heldout(one[1]))
    for body, document in documents:  # of two equal texts the held-out one stays
        if _is_heldout(document):
            heldout.add(_content(document))
            by_file.setdefault(f"{body}-heldout", {}).setdefault(_content(document), document)
        elif _content(document) not in heldout:
            by_file.setdefault(body, {}).setdefault(_content(document), document)
    limits = {OLD: most_old} | dict.fromkeys(UPDATES, most_new)
    for body, most in limits.items():
        for name, limit in ((body, most), (f"{body}-heldout", most_heldout)):
            drawn = _drawn(list(by_file.get(name, {}).values()), limit)
            write_atomic(folder / f"{name}.jsonl", "".join(f"{one.to_json()}\n" for one in drawn))
    write_atomic(folder / "done", json.dumps(limits))
    return texts


def _documents(fraction: float) -> Iterator[tuple[str, Document]]:
    """Documents with their body; code in pieces."""
    for document in machine_corpus(fraction=fraction, skip=lambda reason, file: None):
        if document.kind == "prose" and document.source in SOURCES:
            if FEWEST_CHARS <= len(document.text) <= MOST_CHARS:
                yield SOURCES[document.source], document
        elif document.kind == "code":
            for number, piece in enumerate(_pieces(document.text)):
                yield "code", replace(document, id=f"{document.id}:{number}", text=piece)


def _pieces(code: str) -> Iterator[str]:
    """Whole lines, at most `PIECE_CHARS` characters together where lines are shorter."""
    piece: list[str] = []
    size = 0
    for line in code.splitlines(keepends=True):
        if size + len(line) > PIECE_CHARS and size >= FEWEST_CHARS:
            yield "".join(piece)
            piece, size = [], 0
        piece.append(line)
        size += len(line)
    if FEWEST_CHARS <= size <= MOST_CHARS:
        yield "".join(piece)


def _content(document: Document) -> str:
    """The text without its title, by which documents are compared."""
    return document.text.partition("\n\n")[2] if document.kind == "prose" else document.text


def _is_heldout(document: Document) -> bool:
    return derive_seed(0, "updates", "heldout", document.meta["module"]) < HELDOUT_FRACTION * 2**63


def _drawn(documents: Sequence[Document], limit: int) -> list[Document]:
    chosen = sorted(documents, key=lambda document: derive_seed(0, "updates", document.id))[:limit]
    return [replace(document, split="open", meta={}) for document in chosen]
