"""The rows of a training stage, read through the cache where the section `cache` is on or the rows are on a store."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from modelwright.data.batching.augmented import PlannedRows
from modelwright.data.cache.config import RowCacheConfig
from modelwright.data.cache.lookahead import LookaheadLoader
from modelwright.data.cache.reader import BlockReader
from modelwright.data.cache.row_cache import open_cache, remove_leftovers
from modelwright.data.cache.tiers import DISK, MEMORY, SOURCE
from modelwright.data.loader import PackedRows
from modelwright.pipeline.report.blocks import Block, Table
from modelwright.pipeline.report.format import count, percent, seconds
from modelwright.pipeline.report.run_data import StageData
from modelwright.pipeline.stage import StageContext
from modelwright.plan.estimate import size
from modelwright.train.runtime import Runtime, TechniqueBuilder
from modelwright.train.technique import Technique

ROW_CACHE = "row_cache"
"""Name of the technique, and of its figures among the facts of a stage."""
_PLACES = {MEMORY: "memory of the host", DISK: "local disk", SOURCE: "where the rows lie"}


@contextmanager
def training_rows(folder: Path, config: RowCacheConfig, context: StageContext) -> Iterator[PackedRows]:
    """The packed rows in a folder, for as long as a stage trains on them."""
    if config.enabled:
        with open_cache(folder, config, note=context.progress.note) as reader:
            yield PackedRows(folder, reader)
        return
    remove_leftovers(config)
    packed = PackedRows(folder)
    try:
        yield packed
    finally:
        if isinstance(packed.reader, BlockReader):
            packed.reader.close()


def read_ahead(loader: PlannedRows, config: RowCacheConfig) -> tuple[PlannedRows, Sequence[TechniqueBuilder]]:
    """The loader with its rows read before they are needed, and what records how long batches waited; the loader itself
    where rows are mapped into memory.
    """
    reader = loader.rows.reader
    if not isinstance(reader, BlockReader):
        return loader, []
    return LookaheadLoader(loader, reader, num_ahead=config.num_batches_ahead), [recorded(reader)]


def recorded(reader: BlockReader) -> TechniqueBuilder:
    """A technique that adds the figures of each step to the record, and their sums to the facts of the stage."""
    before: dict[str, float] = dict.fromkeys(_figures(reader), 0.0)

    def metrics() -> Mapping[str, float]:
        now = _figures(reader)
        changes = {name: value - before[name] for name, value in now.items()}
        before.update(now)
        return changes

    def summary() -> Mapping[str, Any]:
        return {**asdict(reader.figures), **asdict(reader.tier_figures)}

    def build(run: Runtime) -> Technique:
        return Technique(name=ROW_CACHE, metrics=metrics, summary=summary)

    return build


def _figures(reader: BlockReader) -> dict[str, float]:
    tiers = reader.tier_figures
    blocks = {f"cache/{name}_blocks": float(number) for name, number in tiers.blocks.items()}
    return {**blocks, "cache/source_bytes": float(tiers.bytes[SOURCE]), "cache/wait_s": reader.figures.wait_s}


def cache_blocks(stage: StageData) -> Sequence[Block]:
    """The table of the report about the cache; none where rows were mapped into memory."""
    facts = stage.facts.get(ROW_CACHE)
    if not facts:
        return []
    blocks, num_bytes = facts["blocks"], facts["bytes"]
    total = max(1, sum(blocks.values()))
    waits = sorted(record["cache/wait_s"] for record in stage.records() if "cache/wait_s" in record)
    rows = [
        [title, count(blocks[name]), percent(blocks[name] / total), size(num_bytes[name])]
        for name, title in _PLACES.items()
    ]
    ready = facts["num_ready"] / max(1, facts["num_rows"])
    caption = f"Of the rows, {percent(ready)} were there before their batch was asked for"
    if waits:
        p99 = waits[min(len(waits) - 1, int(0.99 * len(waits)))]
        caption += f"; batches waited {seconds(statistics.median(waits))} (median) and {seconds(p99)} (p99)"
    caption += f". Blocks moved towards memory {count(facts['num_promoted'])} times, and {count(facts['num_demoted'])} "
    caption += (
        "were displaced from memory or the disk; these are the figures of the first process since its last start."
    )
    if facts["num_damaged"]:
        caption += f" {count(facts['num_damaged'])} blocks of the cache were damaged and read again."
    return [Table(["read from", "blocks", "share", "bytes"], rows, "Row cache", caption, numeric=(1, 2, 3))]
