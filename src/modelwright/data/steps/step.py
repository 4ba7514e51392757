"""What a cleaning step is.

A step is a generator: documents in, documents out. Each document that goes in either comes out, perhaps changed, or
is handed to `drop` with a reason; none is added, none vanishes. Reasons are short and few ("too short", "duplicate"),
because they become counters. A step that must see the whole corpus first keeps the documents in a `Spool`.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from modelwright.data.document import Document

Drop = Callable[[Document, str], None]
"""Told `(document, reason)`."""


class CleaningStep(Protocol):
    """One cleaning step; `name` is what the counters and the dropped documents carry."""

    @property
    def name(self) -> str: ...

    def __call__(self, documents: Iterator[Document], drop: Drop) -> Iterator[Document]: ...


class Spool:
    """Documents waiting on disk in `folder` while a step looks at all of them; gone when closed."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=2**20)  # noqa: SIM115 - closed in close()

    def add(self, document: Document) -> None:
        self._file.write(document.to_json().encode("utf-8") + b"\n")

    def documents(self) -> Iterator[Document]:
        self._file.seek(0)
        for line in self._file:
            yield Document.from_json(line)

    def close(self) -> None:
        self._file.close()
