"""What needs the whole corpus: limits of quality from its quantiles, and duplicates.

Reads the arrays that `clean_shards.measure_shard` wrote, and no text.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelwright.data.clean_config import CleanConfig
from modelwright.data.clean_noise import ReadTrusted, find_noise
from modelwright.data.deduplicate import NOTHING, Corpus, ShingleStore, find_duplicates
from modelwright.data.document import KINDS, Kind
from modelwright.data.duplicate_index import IndexedDocuments, load_index, save_index
from modelwright.data.shard_files import ShardFiles, unpack_arrays
from modelwright.data.steps.quality import FEATURES, LIMIT_OF, QualityConfig, judge, judged_kinds, limits_by_kind
from modelwright.data.workers import ShardEngine


@dataclass(frozen=True)
class Measured:
    """The arrays of one shard without its 5-grams, which stay on disk."""

    files: ShardFiles
    features: NDArray[np.float32]
    language: NDArray[np.bool_]
    kind: NDArray[np.int8]
    split: NDArray[np.int8]
    own: NDArray[np.uint64]
    keys: NDArray[np.uint64]
    bands: NDArray[np.uint64]
    num_shingles: NDArray[np.int64]

    @classmethod
    def load(cls, files: ShardFiles) -> "Measured":
        arrays = unpack_arrays(files.read("measured", "arrays.npz"))
        names = ("features", "language", "kind", "split", "own", "keys", "bands")
        return cls(files=files, num_shingles=np.diff(arrays["offsets"]), **{name: arrays[name] for name in names})

    def ids(self) -> list[str]:
        arrays = unpack_arrays(self.files.read("measured", "arrays.npz"))
        return json.loads(arrays["ids"].tobytes())


Drops = dict[int, tuple[str, str, str]]
"""Step, reason and detail by the number of the document."""


def decide(
    shards: Sequence[Measured],
    config: CleanConfig,
    seed: int,
    work: Path,
    engine: ShardEngine,
    read_trusted: ReadTrusted,
) -> tuple[dict[str, Any], Drops]:
    """The fields `limits`, `remedies` and `noise` of the report, and all documents that the stages quality to
    duplicates drop.
    """
    if not shards:
        return {}, {}
    features = np.concatenate([shard.features for shard in shards])
    kinds = np.concatenate([shard.kind for shard in shards])
    drops: Drops = {}
    judged = judged_kinds(features, kinds)
    limits = decide_quality(
        features, judged, np.concatenate([shard.language for shard in shards]), config.quality, drops
    )
    options = remedies(features, judged, drops)
    alive = np.ones(len(features), np.bool_)
    alive[list(drops)] = False
    noise: dict[str, Any] = {}
    if config.noise.enabled:
        starts = np.cumsum([0, *(len(shard.features) for shard in shards)])
        found, noise = find_noise(features, kinds, alive, starts[:-1], config.noise, seed, work, engine, read_trusted)
        drops |= found
        alive[list(found)] = False
    indexed = _indexed(config, work)
    num_indexed = len(indexed.own)
    corpus = Corpus(
        kind=np.concatenate([kinds, indexed.kind]),
        split=np.concatenate([*(shard.split for shard in shards), np.zeros(num_indexed, np.int8)]),
        own=np.concatenate([*(shard.own for shard in shards), indexed.own]),
        keys=np.concatenate([*(shard.keys for shard in shards), np.zeros((num_indexed, 2), np.uint64)]),
        quality=np.concatenate([quality_score(features), np.zeros(num_indexed, np.float32)]),
        num_shingles=np.concatenate([*(shard.num_shingles for shard in shards), indexed.num_shingles]),
        bands=np.concatenate([*(shard.bands for shard in shards), indexed.bands]),
        alive=np.concatenate([alive, np.ones(num_indexed, np.bool_)]),
    )
    names = _Names(shards)
    with _shingle_store(shards, indexed, corpus, work) as store:
        for found in find_duplicates(corpus, store, config.duplicates, engine, num_indexed=num_indexed):
            for number, instead, similarity in zip(found.numbers, found.instead, found.similarity, strict=True):
                near = f"Jaccard {similarity:.2f} with " if found.reason == "near-duplicate" else ""
                drops[int(number)] = ("duplicates", found.reason, f"{near}{names[int(instead)]}")
        if config.duplicates.index:
            kept = np.flatnonzero(corpus.alive[: len(features)])
            rows = [store.row(int(number)) for number in kept]
            documents = IndexedDocuments(
                kind=corpus.kind[kept],
                own=corpus.own[kept],
                bands=corpus.bands[kept],
                shingles=np.concatenate([*rows, np.empty(0, np.uint32)]),
                num_shingles=corpus.num_shingles[kept],
            )
            save_index(Path(config.duplicates.index), work.name, documents)
    return {"limits": limits, "remedies": options, "noise": noise}, drops


def decide_quality(
    features: NDArray[np.float32], kinds: NDArray[np.int8], language: NDArray[np.bool_], config: QualityConfig,
    drops: Drops,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Add the documents that violate a limit to `drops`, with the first limit violated; returns the limits."""
    by_kind: Mapping[Kind, NDArray[np.float32]] = {kind: features[kinds == number] for number, kind in enumerate(KINDS)}
    limits = limits_by_kind(config, by_kind)
    for number, kind in enumerate(KINDS):
        members = np.flatnonzero(kinds == number)
        for violates, reason, feature, limit in judge(by_kind[kind], limits[kind]):
            column = FEATURES.index(feature)
            for row in np.flatnonzero(violates):
                detail = f"{feature} {by_kind[kind][row, column]:.4g}, limit {limit:.4g}"
                drops.setdefault(int(members[row]), ("quality", reason, detail))
    for row in np.flatnonzero(~language):
        drops.setdefault(int(row), ("quality", "other language", f"not in {', '.join(config.languages)}"))
    return {kind: limits[kind] for number, kind in enumerate(KINDS) if (kinds == number).any()}


