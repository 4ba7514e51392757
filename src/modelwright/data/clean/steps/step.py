"""The interfaces of cleaning steps: `Step` looks at one document at a time, `CorpusStep` at the whole corpus.

`STEPS` in `data/clean/config.py` lists the steps of this package; `data/clean/clean.py` runs any list of them.

`MeasuredCorpus` gives corpus steps the columns that they measured of all documents, shard after shard. A shard's result
is one or more files and a marker `NNNNN.STAGE.json`, written last, with the SHA-256 of each file and small facts. A
stage whose files do not have these hashes is not finished, so a killed process resumes, and only a shard that was
changed on disk is done again; if that happens while it is read, one error names the file.
"""

import hashlib
import io
import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import zstandard
from numpy.typing import NDArray

from modelwright.core.artifacts import ArtifactError, write_atomic
from modelwright.core.extensions import NoSettings
from modelwright.data.document import Document
from modelwright.data.workers import ShardEngine

# Linux reads at most 2^31 - 4096 bytes in one call.
_READ_AT_MOST = 2**30
Columns = Mapping[str, NDArray[Any]]
"""Arrays by name, usually with one row for each document."""
_REMEDY = "run the same command again, which does this shard anew"
DOCUMENTS, IDS = "documents", "ids"
"""Names of the columns that hold the documents of a shard (a frame of JSON lines) and their identifiers (JSON)."""


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

    def decide(self, corpus: "MeasuredCorpus") -> Decisions:
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
    needs_clean: Callable[[Any], Sequence[str]] = lambda settings: ()
    """Names the settings that, as they are, need the libraries of the extra `clean`."""
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


class DiskFile:
    """Reads parts of a file. `num_read` counts the bytes that were read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = os.open(path, os.O_RDONLY)
        self.num_read = 0
        weakref.finalize(self, os.close, self._handle)

    def read(self, dtype: Any, start: int, stop: int, *, offset: int = 0) -> NDArray[Any]:
        """Reads values `start` to below `stop`, counted from byte `offset`. Raises `EOFError` at the file's end."""
        dtype = np.dtype(dtype)
        return np.frombuffer(self.read_bytes(offset + start * dtype.itemsize, (stop - start) * dtype.itemsize), dtype)

    def read_bytes(self, start: int, count: int) -> bytes:
        parts: list[bytes] = []
        left = count
        while left:
            part = os.pread(self._handle, min(left, _READ_AT_MOST), start + count - left)
            if not part:
                raise EOFError(f"{self._path} ends at byte {start + count - left}, {left} bytes too early")
            parts.append(part)
            left -= len(part)
        self.num_read += count
        return parts[0] if len(parts) == 1 else b"".join(parts)


@dataclass(frozen=True)
class ShardFiles:
    """The files of one shard in `folder`."""

    folder: Path
    number: int

    def path(self, name: str) -> Path:
        return self.folder / f"{self.number:05d}.{name}"

    def write(self, stage: str, files: Mapping[str, bytes], facts: Mapping[str, Any]) -> None:
        """Writes the files of a stage, and its marker last."""
        for name, content in files.items():
            with open(self.path(name), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # before the marker is: a power cut must not leave a marker without its files
        marker = {"files": {name: _sha256(content) for name, content in files.items()}, "facts": facts}
        sha256 = _sha256(json.dumps(marker).encode())
        write_atomic(self.path(f"{stage}.json"), json.dumps({**marker, "sha256": sha256}))

    def write_arrays(self, stage: str, arrays: Columns, facts: Mapping[str, Any]) -> None:
        """Writes the arrays of a stage as an uncompressed `.npz`, and its marker last."""
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # pyright: ignore[reportArgumentType]
        self.write(stage, {f"{stage}.npz": buffer.getvalue()}, facts)

    def facts(self, stage: str) -> dict[str, Any] | None:
        """The facts of a finished stage whose files are unchanged since they were written, None for any other."""
        marker = self._marker(stage)
        if not marker:
            return None
        try:
            hashes = ((sha256, _sha256(self.path(name).read_bytes())) for name, sha256 in marker["files"].items())
            return marker["facts"] if all(written == present for written, present in hashes) else None
        except OSError:
            return None

    def finished(self, stage: str) -> dict[str, Any]:
        """The facts of a stage that must be finished. Raises `ArtifactError` if it is damaged."""
        facts = self.facts(stage)
        if facts is None:
            raise ArtifactError(f"{self.path(f'{stage}.json')}: is damaged, or a file of it; {_REMEDY}")
        return facts

    def read(self, stage: str, name: str) -> bytes:
        """The content of a file that `stage` wrote. Raises `ArtifactError` if it is damaged."""
        path, marker = self.path(name), self._marker(stage)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read ({error.strerror}); {_REMEDY}") from None
        if not marker or _sha256(content) != marker["files"].get(name):
            raise ArtifactError(f"{path}: its content has changed since it was written; {_REMEDY}")
        return content

    def read_arrays(self, stage: str) -> Columns:
        """The arrays of a stage; nothing is unpickled. Raises `ArtifactError` if they are damaged."""
        with np.load(io.BytesIO(self.read(stage, f"{stage}.npz")), allow_pickle=False) as loaded:
            return {name: loaded[name] for name in loaded.files}

    def verify(self, stage: str) -> None:
        """Raises `ArtifactError` if the arrays of a stage have changed since they were written."""
        self.read(stage, f"{stage}.npz")

    def array(self, stage: str, name: str) -> NDArray[Any]:
        """Reads a single array of a stage, without verification."""
        with np.load(self.path(f"{stage}.npz"), allow_pickle=False) as loaded:
            return loaded[name]

    def _marker(self, stage: str) -> dict[str, Any] | None:
        try:
            marker = json.loads(self.path(f"{stage}.json").read_bytes())
            # The marker has its own hash, so that a damaged one is not trusted.
            return marker if marker.pop("sha256", "") == _sha256(json.dumps(marker).encode()) else None
        except (FileNotFoundError, ValueError, AttributeError, TypeError):
            return None


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def pack_lines(lines: Iterable[str], *, level: int = 3) -> bytes:
    """Text lines as one Zstandard frame with a checksum."""
    data = "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")
    return zstandard.ZstdCompressor(level=level, write_checksum=True).compress(data)


