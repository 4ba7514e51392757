"""What a document tells about the rows that it is packed into: the source that a mixture weighs, and a score."""

import math
import zlib
from typing import Literal

from modelwright.core.errors import DataError
from modelwright.data.document import Document

COMPRESSION_RATIO = "compression_ratio"
COMPRESSION_LEVEL = 6


def row_source(document: Document, group_by: Literal["none", "kind", "source"]) -> str:
    """The name of the source that the rows of a document belong to; "" if all rows are alike."""
    return {"none": "", "kind": document.kind, "source": document.source}[group_by]


def row_score(document: Document, score: str) -> float | None:
    """The score of a document: compressed over uncompressed bytes (zlib; a text that repeats itself is easy), or its
    numeric field `score` from `meta`; None if `score` is "".

    Raises `DataError` if the document has no such field or if it is not a finite number.
    """
    if not score:
        return None
    if score == COMPRESSION_RATIO:
        raw = document.text.encode("utf-8", "replace")
        return len(zlib.compress(raw, COMPRESSION_LEVEL)) / max(1, len(raw))
    value = document.meta.get(score)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        names = ", ".join(map(str, document.meta)) or "none"
        raise DataError(
            f"{document.id}: the field {score!r} is {value!r}, not a number (fields of the record: {names}); "
            "name it in data.keep_fields and give every record one, or set batching.curriculum.by to "
            f"{COMPRESSION_RATIO}"
        )
    return float(value)