def remedies(features: NDArray[np.float32], kinds: NDArray[np.int8], drops: Drops) -> dict[str, str]:
    """By the reason for which the stage quality dropped documents: the options of the command line that would keep all
    of them, as far as this reason goes.
    """
    values: dict[tuple[str, Kind], list[float]] = {}
    for number, (step, reason, _) in drops.items():
        if step == "quality" and reason in LIMIT_OF:
            column = FEATURES.index(LIMIT_OF[reason][4:])
            values.setdefault((reason, KINDS[kinds[number]]), []).append(float(features[number, column]))
    result: dict[str, str] = {}
    for (reason, kind), measured in sorted(values.items()):
        limit = LIMIT_OF[reason]
        value = _rounded(max(measured), up=True) if limit.startswith("max_") else _rounded(min(measured), up=False)
        option = f"--clean.quality.limits.{kind}.{limit} {value:.10g}"
        result[reason] = f"{result[reason]} {option}" if reason in result else option
    return result


def _rounded(value: float, *, up: bool) -> float:
    """Three significant digits, away from the measured value, so that a limit of it keeps the value."""
    if value == 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - 2)
    return (math.ceil(value / unit) if up else math.floor(value / unit)) * unit


def quality_score(features: NDArray[np.float32]) -> NDArray[np.float32]:
    """How good each document is among near-duplicates [N]: the less repetition, data, digits and symbols the better."""
    bad = ("duplicate_line_fraction", "data_fraction", "digit_fraction", "symbol_fraction", "top_ngram_fraction")
    return -np.round(sum(features[:, FEATURES.index(name)] for name in bad), 2).astype(np.float32)


def _indexed(config: CleanConfig, work: Path) -> IndexedDocuments:
    folder = Path(config.duplicates.index) if config.duplicates.index else work / "no-index"
    return load_index(folder, without=work.name)


class _Names:
    """Identifiers of documents by their numbers, read from disk as they are needed."""

    def __init__(self, shards: Sequence[Measured]) -> None:
        self._shards = shards
        self._starts = np.cumsum([0, *(len(shard.features) for shard in shards)])
        self._known: dict[int, list[str]] = {}

    def __getitem__(self, number: int) -> str:
        if number == NOTHING or number >= self._starts[-1]:
            return "a document of an earlier run"
        shard = int(np.searchsorted(self._starts, number, side="right")) - 1
        if shard not in self._known:
            self._known[shard] = self._shards[shard].ids()
        return self._known[shard][number - int(self._starts[shard])]


@contextmanager
def _shingle_store(
    shards: Sequence[Measured], indexed: IndexedDocuments, corpus: Corpus, work: Path
) -> Iterator[ShingleStore]:
    """The 5-grams of all shards and of the index as one file, mapped into memory."""
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(corpus.num_shingles)])
    path = work / "shingles.bin"
    with open(path, "wb") as file:
        for shard in shards:
            file.write(unpack_arrays(shard.files.read("measured", "arrays.npz"))["shingles"].tobytes())
        file.write(indexed.shingles.tobytes())
    flat = np.memmap(path, np.uint32, mode="r") if offsets[-1] else np.empty(0, np.uint32)
    yield ShingleStore(flat, offsets)
    path.unlink()
