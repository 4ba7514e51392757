"""The interfaces of cleaning steps: `Step` looks at one document at a time, `CorpusStep` at the whole corpus.

`STEPS` in `data/clean/config.py` lists the steps of this package; `data/clean/clean.py` runs any list of them.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from modelwright.core.extensions import NoSettings
from modelwright.data.clean.measured_corpus import MeasuredCorpus
from modelwright.data.document import Document

Columns = Mapping[str, NDArray[Any]]
"""Arrays by name, usually with one row for each document."""


@dataclass(frozen=True)
class Drop:
    """The decision to drop a document. reason: short and from a fixed set, because reasons become counters; detail: the
    measured value and the limit, or the document that was kept instead.
    """

    reason: str
    detail: str = ""


@dataclass(frozen=True, eq=False)
class Drops(Mapping[int, Drop]):
    """Drops by the number of the document, each made when it is asked for: a corpus may lose millions of documents.

    numbers: ascending; drop: makes the drop of a document from its index among them.
    """

    numbers: NDArray[np.int64]
    drop: Callable[[int], Drop]

    def __getitem__(self, number: int) -> Drop:
        place = int(np.searchsorted(self.numbers, number))
        if place == len(self.numbers) or self.numbers[place] != number:
            raise KeyError(number)
        return self.drop(place)

    def __iter__(self) -> Iterator[int]:
        return map(int, self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True)
class DroppedDocument:
    """A document that cleaning dropped, the step that dropped it, and why."""

    document: Document
    step: str
    reason: str
    detail: str

    def to_json(self) -> str:
        """Serializes to one JSON line, without the line end; `from_json` reads it back."""
        entry = {"step": self.step, "reason": self.reason, "detail": self.detail, **self.document.plain()}
        return json.dumps(entry, ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> "DroppedDocument":
        entry = json.loads(line)
        step, reason, detail = (entry.pop(name) for name in ("step", "reason", "detail"))
        return cls(Document.from_plain(entry), step, reason, detail)


class Step(Protocol):
    """Looks at one document at a time, in worker processes; it must be picklable.

    Its result depends only on the document and its own settings. Its dataclass fields are these settings: interrupted
    work is resumed with equal steps only.
    """

    @property
    def name(self) -> str:
        """The key of the step in the report."""
        ...

    def __call__(self, document: Document) -> Document | Drop:
        """Returns the document, a changed copy of it, or the reason to drop it. Nothing is changed in place: a document
        that is returned unchanged is written as it was read.
        """
        ...


@runtime_checkable
class Redactor(Protocol):
    """A `Step` that also removes personal data from dropped documents, before they are written."""

    def redact(self, document: Document) -> Document: ...


@runtime_checkable
class CountingStep(Protocol):
    """A `Step` that counts its changes to documents."""

    def take_counts(self) -> Mapping[str, Mapping[str, int]]:
        """The counters since the last call, by field of `CleanReport`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """Decisions of a `CorpusStep`."""

    drops: Mapping[int, Drop]
    """Drops by the number of the document; a `Drops` for many."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `CleanReport`, or `figures` of the step under names that it chooses."""


@runtime_checkable
class CorpusStep(Protocol):
    """Decides about documents from measurements of all of them. As for `Step`, its fields are its settings."""

    @property
    def name(self) -> str:
        """The key of the step in the report."""
        ...

    def measure(self, documents: Sequence[Document], columns: Columns) -> Columns:
        """Measures a shard of N documents, in worker processes; the columns are stored.

        columns: `kind` and `split` (1 for held out), and those that the corpus steps before this one measured.
        """
        ...

    def decide(self, corpus: MeasuredCorpus) -> Decisions:
        """Decides about the documents that are `alive`, in one process."""
        ...


@dataclass(frozen=True)
class Phase:
    """Steps that see one document each, and the corpus steps that then decide about what these kept."""

    steps: tuple[Step, ...]
    corpus_steps: tuple[CorpusStep, ...]


def divide(steps: Sequence[Step | CorpusStep]) -> tuple[Phase, ...]:
    """Divides steps into two or more phases. The last one does not have corpus steps: its documents are the result."""
    phases: list[Phase] = []
    single: list[Step] = []
    deciding: list[CorpusStep] = []
    for step in steps:
        if isinstance(step, CorpusStep):
            deciding.append(step)
            continue
        if deciding:
            phases.append(Phase(tuple(single), tuple(deciding)))
            single, deciding = [], []
        single.append(step)
    if deciding or not phases:
        phases.append(Phase(tuple(single), tuple(deciding)))
        single = []
    return (*phases, Phase(tuple(single), ()))


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """An entry of `STEPS`, or of the entry point of another package (docs/extending.md)."""

    name: str
    """The name of the step and, unless `section` names another, of its section of `CleanConfig`."""
    build: Callable[[Any, int], Step | CorpusStep | None]
    """Builds the step from its section and the seed of the run; None if the section switches it off."""
    remedies: Mapping[str, str] = field(default_factory=dict)
    """Option that keeps the documents, by the reason for their drop."""
    config: type = NoSettings
    """The dataclass of the settings of a step of another package; the others have a section of `CleanConfig`."""
    sources: Sequence[str] = ()
    """Settings that name sources. Like those of `files` they affect the result, and become absolute in a run."""
    files: Sequence[str] = ()
    """Settings that name files and folders which affect the result."""
    paths: Sequence[str] = ()
    """Settings that name other files and folders, such as one that the step writes."""
    section: str = ""
    """Section that the step reads, if not one named after it."""

    def values(self, names: Sequence[str], settings: Any) -> list[str]:
        """Lists the paths in some of the settings."""
        values = [getattr(settings, name) for name in names]
        return [path for value in values for path in ([value] if isinstance(value, str) else value) if path]

    def replace_paths(self, settings: Any, source: Callable[[str], str], path: Callable[[str], str]) -> Any:
        """Returns the settings with one function applied to each source, and another to each path."""
        change = {**dict.fromkeys(self.sources, source), **dict.fromkeys((*self.files, *self.paths), path)}
        old = {name: getattr(settings, name) for name in change}
        new = {n: change[n](one) if isinstance(one, str) else tuple(map(change[n], one)) for n, one in old.items()}
        return replace(settings, **new)

    def settings_of(self, config: Any) -> Any:
        """The section of a `CleanConfig` that the step reads."""
        return getattr(config, self.section or self.name)
