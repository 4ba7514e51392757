"""The step duplicates: deduplicates by fingerprints of all documents and of an index of earlier runs.

The index has the fingerprints of the documents that earlier runs kept: a folder with one file for each run, whose name
is the digest of that run's input and settings, so that repeating a run replaces its own file. Files are in the format
of safetensors and are never read whole. The digests and each MinHash band are a *table*: sorted keys, the document of
each, and every 512th key as a fence. A lookup reads the fences of one table at a time and the blocks of keys that may
have an equal one. It holds 4 bytes for each document found; the documents themselves are read in batches.
"""

import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from modelwright.core.artifacts import ArtifactError, fsync_folder, writing
from modelwright.core.config import DataError
from modelwright.data.clean.deduplicate import find_duplicates
from modelwright.data.clean.features import FEATURES
from modelwright.data.clean.fingerprints import (
    HELDOUT,
    NOTHING,
    NUM_BANDS,
    SHINGLE_WORDS,
    BandFiles,
    Corpus,
    DuplicatesConfig,
    InCommon,
    ShingleStore,
    fingerprints,
)
from modelwright.data.clean.steps.step import Columns, Decisions, DiskFile, Drop, Drops, MeasuredCorpus, StepSpec
from modelwright.data.document import KINDS, Document

_BAD = ("duplicate_line_fraction", "data_fraction", "digit_fraction", "symbol_fraction", "top_ngram_fraction")
_EQUAL = ("duplicate", "near-duplicate")
# Fewer pairs are no sign of a mistake.
_FEWEST_LOST = 10
# A larger fraction is more likely a file of labels or of canned answers than one of repetitions.
_MOST_LOST = 0.2
_EARLIER = "a document of an earlier run"
_FORMAT = {"format": "modelwright duplicate index", "version": "1"}
_BLOCK = 512
# Limit of documents with one key, as of candidates through one band (`near_duplicates.py`); at most a block.
_MOST_PER_KEY = 200
_DTYPES: Mapping[str, Any] = {"U64": np.uint64, "U32": np.uint32, "U8": np.uint8}
# Documents are read until one of these numbers is reached.
_AT_ONCE = 1024
_SHINGLES_AT_ONCE = 2**19
_DIGESTS = "digest"
_BANDS = tuple(f"band{number:02d}" for number in range(NUM_BANDS))


