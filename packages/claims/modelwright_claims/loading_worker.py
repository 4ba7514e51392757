"""A single side of `loading_latency` in a separate process, run by path with the interpreter that has its loader.

    python -P loading_worker.py versions|products|write|read [TASK.json SIDE]

prints its result as the last line, in JSON. At the top it imports only modules that the peers' environment has as
well, so nothing of the product.
"""

import importlib.util
import json
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

DIRECT, AHEAD, TIERS, CACHE = "direct", "reading ahead alone", "tiers alone", "cache"
LITDATA, STREAMING = PEERS = "litData", "mosaicml-streaming"
PACKAGES = {LITDATA: "litdata", STREAMING: "mosaicml-streaming"}
MATRIX_DIM = 256
TIMING_S = 1.0
"""Seconds for timing matrix products."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The work of all sides. url: of the bucket, which has a folder for each format of the same rows; rows: their
    file, uint16 [rows, seq_len]; packed: the packed rows, for their index; num_workers: processes of a peer that load.
    """

    url: str
    endpoint: str
    rows: str
    packed: str
    scratch: str
    batch_rows: int
    num_epochs: int
    compute_s: float
    num_products: int
    num_workers: int
    shard_bytes: int
    eos_id: int

    @property
    def seq_len(self) -> int:
        return int(np.load(self.rows, mmap_mode="r").shape[1])


Epochs = Iterator[Iterable[torch.Tensor]]
"""The tokens [batch_rows, seq_len] of the batches of each epoch."""
IGNORED = -100


def training_batch(samples: list[Any], eos_id: int) -> dict[str, torch.Tensor]:
    """Return the tensors of the product's batches, [rows, seq_len] each, from rows without padding whose documents end
    with `eos_id`. Peers make it where they collate, in their worker processes.
    """
    rows = [sample["tokens"] if isinstance(sample, dict) else sample for sample in samples]
    tokens = np.stack([np.asarray(row) for row in rows]).astype(np.int64)
    ends = tokens == eos_id
    segments = np.cumsum(ends, axis=1) - ends
    places = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    starts = np.zeros_like(tokens)
    starts[:, 1:] = np.where(ends[:, :-1], places[:, 1:], 0)
    labels = np.full_like(tokens, IGNORED)
    labels[:, :-1] = np.where(ends[:, :-1], IGNORED, tokens[:, 1:])
    return {
        "input_ids": torch.from_numpy(tokens),
        "labels": torch.from_numpy(labels),
        "positions": torch.from_numpy(places - np.maximum.accumulate(starts, axis=1)),
        "segments": torch.from_numpy(segments.astype(np.int32)),
    }


def product_epochs(side: str, task: Task, stack: ExitStack) -> Epochs:
    """The product's loader, with and without its tiers and its reading ahead."""
    from modelwright.data.rows.ahead import LookaheadLoader
    from modelwright.data.rows.cache.reader import BlockReader
    from modelwright.data.rows.cache.row_cache import RowCacheConfig, open_cache
    from modelwright.data.rows.loader import PackedLoader, PackedRows, row_layout

    packed = Path(task.packed)
    layout = row_layout(packed)
    config = RowCacheConfig(
        enabled=True,
        folder=f"{task.scratch}/disk",
        disk_bytes=2 * layout.total_bytes,  # room for all rows, as the peers have
    )
    if side in (TIERS, CACHE):
        (reader,) = stack.enter_context(open_cache(config, layout))
        rows = PackedRows(packed, reader)
    else:
        rows = PackedRows(packed)
    assert isinstance(rows.reader, BlockReader)
    stack.callback(rows.reader.close)
    loader = PackedLoader(rows, batch_rows=task.batch_rows, seed=1)
    if side in (AHEAD, CACHE):
        loader = LookaheadLoader(loader, rows.reader, num_ahead=config.num_batches_ahead)
    for epoch in range(task.num_epochs):
        first = epoch * loader.num_batches_per_epoch
        numbers = range(first, first + loader.num_batches_per_epoch)
        yield (loader.batch(number).input_ids_BT for number in numbers)


def litdata_epochs(side: str, task: Task, stack: ExitStack) -> Epochs:
    """litData with the settings that its guide on language models has."""
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader  # pyright: ignore
    from litdata.streaming import downloader  # pyright: ignore

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # the store has no TLS, and no option reaches this
    dataset = StreamingDataset(
        input_dir=f"{task.url}/{PACKAGES[side]}",
        cache_dir=f"{task.scratch}/chunks",
        item_loader=TokensLoader(block_size=task.seq_len),
        shuffle=True,
        storage_options={"endpoint_url": task.endpoint},
    )
    yield from peer_epochs(StreamingDataLoader, dataset, task)


def streaming_epochs(side: str, task: Task, stack: ExitStack) -> Epochs:
    """mosaicml-streaming with its defaults; its endpoint is in the environment."""
    import_streaming()
    from streaming.base import StreamingDataLoader, StreamingDataset  # pyright: ignore

    dataset = StreamingDataset(
        remote=f"{task.url}/{PACKAGES[side]}", local=f"{task.scratch}/shards", shuffle=True, batch_size=task.batch_rows
    )
    for stream in dataset.streams:
        # Its connection has read the index. Two forked workers that inherit it get parts of each other's shards.
        stream._downloader.clean_up()
    yield from peer_epochs(StreamingDataLoader, dataset, task)


