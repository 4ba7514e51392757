"""Why a document is dropped."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Drop:
    """A stage drops a document. reason: short and from a fixed set, because reasons become counters; detail: the
    measured value and the limit, or the document that was kept instead.
    """

    reason: str
    detail: str = ""