def unpack_lines(content: bytes) -> list[str]:
    """The lines of `pack_lines`. Only a line feed ends a line: JSON may hold other line separators of Unicode."""
    return zstandard.ZstdDecompressor().decompress(content).decode("utf-8").split("\n")[:-1]


def as_array(content: bytes) -> NDArray[np.uint8]:
    """Views bytes as an array, to be stored with others."""
    return np.frombuffer(content, np.uint8)


def numbered(folder: Path, count: int) -> Iterator[ShardFiles]:
    """The shards of a folder, in order."""
    return (ShardFiles(folder, number) for number in range(count))


@dataclass(kw_only=True)
class MeasuredCorpus:
    """Columns of N documents, shard after shard; a document's number is its index among them."""

    shards: Sequence[ShardFiles]
    stage: str
    """The stage that wrote the columns of each shard."""
    folder: Path
    """Folder for files of the step; it exists until the command has finished, so that work can be resumed."""
    key: str
    """Key of the documents and the steps: equal for equal input."""
    engine: ShardEngine
    alive: NDArray[np.bool_] = field(init=False)
    """True for the documents [N] that no earlier step dropped."""
    starts: NDArray[np.int64] = field(init=False)
    """The number of the first document of each shard, and N [shards + 1]."""

    def __post_init__(self) -> None:
        for files in self.shards:
            files.verify(self.stage)
        self._identifiers: tuple[DiskFile, DiskFile] | None = None
        self.starts = np.cumsum([0, *map(len, self.parts("kind"))])
        self.alive = np.ones(len(self), np.bool_)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def column(self, name: str) -> NDArray[Any]:
        """A column of the whole corpus, in memory."""
        parts = self.parts(name)
        first = next(parts)
        if first.dtype.kind not in "biuf" or len(first) != self.starts[1]:
            return np.concatenate([first, *parts])
        whole = np.empty((len(self), *first.shape[1:]), first.dtype)  # never twice in memory, as parts and as a whole
        for start, part in zip(self.starts[:-1], chain([first], parts), strict=True):
            whole[start : start + len(part)] = part
        return whole

    def parts(self, name: str) -> Iterator[NDArray[Any]]:
        """Yields the parts of a column, one shard at a time in memory."""
        return (files.array(self.stage, name) for files in self.shards)

    def values(self, name: str, numbers: NDArray[np.int64]) -> NDArray[Any]:
        """The values of a column of numbers for some documents, in their order, with one shard at a time in memory."""
        found = np.empty(len(numbers), np.uint64)
        for start, part in zip(self.starts[:-1], self.parts(name), strict=True):
            is_here = (numbers >= start) & (numbers < start + len(part))
            found[is_here] = part[numbers[is_here] - start]
        return found

    def identifier(self, number: int) -> str:
        """The `id` of a document, read from disk."""
        if self._identifiers is None:
            # The identifiers of all shards in one file, and the offset of each in a second one.
            path, end = self.folder / f"{self.stage}.ids", 0
            with open(path, "wb") as texts, open(path.with_suffix(".starts"), "wb") as offsets:
                offsets.write(np.int64(0).tobytes())
                for part in self.parts(IDS):
                    encoded = [name.encode("utf-8", "surrogatepass") for name in json.loads(part.tobytes())]
                    texts.write(b"".join(encoded))
                    ends = end + np.cumsum([len(one) for one in encoded], dtype=np.int64)
                    offsets.write(ends.tobytes())
                    end = int(ends[-1]) if len(ends) else end
            self._identifiers = DiskFile(path), DiskFile(path.with_suffix(".starts"))
        file, starts = self._identifiers
        start, end = map(int, starts.read(np.int64, number, number + 2))
        return file.read_bytes(start, end - start).decode("utf-8", "surrogatepass")