def peer_epochs(loader_class: Callable[..., Any], dataset: Any, task: Task) -> Epochs:
    """Both peers have a loader with the arguments of PyTorch's."""
    loader = loader_class(
        dataset,
        batch_size=task.batch_rows,
        num_workers=task.num_workers,
        persistent_workers=True,
        collate_fn=partial(training_batch, eos_id=task.eos_id),
    )
    for _ in range(task.num_epochs):
        yield (batch["input_ids"] for batch in loader)


READERS: Mapping[str, Callable[[str, Task, ExitStack], Epochs]] = {
    DIRECT: product_epochs,
    AHEAD: product_epochs,
    TIERS: product_epochs,
    CACHE: product_epochs,
    LITDATA: litdata_epochs,
    STREAMING: streaming_epochs,
}


def import_streaming() -> None:
    """Make the modules of mosaicml-streaming importable without those for images, which its package imports at once:
    these need torchvision, whose build on the package index does not load next to a CPU build of torch.
    """
    spec = importlib.util.find_spec("streaming")
    assert spec is not None
    sys.modules["streaming"] = importlib.util.module_from_spec(spec)


def write_rows(side: str, task: Task) -> None:
    """Write the rows in a peer's format, in shards of as many bytes as ours, to `scratch`."""
    rows = np.load(task.rows)
    if side == LITDATA:
        from litdata import TokensLoader, optimize  # pyright: ignore

        optimize(
            fn=lambda row: torch.from_numpy(rows[row]),
            inputs=list(range(len(rows))),
            output_dir=task.scratch,
            chunk_bytes=task.shard_bytes,
            item_loader=TokensLoader(block_size=task.seq_len),
            num_workers=1,
            start_method="fork",
            verbose=False,
        )
        return
    import_streaming()
    from streaming.base import MDSWriter  # pyright: ignore

    with MDSWriter(
        out=task.scratch,
        columns={"tokens": f"ndarray:uint16:{task.seq_len}"},
        size_limit=task.shard_bytes + 4096,  # with its header, so that a shard has as many rows
        exist_ok=True,
    ) as writer:
        for row in rows:
            writer.write({"tokens": row})


def compute(num_products: int, matrix: torch.Tensor) -> None:
    """Compute as a step would: products of matrices, on one thread."""
    result = matrix
    for _ in range(num_products):
        result = (matrix @ result).clamp_(-1, 1)


def products_within(seconds: float) -> int:
    """Return how many products take so long, by the median of many."""
    matrix, times = torch.randn(MATRIX_DIM, MATRIX_DIM), list[float]()
    compute(20, matrix)
    deadline = time.perf_counter() + TIMING_S
    while time.perf_counter() < deadline:
        started = time.perf_counter()
        compute(5, matrix)
        times.append((time.perf_counter() - started) / 5)
    return max(1, round(seconds / float(np.median(times))))


def checksums(rows: np.ndarray) -> list[int]:
    return [zlib.crc32(row.tobytes()) for row in rows.astype(np.uint16)]


def read_epochs(epochs: Epochs, task: Task) -> dict[str, list[list[float]]]:
    """Seconds that each batch was waited for, and that were computed after it, by epoch. Raises `SystemExit` unless
    each epoch has every row once.
    """
    expected, matrix = sorted(checksums(np.load(task.rows))), torch.randn(MATRIX_DIM, MATRIX_DIM)
    waits_s, computed_s = list[list[float]](), list[list[float]]()
    for epoch in epochs:
        waits, computed, found = list[float](), list[float](), list[int]()
        started = time.perf_counter()
        for batch in epoch:
            arrived = time.perf_counter()
            compute(task.num_products, matrix)
            waits.append(arrived - started)
            computed.append(time.perf_counter() - arrived)
            found += checksums(batch.numpy())
            started = time.perf_counter()
        if sorted(found) != expected:
            raise SystemExit(f"an epoch has {len(found)} rows, which are not the {len(expected)} that were written")
        waits_s.append(waits)
        computed_s.append(computed)
    return {"waits_s": waits_s, "computed_s": computed_s}


def installed_versions() -> dict[str, str]:
    """The peers that this interpreter has."""
    versions = dict[str, str]()
    for side, package in PACKAGES.items():
        try:
            versions[side] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def main(action: str, *words: str) -> None:
    torch.set_num_threads(1)
    result: Any = None
    if action == "versions":
        result = installed_versions()
    else:
        place, side = words
        task = Task(**json.loads(Path(place).read_text(encoding="utf-8")))
        if action == "products":
            result = products_within(task.compute_s)
        elif action == "write":
            write_rows(side, task)
        else:
            with ExitStack() as stack:
                result = read_epochs(READERS[side](side, task, stack), task)
    print("\n" + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