@dataclass(frozen=True)
class Duplicates:
    config: DuplicatesConfig
    name: str = "duplicates"

    def measure(self, documents: Sequence[Document], columns: Columns) -> Columns:
        """Measures the fingerprints, and `quality` [N] by `quality_score` (equal for all if nothing judged them)."""
        is_near = self.config.near or bool(self.config.index)
        prints = fingerprints(documents, whole_pairs=self.config.pairs_by == "conversation", with_bands=is_near)
        no_features = np.zeros((len(documents), len(FEATURES)), np.float32)
        return {
            "own": prints.own, "whole": prints.whole, "keys": prints.keys, "bands": prints.bands,
            "shingles": prints.shingles,
            "num_shingles": np.diff(prints.offsets), "quality": quality_score(columns.get("features", no_features)),
        }  # fmt: skip

    def decide(self, corpus: MeasuredCorpus) -> Decisions:
        folder = corpus.folder / "fingerprints"
        folder.mkdir(exist_ok=True)
        documents, num_indexed = _read(corpus, self.config, folder)
        found = find_duplicates(documents, self.config, corpus.engine, num_indexed=num_indexed)
        if self.config.index:
            save_index(
                Path(self.config.index), corpus.key, np.flatnonzero(documents.alive[: len(corpus)]),
                kind=documents.kind, own=corpus.column("own"), bands=documents.bands, shingles=documents.shingles,
            )  # fmt: skip
        # Closes the files before their folder is removed, and frees the arrays before those of the drops are made.
        del documents
        shutil.rmtree(folder)
        # A document is in `found` once, for one reason.
        numbers = np.concatenate([np.empty(0, np.int64), *(one.numbers for one in found)])
        order = np.argsort(numbers, kind="stable")
        reasons = np.repeat(np.arange(len(found), dtype=np.uint8), [len(one.numbers) for one in found])[order]
        instead = np.concatenate([np.empty(0, np.int64), *(one.instead for one in found)])[order]
        similarity = np.concatenate([np.empty(0, np.float32), *(one.similarity for one in found)])[order]
        names = [one.reason for one in found]
        equal = np.isin(reasons, [names.index(name) for name in names if name in _EQUAL])
        num_lost = self._check_pairs(corpus, numbers[order], instead, equal)

        def drop(place: int) -> Drop:
            reason, other = names[reasons[place]], int(instead[place])
            near = f"Jaccard {similarity[place]:.2f} with " if reason == "near-duplicate" else ""
            is_earlier = other == NOTHING or other >= len(corpus)
            return Drop(reason, f"{near}{_EARLIER if is_earlier else corpus.identifier(other)}")

        sizes = Counter[int]()  # of clusters of near-duplicates, with the document that is kept
        for duplicate in found:
            if duplicate.reason == "near-duplicate":
                sizes.update((np.unique(duplicate.instead, return_counts=True)[1] + 1).tolist())
        figures = {"cluster_sizes": {str(size): sizes[size] for size in sorted(sizes)}}
        report: dict[str, Any] = {"figures": figures} if sizes else {}
        if num_lost == int(equal.sum()) > 0 and self.config.pairs_by != "conversation":
            report["remedies"] = {"duplicate": "--clean.duplicates.pairs_by conversation"}
        return Decisions(drops=Drops(numbers[order], drop), report=report)

    def _check_pairs(
        self, corpus: MeasuredCorpus, numbers: NDArray[np.int64], instead: NDArray[np.int64], equal: NDArray[np.bool_]
    ) -> int:
        """Returns the number of pairs that are dropped for the answer of another question. Raises `DataError` if these
        are too many. numbers: of the dropped documents; instead: those kept instead of them; equal: True for duplicates
        of one another.
        """
        kind, starts = KINDS.index("qa"), zip(corpus.starts[:-1], corpus.starts[1:], strict=True)
        kinds = zip(starts, corpus.parts("kind"), strict=True)
        num_pairs = sum(int((corpus.alive[start:end] & (part == kind)).sum()) for (start, end), part in kinds)
        # Corpora of text alone, the large ones, need no memory for this.
        if not num_pairs:
            return 0
        is_own = equal & (instead != NOTHING) & (instead < len(corpus))
        numbers, instead = numbers[is_own], instead[is_own]
        is_pair = corpus.values("kind", numbers) == kind
        numbers, instead = numbers[is_pair], instead[is_pair]
        num_lost = int((corpus.values("whole", numbers) != corpus.values("whole", instead)).sum())
        is_meant = self.config.pairs_by == "answer_always"
        if is_meant or num_lost < _FEWEST_LOST or num_lost <= _MOST_LOST * num_pairs:
            return num_lost
        text = (
            f"{num_lost / num_pairs:.0%} of the question/answer pairs ({num_lost:,} of {num_pairs:,}) would be dropped"
        )
        raise DataError(
            f"{text}, because other questions have the same answers or nearly the same; to keep them pass "
            "--clean.duplicates.pairs_by conversation --clean.duplicates.near false, or to learn each answer once "
            "--clean.duplicates.pairs_by answer_always"
        )


DUPLICATES = StepSpec(
    name="duplicates",
    build=lambda config, seed: Duplicates(config),
    remedies={
        "inside a training text": "--clean.duplicates.contained off",
        "inside another text": "--clean.duplicates.contained heldout",
        "near-duplicate": "--clean.duplicates.near false",
    },
    paths=("index",),
    needs_clean=lambda config: ["near"] if config.near else ["index"] if config.index else [],
)


