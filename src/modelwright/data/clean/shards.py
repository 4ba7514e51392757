"""Work on one shard of documents, in worker processes: each phase's steps and measurements, and the result's files."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from modelwright.core.errors import DataError
from modelwright.data.clean.folder import DROPPED as DROPPED_FILE
from modelwright.data.clean.folder import KEPT_FILES, ORDER, place_of_file
from modelwright.data.clean.measured_corpus import DOCUMENTS, IDS, ShardFiles, as_array, pack_lines, unpack_lines
from modelwright.data.clean.steps.quality import language_of
from modelwright.data.clean.steps.step import CountingStep, Drop, DroppedDocument, Phase, Redactor, Step
from modelwright.data.document import KINDS, Document

WRITTEN = "written"
DROPPED, KEPT = "dropped", "kept"
# The language is recognized for every twentieth document of a shard, and for 25 at most, because that takes as long as
# all other steps of some documents.
_LANGUAGE_OF_EVERY = 20
_MOST_LANGUAGES = 25
# Languages are recognized only in shards with at least this many documents: for fewer, loading the model is not worth
# 100 MB of memory and half a second.
_FEWEST_FOR_LANGUAGES = 500
# Zstandard's level for files that are read once and removed.
_FAST = 1


def measured(phase: int) -> str:
    """The stage of a shard whose documents went through the steps of a phase and were measured."""
    return f"measured{phase}"


def decided(phase: int) -> str:
    """The stage of a shard for which the corpus steps of a phase have decided."""
    return f"decided{phase}"


@dataclass(frozen=True)
class StepJob:
    """A shard of the work in `folder`, and the phase of the steps that is to be done."""

    folder: str
    number: int
    phases: tuple[Phase, ...]
    phase: int
    documents: tuple[Document, ...] = ()
    """Documents that were read, for the first phase of a shard that is not measured yet."""

    @property
    def files(self) -> ShardFiles:
        return ShardFiles(Path(self.folder), self.number)


@dataclass(frozen=True)
class StepResult:
    """num_documents: number of documents in the shard; facts: of its stage."""

    number: int
    num_documents: int
    facts: dict[str, Any]


def measure_shard(job: StepJob) -> StepResult:
    """Runs the documents through the steps of a phase, and measures the others for its corpus steps.

    Raises `DataError` for a corpus step that measures under the name of another one's column.
    """
    stage, phase = measured(job.phase), job.phases[job.phase]
    facts = job.files.facts(stage)
    if facts is None:
        kept: list[Document] = []
        dropped: list[DroppedDocument] = []
        for result, _ in _results(job):
            if isinstance(result, DroppedDocument):
                dropped.append(result)
            else:
                kept.append(result)
        arrays: dict[str, NDArray[Any]] = {
            "kind": np.array([KINDS.index(document.kind) for document in kept], np.int8),
            "split": np.array([document.split == "heldout" for document in kept], np.int8),
        }
        for step in phase.corpus_steps:
            new = step.measure(kept, arrays)
            if taken := [name for name in new if name in (*arrays, IDS, DOCUMENTS, DROPPED)]:
                raise DataError(f"{step.name}: measures {taken[0]!r}, which another step measures; rename the column")
            arrays |= new
        arrays |= {
            IDS: as_array(json.dumps([document.id for document in kept]).encode()),
            DOCUMENTS: as_array(pack_lines((document.to_json() for document in kept), level=_FAST)),
            DROPPED: as_array(pack_lines((entry.to_json() for entry in dropped), level=_FAST)),
        }
        num_bytes = sum(len(document.text.encode("utf-8", "replace")) for document in job.documents)
        counts = _sum([step.take_counts() for step in phase.steps if isinstance(step, CountingStep)])
        facts = {"documents": len(kept) + len(dropped), "bytes": num_bytes, "counts": counts}
        job.files.write_arrays(stage, arrays, facts)
    return StepResult(job.number, facts["documents"], facts)


def write_shard(job: StepJob) -> StepResult:
    """Runs the documents through the last steps, and writes the kept documents and those dropped in any phase."""
    facts = job.files.facts(WRITTEN)
    if facts is None:
        steps = [step for phase in job.phases for step in phase.steps]
        tally = _Tally(steps)
        for phase in range(job.phase):
            job.files.verify(measured(phase))
            for line in unpack_lines(job.files.array(measured(phase), DROPPED).tobytes()):
                tally.drop(DroppedDocument.from_json(line))
        for result, line in _results(job):
            if isinstance(result, DroppedDocument):
                tally.drop(result)
            else:
                tally.keep(result, line)
        arrays = {KEPT_FILES[place]: as_array(pack_lines(lines)) for place, lines in sorted(tally.kept.items())}
        order = zstandard.ZstdCompressor(write_checksum=True).compress(bytes(tally.order))
        arrays |= {ORDER: as_array(order), DROPPED_FILE: as_array(pack_lines(tally.dropped))}
        earlier = [(job.files.facts(measured(phase)) or {}).get("counts", {}) for phase in range(job.phase)]
        own = [step.take_counts() for step in steps if isinstance(step, CountingStep)]
        facts = {
            **{which: [(*names, entry) for names, entry in part.items()] for which, part in tally.entries.items()},
            "counts": _sum([*earlier, *own, tally.counts()]),
            "documents": len(tally.order) + len(tally.dropped),
        }
        job.files.write_arrays(WRITTEN, arrays, facts)
    return StepResult(job.number, facts["documents"], facts)


def _results(job: StepJob) -> Iterator[tuple[Document | DroppedDocument, str]]:
    """Yields the documents that enter a phase, dropped as the corpus steps of the phase before decided, or after the
    steps of this one; with the line of JSON that they were read from if they are unchanged, "" otherwise.
    """
    steps = job.phases[job.phase].steps
    if job.phase == 0:
        yield from ((_through(document, steps), "") for document in job.documents)
        return
    before = job.phase - 1
    job.files.verify(measured(before))
    drops = {index: drop for index, *drop in job.files.finished(decided(before))["drops"]}
    for index, line in enumerate(unpack_lines(job.files.array(measured(before), DOCUMENTS).tobytes())):
        document = Document.from_json(line)
        result = DroppedDocument(document, *drops[index]) if index in drops else _through(document, steps)
        yield result, line if result is document else ""


def _through(document: Document, steps: Sequence[Step]) -> Document | DroppedDocument:
    for step in steps:  # a document is dropped by the first step that drops it, and later ones do not see it
        result = step(document)
        if isinstance(result, Drop):
            return DroppedDocument(document, step.name, result.reason, result.detail)
        document = result
    return document


def _sum(counts: Sequence[Any]) -> dict[str, dict[str, int]]:
    total: dict[str, Counter[str]] = {}
    for entry in counts:
        for name, counters in entry.items():
            total.setdefault(name, Counter()).update(counters)
    return {name: dict(counters) for name, counters in total.items()}


class _Tally:
    """The lines of kept and dropped documents, and counts of their documents and bytes.

    kept: by index of the file in `KEPT_FILES`; order: these indices, in the order of the documents; entries: counts by
    kind and split of kept documents, and by step and reason of dropped ones.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self._redactors = [step for step in steps if isinstance(step, Redactor)]
        self.kept: dict[int, list[str]] = {}
        self.order = bytearray()
        self.dropped: list[str] = []
        self.entries: dict[str, dict[tuple[str, str], dict[str, int]]] = {KEPT: {}, DROPPED: {}}
        self._lengths = {KEPT: Counter[str](), DROPPED: Counter[str]()}
        self._sampled: list[Document] = []
        self._num_of_language = 0

    def keep(self, document: Document, line: str) -> None:
        """line: JSON of the document, "" if it is not known."""
        self._add(KEPT, document.kind, document.split, document.text)
        if document.kind in ("prose", "qa"):
            if self._num_of_language % _LANGUAGE_OF_EVERY == 0:
                self._sampled.append(document)
            self._num_of_language += 1
        place = place_of_file(document)
        self.kept.setdefault(place, []).append(line or document.to_json())
        self.order.append(place)

    def drop(self, entry: DroppedDocument) -> None:
        document = entry.document
        self._add(DROPPED, entry.step, entry.reason, document.text)
        for step in self._redactors:  # the file of dropped documents is shown to people
            document = step.redact(document)
        self.dropped.append(DroppedDocument(document, entry.step, entry.reason, entry.detail).to_json())

    def counts(self) -> dict[str, dict[str, int]]:
        """Lengths and languages, by field of `CleanReport`."""
        lengths = {f"{which}_lengths": dict(counter) for which, counter in self._lengths.items()}
        is_large = len(self.order) + len(self.dropped) >= _FEWEST_FOR_LANGUAGES
        sampled = self._sampled[:: -(-len(self._sampled) // _MOST_LANGUAGES) or 1] if is_large else []
        return {**lengths, "languages": dict(Counter(map(language_of, sampled)))}

    def _add(self, which: str, first: str, second: str, text: str) -> None:
        self._lengths[which][str(1 << max(0, len(text).bit_length() - 1))] += 1
        entry = self.entries[which].setdefault((first, second), {"documents": 0, "bytes": 0})
        entry["documents"] += 1
        entry["bytes"] += len(text.encode("utf-8", "replace"))
