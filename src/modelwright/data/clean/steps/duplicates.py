"""The step duplicates: deduplicates by fingerprints of all documents and of an index of earlier runs."""

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from modelwright.data.clean.duplicates.corpus import (
    HELDOUT,
    NOTHING,
    BandFiles,
    Corpus,
    DuplicatesConfig,
    InCommon,
    ShingleStore,
)
from modelwright.data.clean.duplicates.deduplicate import find_duplicates
from modelwright.data.clean.duplicates.index import DuplicateIndex, save_index
from modelwright.data.clean.duplicates.shingles import NUM_BANDS, SHINGLE_WORDS, fingerprints
from modelwright.data.clean.features import FEATURES
from modelwright.data.clean.measured_corpus import MeasuredCorpus
from modelwright.data.clean.steps.step import Columns, Decisions, Drop, Drops, StepSpec
from modelwright.data.document import Document

_BAD = ("duplicate_line_fraction", "data_fraction", "digit_fraction", "symbol_fraction", "top_ngram_fraction")
_EARLIER = "a document of an earlier run"


@dataclass(frozen=True)
class Duplicates:
    config: DuplicatesConfig
    name: str = "duplicates"

    def measure(self, documents: Sequence[Document], columns: Columns) -> Columns:
        """Measures the fingerprints, and `quality` [N] by `quality_score` (equal for all if nothing judged them)."""
        prints = fingerprints(documents, whole_pairs=self.config.pairs_by == "conversation")
        no_features = np.zeros((len(documents), len(FEATURES)), np.float32)
        return {
            "own": prints.own, "keys": prints.keys, "bands": prints.bands, "shingles": prints.shingles,
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
        return Decisions(drops=Drops(numbers[order], drop), report={"figures": figures} if sizes else {})


DUPLICATES = StepSpec(
    name="duplicates",
    build=lambda config, seed: Duplicates(config),
    remedies={
        "inside a training text": "--clean.duplicates.contained off",
        "inside another text": "--clean.duplicates.contained heldout",
        "near-duplicate": "--clean.duplicates.near false",
    },
    paths=("index",),
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
