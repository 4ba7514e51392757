"""How long batches wait for rows that lie on a slow store, with and without the cache's tiers and its reading ahead.

    python benchmarks/data_cache.py [--rows 8000] [--batch-rows 32] [--latency-ms 30] [--compute-ms 150] [--epochs 2]

Every read from the store waits: log-normal around `--latency-ms`, sigma 0.5, so that one in a hundred takes 3.2 times
as long. A step is a pause of `--compute-ms`, as the processor waits while an accelerator computes. The order of the
rows is the training's own, shuffled over all of them. Without the cache a row's own bytes are read, one row after
another (as by a memory map on a network disk) or by as many threads as the cache has. The tiers have a tenth and
three tenths of the rows. All variants must give the same batches. The first epoch, in which the tiers fill, has a
line of its own, and the first batches after a start count nowhere. `ready` is the share of rows that were there when
their batch was asked for, `store` that of the blocks that were read from the store. `mapped, no store` reads the same
rows from local files: what it waits is the making of batches, and what other work on the machine adds. The ratio
compares the 99th percentiles of the better variant without the cache and of the cache.
"""

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

from modelwright.data.cache.blocks import BlockLayout
from modelwright.data.cache.cold import ColdStore
from modelwright.data.cache.config import RowCacheConfig
from modelwright.data.cache.lookahead import LookaheadLoader
from modelwright.data.cache.reader import BlockReader
from modelwright.data.cache.row_cache import open_cache
from modelwright.data.cache.tiers import SOURCE, Tiers
from modelwright.data.loader import ROWS_AT, MappedRows, PackedLoader, PackedRows, read_index
from modelwright.data.pack import PackConfig, pack

SIGMA = 0.5
AHEAD = 8
NUM_READERS = 16


class SlowStore(LocalFileSystem):
    """Local files behind a network."""

    protocol = "slow"
    latency_s = 0.0
    dice = np.random.default_rng(0)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("slow://"))

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> Any:
        time.sleep(self.latency_s * float(self.dice.lognormal(0.0, SIGMA)))
        return super().cat_file(path, start=start, end=end, **options)


class DirectRows:
    """`RowReader` of a store without a cache, one row a read. num_threads: reads at a time."""

    def __init__(self, folder: Path, num_threads: int) -> None:
        index = read_index(folder)
        self.store = ColdStore(json.loads((folder / ROWS_AT).read_text())["url"])
        self.files, self.seq_len, self.dtype = index["files"], index["seq_len"], np.dtype(index["dtype"])
        self.starts = np.cumsum([0] + [file["rows"] for file in self.files])
        self.threads = ThreadPoolExecutor(num_threads)

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, None]:
        return np.stack(list(self.threads.map(self._row, rows.tolist()))), None

    def _row(self, row: int) -> np.ndarray:
        file = int(np.searchsorted(self.starts, row, side="right")) - 1
        num_bytes = self.seq_len * self.dtype.itemsize
        offset = (row - int(self.starts[file])) * num_bytes
        return np.frombuffer(self.store.read(self.files[file]["tokens"], offset, num_bytes), self.dtype)


@dataclass
class Measured:
    """Seconds that each batch waited, hashes of the batches, and figures of the cache."""

    waits_s: list[float] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    blocks: dict[str, int] = field(default_factory=dict)
    ready: float = 0.0
    """Share of the rows that were there when their batch was asked for."""

    def percentile(self, share: float) -> float:
        return float(np.percentile(self.waits_s, 100 * share))

    def compute_share(self, compute_s: float) -> float:
        total = compute_s * len(self.waits_s)
        return total / (total + sum(self.waits_s))


def read_batches(loader: Any, numbers: range, compute_s: float, reader: Any = None) -> Measured:
    measured = Measured()
    before = (reader.figures.num_rows, reader.figures.num_ready) if reader else (0, 0)
    for number in numbers:
        started = time.perf_counter()
        batch = loader.batch(number)
        measured.waits_s.append(time.perf_counter() - started)
        measured.hashes.append(hashlib.sha256(batch.input_ids_BT.numpy().tobytes()).hexdigest())
        time.sleep(compute_s)
    if reader:
        measured.ready = (reader.figures.num_ready - before[1]) / (reader.figures.num_rows - before[0])
    return measured


@contextmanager
def direct(folder: Path, num_threads: int) -> Iterator[tuple[PackedRows, Any]]:
    yield PackedRows(folder, DirectRows(folder, num_threads)), None


@contextmanager
def mapped(folder: Path) -> Iterator[tuple[PackedRows, Any]]:
    yield PackedRows(folder, MappedRows(folder, read_index(folder))), None


