"""Folders of cleaned documents for tests."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from modelwright.core.config import DataError
from modelwright.core.progress import SilentProgress
from modelwright.data.clean.clean import clean_documents
from modelwright.data.clean.folder import DROPPED, ORDER, REPORT, kept_files
from modelwright.data.document import Document


def result_files(folder: Path) -> list[str]:
    """The names of all files that cleaning wrote."""
    kept = [name for files in kept_files(folder).values() for name in files.values()]
    assert kept, "nothing is kept"
    return [*kept, ORDER, DROPPED, REPORT]


def keep_all(folder: Path, documents: Sequence[Document]) -> None:
    """Write the documents as cleaning keeps them, also where none is for training."""
    with suppress(DataError):
        clean_documents(iter(documents), [], folder, SilentProgress())
