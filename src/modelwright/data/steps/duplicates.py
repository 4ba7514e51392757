"""The step duplicates: `data/deduplicate.py` over the fingerprints of all documents, and of those that earlier runs
left in an index.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from modelwright.data.deduplicate import find_duplicates
from modelwright.data.document import Document
from modelwright.data.duplicate_corpus import NOTHING, Corpus, Duplicate, DuplicatesConfig, ShingleStore
from modelwright.data.duplicate_index import IndexedDocuments, load_index, save_index
from modelwright.data.features import FEATURES
from modelwright.data.measured_corpus import MeasuredCorpus
from modelwright.data.steps.shingles import fingerprints
from modelwright.data.steps.step import Columns, Decisions, Drop, StepSpec

_BAD = ("duplicate_line_fraction", "data_fraction", "digit_fraction", "symbol_fraction", "top_ngram_fraction")
_EARLIER = "a document of an earlier run"


@dataclass(frozen=True)
class Duplicates:
    config: DuplicatesConfig
    name: str = "duplicates"

    def measure(self, documents: Sequence[Document], columns: Columns) -> Columns:
        """The fingerprints, and `quality` [N]: the best of near-duplicates is kept, any if nothing judged them."""
        prints = fingerprints(documents, whole_pairs=self.config.pairs_by == "conversation")
        no_features = np.zeros((len(documents), len(FEATURES)), np.float32)
        return {
            "own": prints.own, "keys": prints.keys, "bands": prints.bands, "shingles": prints.shingles,
            "num_shingles": np.diff(prints.offsets), "quality": quality_score(columns.get("features", no_features)),
        }  # fmt: skip

    def decide(self, corpus: MeasuredCorpus) -> Decisions:
        index = Path(self.config.index) if self.config.index else corpus.folder / "no-index"
        indexed = load_index(index, without=corpus.key)
        documents = _joined(corpus, indexed)
        drops: dict[int, Drop] = {}
        with _shingle_store(corpus, indexed, documents) as store:
            num_indexed = len(indexed.own)
            for duplicate in find_duplicates(documents, store, self.config, corpus.engine, num_indexed=num_indexed):
                drops |= _drops(duplicate, corpus)
            if self.config.index:
                save_index(index, corpus.key, _kept(documents, store, len(corpus)))
        return Decisions(drops=drops)


DUPLICATES = StepSpec(
    name="duplicates",
    build=lambda config, seed: Duplicates(config),
    remedies={
        "inside a training text": "--clean.duplicates.contained off",
        "inside another text": "--clean.duplicates.contained heldout",
        "near-duplicate": "--clean.duplicates.near false",
    },
)


def quality_score(features: NDArray[np.float32]) -> NDArray[np.float32]:
    """How good each document is among near-duplicates [N]: the less repetition, data, digits and symbols the better."""
    return -np.round(sum(features[:, FEATURES.index(name)] for name in _BAD), 2).astype(np.float32)


def _joined(corpus: MeasuredCorpus, indexed: IndexedDocuments) -> Corpus:
    """The documents of this run, and after them those of earlier ones."""
    num_indexed = len(indexed.own)
    return Corpus(
        kind=np.concatenate([*corpus.parts("kind"), indexed.kind]),
        split=np.concatenate([*corpus.parts("split"), np.zeros(num_indexed, np.int8)]),
        own=np.concatenate([*corpus.parts("own"), indexed.own]),
        keys=np.concatenate([*corpus.parts("keys"), np.zeros((num_indexed, 2), np.uint64)]),
        quality=np.concatenate([*corpus.parts("quality"), np.zeros(num_indexed, np.float32)]),
        num_shingles=np.concatenate([*corpus.parts("num_shingles"), indexed.num_shingles]),
        bands=np.concatenate([*corpus.parts("bands"), indexed.bands]),
        alive=np.concatenate([corpus.alive, np.ones(num_indexed, np.bool_)]),
    )


def _drops(duplicate: Duplicate, corpus: MeasuredCorpus) -> dict[int, Drop]:
    drops: dict[int, Drop] = {}
    for number, instead, similarity in zip(duplicate.numbers, duplicate.instead, duplicate.similarity, strict=True):
        near = f"Jaccard {similarity:.2f} with " if duplicate.reason == "near-duplicate" else ""
        name = _EARLIER if instead == NOTHING or instead >= len(corpus) else corpus.identifier(int(instead))
        drops[int(number)] = Drop(duplicate.reason, f"{near}{name}")
    return drops


def _kept(documents: Corpus, store: ShingleStore, num_documents: int) -> IndexedDocuments:
    """What the index keeps of the documents of this run."""
    kept = np.flatnonzero(documents.alive[:num_documents])
    rows = [store.row(int(number)) for number in kept]
    return IndexedDocuments(
        kind=documents.kind[kept],
        own=documents.own[kept],
        bands=documents.bands[kept],
        shingles=np.concatenate([*rows, np.empty(0, np.uint32)]),
        num_shingles=documents.num_shingles[kept],
    )


@contextmanager
def _shingle_store(corpus: MeasuredCorpus, indexed: IndexedDocuments, documents: Corpus) -> Iterator[ShingleStore]:
    """The 5-grams of all shards and of the index as one file, mapped into memory."""
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(documents.num_shingles)])
    path = corpus.folder / "shingles.bin"
    with open(path, "wb") as file:
        for shingles in corpus.parts("shingles"):
            file.write(shingles.tobytes())
        file.write(indexed.shingles.tobytes())
    flat = np.memmap(path, np.uint32, mode="r") if offsets[-1] else np.empty(0, np.uint32)
    yield ShingleStore(flat, offsets)
    path.unlink()