@contextmanager
def only_ahead(folder: Path) -> Iterator[tuple[PackedRows, Any]]:
    source = ColdStore(json.loads((folder / ROWS_AT).read_text())["url"])
    reader = BlockReader(Tiers(BlockLayout(folder, read_index(folder)), source), num_readers=NUM_READERS)
    yield PackedRows(folder, reader), reader
    reader.close()


@contextmanager
def tiers(folder: Path, disk: Path) -> Iterator[tuple[PackedRows, Any]]:
    config = RowCacheConfig(enabled=True, folder=str(disk), num_readers=NUM_READERS)
    with open_cache(folder, config) as reader:
        yield PackedRows(folder, reader), reader


def measure(opened: Any, given: argparse.Namespace, *, ahead: int, cached: bool) -> dict[str, Measured]:
    """By epoch: `first`, and `later` where there is a cache; a part of the first one where there is none."""
    with opened as (rows, reader):
        plain = PackedLoader(rows, batch_rows=given.batch_rows, seed=1)
        loader = LookaheadLoader(plain, reader, num_ahead=ahead) if reader else plain
        epoch, compute_s = plain.num_batches_per_epoch, given.compute_ms / 1e3
        if not cached:
            read_batches(loader, range(epoch - AHEAD, epoch), compute_s)
            return {"later": read_batches(loader, range(epoch, epoch + given.uncached_batches), compute_s, reader)}
        read_batches(loader, range(AHEAD), compute_s)
        first = read_batches(loader, range(AHEAD, epoch), compute_s, reader)
        before = dict(reader.tier_figures.blocks)
        later = read_batches(loader, range(epoch, epoch * given.epochs), compute_s, reader)
        later.blocks = {name: number - before[name] for name, number in reader.tier_figures.blocks.items()}
        return {"first": first, "later": later}


def make_rows(folder: Path, given: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)
    sequences = ((np.append(rng.integers(2, 60_000, given.seq_len - 1), 1), None) for _ in range(given.rows))
    pack(sequences, folder, PackConfig(seq_len=given.seq_len), vocab_size=60_000, eos_id=1)
    (folder / ROWS_AT).write_text(json.dumps({"url": f"slow://{folder}"}))


def show(name: str, measured: Measured, compute_s: float) -> None:
    total = sum(measured.blocks.values())
    from_store = f"{measured.blocks[SOURCE] / total:9.0%}" if total else f"{'':9}"
    print(
        f"{name:<34}{1e3 * measured.percentile(0.5):10.1f}{1e3 * measured.percentile(0.99):10.1f}"
        f"{measured.compute_share(compute_s):10.0%}{measured.ready:9.0%}{from_store}",
        flush=True,
    )


def check(results: Mapping[str, Mapping[str, Measured]]) -> None:
    """Raise `SystemExit` unless all variants gave the same batches."""
    hashes = [result["later"].hashes for result in results.values()]
    shortest = min(map(len, hashes))
    if len({tuple(one[:shortest]) for one in hashes}) != 1:
        raise SystemExit("the variants gave different batches")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--batch-rows", type=int, default=32)
    parser.add_argument("--latency-ms", type=float, default=30.0)
    parser.add_argument("--compute-ms", type=float, default=150.0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--uncached-batches", type=int, default=100)
    given = parser.parse_args()
    fsspec.register_implementation("slow", SlowStore)
    compute_s = given.compute_ms / 1e3
    with tempfile.TemporaryDirectory() as place:
        folder, disk = Path(place) / "rows", Path(place) / "disk"
        make_rows(folder, given)
        SlowStore.latency_s = given.latency_ms / 1e3
        print(f"{'':34}{'p50 ms':>10}{'p99 ms':>10}{'compute':>10}{'ready':>9}{'store':>9}")
        results: dict[str, dict[str, Measured]] = {}
        for name, opened, ahead, cached in (
            ("mapped, no store", mapped(folder), 0, False),
            ("one row after another", direct(folder, 1), 0, False),
            (f"{NUM_READERS} rows at a time", direct(folder, NUM_READERS), 0, False),
            ("reading ahead alone", only_ahead(folder), AHEAD, False),
            ("tiers alone", tiers(folder, disk), 0, True),
            ("tiers and reading ahead", tiers(folder, disk), AHEAD, True),
        ):
            results[name] = measure(opened, given, ahead=ahead, cached=cached)
            for epoch, measured in results[name].items():
                show(name if epoch == "later" else f"{name}, first epoch", measured, compute_s)
    check(results)
    without, cache = results[f"{NUM_READERS} rows at a time"]["later"], results["tiers and reading ahead"]["later"]
    print(f"p99 without the cache / with it: {without.percentile(0.99) / cache.percentile(0.99):.1f}")


if __name__ == "__main__":
    main()