def quality_score(features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Ranks near-duplicates [N], the largest first: the less repetition, data, digits and symbols the better."""
    return -np.round(sum(features[:, FEATURES.index(name)] for name in _BAD), 2).astype(np.float32)


def _read(corpus: MeasuredCorpus, config: DuplicatesConfig, folder: Path) -> tuple[Corpus, int]:
    """Reads this run's documents and, after them, related ones of earlier runs and their number. folder: for files."""
    bands, shingles = BandFiles(folder), folder / "shingles.bin"
    kinds, owns, lengths = [corpus.column("kind")], [corpus.column("own")], [corpus.column("num_shingles")]
    with ExitStack() as stack:
        columns = [stack.enter_context(open(bands.path(band), "wb")) for band in range(NUM_BANDS)]
        rows = stack.enter_context(open(shingles, "wb"))

        def add(hashes: NDArray[np.uint64], flat: NDArray[np.uint32]) -> None:
            for column, values in zip(columns, hashes.T, strict=True):
                column.write(values.tobytes())
            rows.write(flat.tobytes())
            for file in (*columns, rows):
                file.flush()  # the index reads the files while they are open

        for hashes, flat in zip(corpus.parts("bands"), corpus.parts("shingles"), strict=True):
            add(hashes, flat)
        if config.index:
            is_member = corpus.alive & (lengths[0] > config.min_near_words - SHINGLE_WORDS)
            index = DuplicateIndex(Path(config.index), without=corpus.key)
            for block in index.related(owns[0][corpus.alive], bands, is_member):
                add(block.bands, block.shingles)
                kinds.append(block.kind)
                owns.append(block.own)
                lengths.append(block.lengths)
    kind = np.concatenate(kinds)
    num_indexed = len(kind) - len(corpus)
    own, offsets = np.concatenate(owns), np.concatenate([np.zeros(1, np.int64), *lengths])
    del owns, lengths
    equal = InCommon.of(own)
    del own
    return Corpus(
        kind=kind,
        split=np.concatenate([corpus.column("split"), np.zeros(num_indexed, np.int8)]),
        quality=np.concatenate([corpus.column("quality"), np.zeros(num_indexed, np.float32)]),
        alive=np.concatenate([corpus.alive, np.ones(num_indexed, np.bool_)]),
        equal=equal,
        shared=_shared_with_heldout(corpus),
        shingles=ShingleStore(shingles, np.cumsum(offsets, out=offsets)),
        bands=bands,
    ), num_indexed


def _shared_with_heldout(corpus: MeasuredCorpus) -> InCommon:
    """Finds held-out documents, and training documents with a digest of theirs, by their digests."""

    def parts() -> Iterator[tuple[int, NDArray[np.uint64], NDArray[np.bool_], NDArray[np.bool_]]]:
        columns = zip(corpus.starts[:-1], corpus.parts("keys"), corpus.parts("split"), strict=True)
        for start, keys, split in columns:
            yield int(start), keys, split == HELDOUT, corpus.alive[start : start + len(keys)]

    heldout = [keys[is_heldout & alive].ravel() for _, keys, is_heldout, alive in parts()]
    known = np.unique(np.concatenate(heldout))
    known = known[known != 0]  # 0 stands for a key that a document does not have
    numbers, values = [np.empty(0, np.int64)], [np.empty((0, 2), np.uint64)]
    for start, keys, is_heldout, alive in parts() if len(known) else ():
        rows = np.flatnonzero(alive & (is_heldout | np.isin(keys, known).any(axis=1)))
        numbers.append(start + rows)
        values.append(keys[rows])
    return InCommon(np.concatenate(numbers), np.concatenate(values))


@dataclass(frozen=True)
class IndexedDocuments:
    """Some documents of earlier runs. kind [R], own [R], bands [R, 16]: as in `Fingerprints`; shingles: of one document
    after another; lengths [R]: number of shingles of each.
    """

    kind: NDArray[np.int8]
    own: NDArray[np.uint64]
    bands: NDArray[np.uint64]
    shingles: NDArray[np.uint32]
    lengths: NDArray[np.int64]


class DuplicateIndex:
    """Files of a folder, except one run's. Raises `ArtifactError` for a wrong header or size, not for wrong values."""

    def __init__(self, folder: Path, *, without: str = "") -> None:
        if older := sorted(folder.glob("*.npz")):
            text = f"{older[0]}: is an index in an older format, which is not read any more"
            raise ArtifactError(f"{text}; remove it and run the command that wrote it again")
        self.files = [_IndexFile(path) for path in sorted(folder.glob("*.safetensors")) if path.stem != without]

    def related(
        self, own: NDArray[np.uint64], bands: BandFiles, members: NDArray[np.bool_]
    ) -> Iterator[IndexedDocuments]:
        """Yields the documents that have a digest of `own` [N], or a band in common with one of the `members` [N]; of
        documents with one value of a band, the longest 200 of each file. All lookups are done before the first block is
        returned, so the caller may append the blocks to the files of `bands`.
        """
        numbers = [np.empty(0, np.uint32) for _ in self.files]
        for table in (_DIGESTS, *_BANDS) if self.files else ():
            queries = np.unique(own if table == _DIGESTS else bands.column(_BANDS.index(table))[members])
            for place, file in enumerate(self.files):
                numbers[place] = np.union1d(numbers[place], file.find(table, queries))
        return (
            block for file, found in zip(self.files, numbers, strict=True) for block in file.documents(found)
        )  # fmt: skip


class _IndexFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self.file = DiskFile(path)
            (length,) = self.file.read(np.uint64, 0, 1)
            header = json.loads(self.file.read_bytes(8, min(int(length), path.stat().st_size)))
            if header.pop("__metadata__") != _FORMAT:
                raise ValueError("it is not an index of documents")
            self._begin = 8 + int(length)
            self._tensors = {name: (_DTYPES[one["dtype"]], *one["data_offsets"]) for name, one in header.items()}
            if self._begin + max(end for _, _, end in self._tensors.values()) != path.stat().st_size:
                raise ValueError("its size is not the one in its header")
            self.num_documents = self._len("own")
        except (ValueError, TypeError, KeyError, AttributeError, EOFError, OSError) as error:
            raise ArtifactError(f"{path}: is damaged ({error}); remove it, or restore a copy") from None

    def find(self, table: str, queries: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """Finds the documents in a table whose key is one of `queries`, sorted; at most 200 of each key."""
        fences = self._read(f"{table}_fences", 0, self._len(f"{table}_fences"))
        if not len(fences):
            return np.empty(0, np.uint32)
        # Equal keys begin in the last block that begins with a smaller one, or with the block after it.
        blocks = np.maximum(np.searchsorted(fences, queries, side="left") - 1, 0)
        edges = np.flatnonzero(np.concatenate([[True], blocks[1:] != blocks[:-1], [True]])) if len(queries) else []
        found: list[NDArray[np.uint32]] = []
        for start, stop in pairwise(edges):
            first = int(blocks[start]) * _BLOCK
            last = min(first + 2 * _BLOCK, self._len(f"{table}_keys"))
            keys = self._read(f"{table}_keys", first, last)
            lows = np.searchsorted(keys, queries[start:stop], side="left")
            highs = np.minimum(np.searchsorted(keys, queries[start:stop], side="right"), lows + _MOST_PER_KEY)
            counts = highs - lows
            if counts.any():
                places = np.repeat(lows - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
                found.append(self._read(f"{table}_documents", first, last)[places])
        return np.concatenate([*found, np.empty(0, np.uint32)])

    def documents(self, numbers: NDArray[np.uint32]) -> Iterator[IndexedDocuments]:
        """Reads documents by index, in batches. Raises `ArtifactError` for one that the file does not have."""
        if len(numbers) and int(numbers[-1]) >= self.num_documents:
            text = f"it has {self.num_documents} documents and names number {numbers[-1]}"
            raise ArtifactError(f"{self._path}: is damaged ({text}); remove it, or restore a copy")
        first, size, rows = 0, 0, list[NDArray[np.uint32]]()
        for place, number in enumerate(map(int, numbers), start=1):
            rows.append(self._read("shingles", *map(int, self._read("offsets", number, number + 2))))
            size += len(rows[-1])
            if place == len(numbers) or len(rows) == _AT_ONCE or size >= _SHINGLES_AT_ONCE:
                batch = numbers[first:place].tolist()
                yield IndexedDocuments(
                    kind=np.concatenate([self._read("kind", one, one + 1) for one in batch]).astype(np.int8),
                    own=np.concatenate([self._read("own", one, one + 1) for one in batch]),
                    bands=np.stack([self._read("bands", one * NUM_BANDS, (one + 1) * NUM_BANDS) for one in batch]),
                    shingles=np.concatenate(rows),
                    lengths=np.array([len(row) for row in rows], np.int64),
                )
                first, size, rows = place, 0, []

    def _len(self, name: str) -> int:
        dtype, start, end = self._tensors[name]
        return (end - start) // np.dtype(dtype).itemsize

    def _read(self, name: str, first: int, last: int) -> NDArray[Any]:
        dtype, start, _ = self._tensors[name]
        if not 0 <= first <= last <= self._len(name):
            text = f"{self._path}: is damaged ({name} ends before value {last})"
            raise ArtifactError(f"{text}; remove it, or restore a copy")
        return self.file.read(dtype, first, last, offset=self._begin + start)


def save_index(
    folder: Path, name: str, kept: NDArray[np.int64], *, kind: NDArray[np.int8], own: NDArray[np.uint64],
    bands: BandFiles, shingles: ShingleStore,
) -> None:  # fmt: skip
    """Writes the documents `kept` of the run called `name`, completely or not at all. kind [N], own [N]: of all
    documents of the run; kept: the numbers of some of them, ascending.
    """
    lengths = shingles.offsets[kept + 1] - shingles.offsets[kept]
    # The header of a safetensors file; `_tensors` yields the data after it, in the same order.
    shapes: dict[str, tuple[str, list[int]]] = {
        "own": ("U64", [len(kept)]), "offsets": ("U64", [len(kept) + 1]), "bands": ("U64", [len(kept), NUM_BANDS]),
    }  # fmt: skip
    for table in (_DIGESTS, *_BANDS):
        count = len(kept) if table == _DIGESTS else int(np.count_nonzero(lengths))
        shapes[f"{table}_keys"] = "U64", [count]
        shapes[f"{table}_fences"] = "U64", [-(-count // _BLOCK)]
        shapes[f"{table}_documents"] = "U32", [count]
    shapes |= {"shingles": ("U32", [int(lengths.sum())]), "kind": ("U8", [len(kept)])}
    entries: dict[str, Any] = {"__metadata__": _FORMAT}
    end = 0
    for tensor, (dtype, shape) in shapes.items():
        start, end = end, end + int(np.prod(shape)) * np.dtype(_DTYPES[dtype]).itemsize
        entries[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)  # safetensors aligns the data to 8 bytes
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{name}.partial"
        with _alone(partial) as file:
            file.write(np.uint64(len(header)).tobytes() + header)
            for values in _tensors(kept, lengths, kind, own, bands, shingles):
                file.write(values.tobytes())
            file.flush()
            os.fsync(file.fileno())
            partial.replace(folder / f"{name}.safetensors")
        fsync_folder(folder)


@contextmanager
def _alone(path: Path) -> Iterator[BinaryIO]:
    """Opens an empty file that no other process writes: the same run may be at work in two folders."""
    while True:
        # Created if absent, but not truncated before the lock is held: another process may be writing it.
        with open(path, "r+b", opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o644)) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                is_own = os.path.samestat(os.fstat(file.fileno()), path.stat())
            except FileNotFoundError:
                is_own = False  # the other process has renamed the file meanwhile
            if is_own:
                file.truncate(0)
                yield file
                return


def _tensors(
    kept: NDArray[np.int64], lengths: NDArray[np.int64], kind: NDArray[np.int8], own: NDArray[np.uint64],
    bands: BandFiles, shingles: ShingleStore,
) -> Iterator[NDArray[Any]]:  # fmt: skip
    """Yields the tensors of the header, in its order."""
    yield own[kept]
    yield np.concatenate([np.zeros(1, np.uint64), np.cumsum(lengths).astype(np.uint64)])
    for start in range(0, len(kept), _AT_ONCE):
        some = kept[start : start + _AT_ONCE]
        yield bands.rows(int(some[0]), int(some[-1]) + 1)[some - some[0]]
    yield from _table(own[kept], np.arange(len(kept)))
    # A lookup returns the first 200 documents of a key, which are therefore the longest ones.
    longest_first = np.argsort(-lengths, kind="stable")[: int(np.count_nonzero(lengths))]
    for band in range(NUM_BANDS):
        yield from _table(bands.column(band)[kept[longest_first]], longest_first)
    for number in map(int, kept):
        yield shingles.row(number)
    yield kind[kept].astype(np.uint8)


def _table(keys: NDArray[np.uint64], documents: NDArray[np.int64]) -> Iterator[NDArray[Any]]:
    """Yields keys, fences and documents; documents with equal keys stay in their order."""
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    yield keys
    yield keys[::_BLOCK]
    yield documents[order].astype(np.uint32)
