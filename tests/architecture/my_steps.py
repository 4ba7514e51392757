"""Steps of cleaning that the package does not know, as a user writes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from modelwright.data.clean.steps.step import Columns, Decisions, Drop, MeasuredCorpus
from modelwright.data.document import Document


@dataclass(frozen=True)
class NoTables:
    """Drops tables, and takes the marks of lists away."""

    most_cells: int = 20
    name: str = "no_tables"

    def __call__(self, document: Document) -> Document | Drop:
        if "cannot be read" in document.text:
            raise RuntimeError(document.text)
        num_cells = document.text.count("|")
        if num_cells > self.most_cells:
            return Drop("table", f"{num_cells} cells, limit {self.most_cells}")
        return document.map_text(lambda text: text.removeprefix("* "))


@dataclass(frozen=True)
class FewOfEachOpening:
    """Keeps the first documents of those that begin with the same word: it needs the whole corpus."""

    most: int = 40
    name: str = "openings"

    def measure(self, documents: Sequence[Document], columns: Columns) -> Columns:
        words = [document.text.split(maxsplit=1)[0] if document.text.strip() else "" for document in documents]
        return {"opening": np.array(words, "U20")}

    def decide(self, corpus: MeasuredCorpus) -> Decisions:
        counts: dict[str, int] = {}
        drops: dict[int, Drop] = {}
        for number, word in enumerate(corpus.column("opening")):
            if corpus.alive[number]:
                counts[word] = counts.get(word, 0) + 1
                if counts[word] > self.most:
                    drops[number] = Drop("frequent opening", f"{word!r}, number {counts[word]}")
        return Decisions(drops=drops, report={"figures": {"openings": len(counts)}})


def shout(document: Document) -> Document:
    """A function is a step, too."""
    return document.map_text(lambda text: text.replace("quietly", "LOUDLY"))


class NeedsSettings:
    def __init__(self, limit: int) -> None: ...


class FailsLate:
    """Fails on the whole corpus."""

    name = "fails_late"

    def measure(self, documents: Sequence[Document], columns: Columns) -> Columns:
        return {}

    def decide(self, corpus: MeasuredCorpus) -> Decisions:
        return Decisions(drops={0: Drop("x")}, report={"x": {}}) if len(corpus) > 10**6 else self._broken({})

    def _broken(self, columns: Mapping[str, int]) -> Decisions:
        raise KeyError("opening")


def forgets(document: Document) -> None:
    """Returns nothing."""


class_that_is_a_number = 3
