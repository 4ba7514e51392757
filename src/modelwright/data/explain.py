"""What cleaning did with one document, and why."""

import difflib
import json
from itertools import islice
from pathlib import Path

from modelwright.core.errors import DataError
from modelwright.data.clean import read_dropped, read_kept
from modelwright.data.clean_folder import REPORT
from modelwright.data.document import Document
from modelwright.data.features import FEATURES, measure
from modelwright.data.steps.step import DroppedDocument

_EXCERPT_CHARS = 1000
_MOST_SIMILAR_NAMES = 100_000


def explain(folder: Path, identifier: str) -> str:
    """Describe what happened to the document of this id in a folder of cleaned documents.

    Raises `DataError` if there is no such document; it names similar ids.
    """
    for dropped in read_dropped(folder):
        if dropped.document.id == identifier:
            return _describe(folder, dropped.document, dropped)
    for document in read_kept(folder):
        if document.id == identifier:
            return _describe(folder, document, None)
    names = [dropped.document.id for dropped in islice(read_dropped(folder), _MOST_SIMILAR_NAMES)]
    names += [document.id for document in islice(read_kept(folder), _MOST_SIMILAR_NAMES)]
    near = difflib.get_close_matches(identifier, names, n=3, cutoff=0.0)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise DataError(f"{folder}: has no document {identifier!r}{hint}")


def _describe(folder: Path, document: Document, dropped: DroppedDocument | None) -> str:
    lines = [f"id        {document.id}", f"source    {document.source}", f"kind      {document.kind}, {document.split}"]
    if dropped is None:
        lines.append("result    kept")
    else:
        detail = f": {dropped.detail}" if dropped.detail else ""
        lines.append(f"result    dropped by {dropped.step}, {dropped.reason}{detail}")
    limits = json.loads((folder / REPORT).read_text())["limits"].get(document.kind, {})
    lines += ["", f"{'feature':<26}{'value':>12}{'min':>12}{'max':>12}"]
    for name, value in zip(FEATURES, measure(document), strict=True):
        low, high = (f"{limits[key]:.4g}" if (key := f"{side}_{name}") in limits else "" for side in ("min", "max"))
        lines.append(f"{name:<26}{value:>12.4g}{low:>12}{high:>12}")
    text = document.text[:_EXCERPT_CHARS] + (" ..." if len(document.text) > _EXCERPT_CHARS else "")
    return "\n".join([*lines, "", text])
