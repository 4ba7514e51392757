"""The files of a folder of cleaned documents, and what a reader of such a folder takes from it."""

from collections.abc import Sequence
from pathlib import PurePosixPath

KEPT, DROPPED, REPORT = "kept.jsonl.zst", "dropped.jsonl.zst", "report.json"


def without_dropped(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split paths of files into those to read and those of cleaned folders that are not kept documents. A folder is
    recognized by its kept and its dropped documents.
    """
    paths = [PurePosixPath(name) for name in names]
    parts = [{path.parent for path in paths if path.name == part} for part in (KEPT, DROPPED)]
    cleaned = parts[0] & parts[1]
    own = [path.name != KEPT and not cleaned.isdisjoint(path.parents) for path in paths]
    return (
        [name for name, is_own in zip(names, own, strict=True) if not is_own],
        [name for name, is_own in zip(names, own, strict=True) if is_own],
    )
