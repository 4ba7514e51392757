"""What the decisions of cleaning keep in memory for each document, by what is really allocated."""

import gc
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from modelwright.core.progress import SilentProgress
from modelwright.data.clean import clean, deduplicate, fingerprints
from modelwright.data.clean.clean import measured
from modelwright.data.clean.config import CleanConfig, build_steps
from modelwright.data.clean.deduplicate import GroupJob, group_band
from modelwright.data.clean.features import FEATURES
from modelwright.data.clean.fingerprints import BandFiles, DuplicatesConfig, band_hashes
from modelwright.data.clean.steps import duplicates as duplicates_step
from modelwright.data.clean.steps.duplicates import quality_score
from modelwright.data.clean.steps.quality import QualityConfig
from modelwright.data.clean.steps.step import ShardFiles, as_array, divide, numbered
from modelwright.data.workers import InProcess

SHARD, WORDS = 1000, 40
MOST_BYTES = 100


def texts(rng: np.random.Generator, count: int) -> list[NDArray[np.uint32]]:
    """5-grams of documents: of ten, three are near-duplicates of an earlier one, one is equal to one, and one is a part
    of one.
    """
    rows = list(rng.integers(0, 2**32, (count, WORDS), np.uint32))
    for number, form in enumerate(rng.integers(0, 10, count)):
        other = rows[int(rng.integers(0, number))] if number else rows[0]
        if form < 3:
            at = int(rng.integers(0, max(1, len(other) - 2)))
            rows[number] = np.concatenate([other[:at], rng.integers(0, 2**32, 2, np.uint32), other[at + 2 :]])
        elif form == 3:
            rows[number] = other
        elif form == 4:
            rows[number] = other[5:30]
    return rows


def write_measured(work: Path, count: int, num_changed: int) -> None:
    """The columns of `count` documents that a quarter of the limits of the step quality drops. num_changed: 5-grams of
    each that differ from those of any other call.
    """
    rng = np.random.default_rng(count)
    rows = texts(rng, count)
    if num_changed:
        rows = [np.concatenate([rng.integers(0, 2**32, num_changed, np.uint32), row[num_changed:]]) for row in rows]
    features = rng.uniform(0.1, 0.2, (count, len(FEATURES))).astype(np.float32)
    features[:, FEATURES.index("num_chars")] = 1000
    features[:, FEATURES.index("num_words")] = 200
    features[:, FEATURES.index("char_entropy")] = 4
    features[:, FEATURES.index("stop_word_fraction")] = 0.3
    features[:, FEATURES.index("broken_word_fraction")] = rng.choice([0, 0.2], count, p=[0.75, 0.25])
    features[:, [FEATURES.index(name) for name in ("misordered_fraction", "error_fraction")]] = 0
    digests = {row.tobytes(): int(rng.integers(1, 2**63)) for row in rows}
    for number in range(count // SHARD):
        part = slice(number * SHARD, (number + 1) * SHARD)
        own = np.array([digests[row.tobytes()] for row in rows[part]], np.uint64)
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows[part]])])
        flat, no_numbers = np.concatenate(rows[part]), np.zeros(SHARD, np.int32)
        columns = {
            "kind": np.zeros(SHARD, np.int8), "split": (rng.random(SHARD) < 0.02).astype(np.int8),
            "features": features[part], "language": np.ones(SHARD, np.bool_), "own": own, "whole": own,
            "keys": np.stack([own, np.zeros(SHARD, np.uint64)], axis=1), "bands": band_hashes(flat, offsets),
            "shingles": flat, "num_shingles": np.diff(offsets), "quality": quality_score(features[part]),
            "image_width": no_numbers, "image_height": no_numbers, "image_hash": no_numbers.astype(np.uint64),
            "ids": as_array(json.dumps([f"part-{number}.jsonl:{row}" for row in range(SHARD)]).encode()),
        }  # fmt: skip
        ShardFiles(work, number).write_arrays(measured(0), columns, {"documents": SHARD})


def peak_of_decisions(
    work: Path, count: int, config: CleanConfig, num_changed: int = 0, *, is_traced: bool = True
) -> tuple[int, int]:
    """The most bytes allocated at one time while it is decided which documents are dropped, and how many are. Without
    tracing, which makes deciding several times as long, the bytes are 0.
    """
    work.mkdir(parents=True)
    write_measured(work, count, num_changed)
    run = clean._Run(divide(build_steps(config)), work, InProcess(), SilentProgress())
    read = clean._Read(count // SHARD, count, 0, {})
    gc.collect()
    gc.freeze()  # otherwise cycles wait the longer to be collected the more modules and tests ran in this process
    gc.collect()
    if is_traced:
        tracemalloc.start()
    try:
        run.decide(0, read)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.unfreeze()
    drops = [files.finished("decided0")["drops"] for files in numbered(work, count // SHARD)]
    return peak, sum(map(len, drops))


@pytest.fixture
def small_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not grow with the corpus is made small, so that it hides nothing that does."""
    monkeypatch.setattr(deduplicate, "_FILTER_BITS", 20)
    monkeypatch.setattr(deduplicate, "_REMEMBERED_BITS", 10)
    monkeypatch.setattr(deduplicate, "_READ_AT_ONCE", 256)
    monkeypatch.setattr(fingerprints, "_CACHED_BYTES", 2**16)
    monkeypatch.setattr(fingerprints, "_READ_AT_ONCE", 2**16)
    monkeypatch.setattr(duplicates_step, "_AT_ONCE", 128)


@pytest.mark.slow
@pytest.mark.usefixtures("small_constants")
@pytest.mark.parametrize("earlier", ["no run", "a run with equal documents", "a run with near-duplicates"])
def test_bytes_per_document(tmp_path: Path, earlier: str) -> None:
    """Documents of the index that are related to one of the run count as well: all of them are, in the latter cases."""
    peaks, num_documents = list[int](), list[int]()
    # Fewer where a run before doubles the work; alone, few documents do not tell the share of what is constant.
    for count in (10_000, 50_000) if earlier == "no run" else (4_000, 20_000):
        duplicates = DuplicatesConfig(index=str(tmp_path / f"index-{count}"))
        config = CleanConfig(quality=QualityConfig(thresholds="auto"), duplicates=duplicates)
        num_indexed = 0
        if earlier != "no run":
            before = peak_of_decisions(tmp_path / f"{count}" / "earlier", count, config, is_traced=False)
            num_indexed = count - before[1]
        num_changed = 2 * (earlier == "a run with near-duplicates")
        peak, num_dropped = peak_of_decisions(tmp_path / f"{count}" / "now", count, config, num_changed)
        assert num_dropped > 0.4 * (count + num_indexed)
        peaks.append(peak)
        num_documents.append(count + num_indexed)
    per_document = (peaks[1] - peaks[0]) / (num_documents[1] - num_documents[0])
    assert per_document <= MOST_BYTES, f"{per_document:.0f} bytes a document"


def test_bytes_of_a_document_in_one_band(tmp_path: Path) -> None:
    """The part that may be done in other processes, all documents being in groups."""

    def peak(count: int) -> int:
        rng, bands = np.random.default_rng(1), BandFiles(tmp_path)
        rng.integers(1, count // 3, count).astype(np.uint64).tofile(bands.path(0))
        rng.permutation(count).astype(np.uint32).tofile(tmp_path / "order.bin")
        tracemalloc.start()
        group_band(GroupJob(bands, 0, 200))
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    few, many = 10_000, 100_000
    assert (peak(many) - peak(few)) / (many - few) < 50
