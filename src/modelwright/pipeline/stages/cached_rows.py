"""The rows of a training stage and their images, read through the cache where the section `cache` is on, and ahead
where they are on a store.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modelwright.data.images.store import ImageStore, has_images, image_layout, images_folder, open_images
from modelwright.data.rows.ahead import LookaheadLoader, PlannedRows
from modelwright.data.rows.cache.reader import DISK, MEMORY, SOURCE, BlockReader
from modelwright.data.rows.cache.row_cache import RowCacheConfig, open_cache, remove_leftovers
from modelwright.data.rows.loader import PackedRows, row_layout
from modelwright.pipeline.estimate.cost import size
from modelwright.pipeline.report.blocks import Block, Table, count, percent, seconds
from modelwright.pipeline.report.run_data import StageData
from modelwright.pipeline.stage import StageContext
from modelwright.train.technique import Technique, TechniqueBuilder

ROW_CACHE = "row_cache"
"""Name of the technique, and of its figures among the facts of a stage."""
_PLACES = {MEMORY: "memory of the host", DISK: "local disk", SOURCE: "where the rows lie"}


@dataclass(frozen=True)
class TrainingData:
    """Training data of a stage. images: images of the rows; None for rows without images."""

    rows: PackedRows
    images: ImageStore | None

    @property
    def readers(self) -> list[BlockReader[Any]]:
        """Readers of rows and images that are not mapped into memory."""
        readers = [self.rows.reader, *([self.images.reader] if self.images else [])]
        return [reader for reader in readers if isinstance(reader, BlockReader)]


@contextmanager
def training_data(folder: Path, config: RowCacheConfig, context: StageContext) -> Iterator[TrainingData]:
    """Opens the packed rows in a folder and their images; closes them, and leaves the cache, on exit."""
    num_ahead = config.num_batches_ahead
    if config.enabled:
        images = images_folder(folder.parent, folder.name)
        layouts = [row_layout(folder), *([image_layout(images)] if has_images(images) else [])]
        with open_cache(config, *layouts, note=context.progress.note) as (rows, *others):
            stores = [ImageStore(images, reader, num_ahead=num_ahead) for reader in others]
            yield TrainingData(PackedRows(folder, rows), stores[0] if stores else None)
        return
    # The cache may have been switched off after a run that was killed left files in its folder.
    remove_leftovers(config)
    data = TrainingData(PackedRows(folder), open_images(folder.parent, folder.name, num_ahead=num_ahead))
    try:
        yield data
    finally:
        for reader in data.readers:
            reader.close()


def read_ahead(
    loader: PlannedRows, data: TrainingData, config: RowCacheConfig
) -> tuple[PlannedRows, Sequence[TechniqueBuilder]]:
    """Returns a loader that reads rows before they are needed, with a technique that records how long batches waited;
    where rows are mapped into memory, the loader itself.
    """
    reader = loader.rows.reader
    if not isinstance(reader, BlockReader):
        return loader, []
    return LookaheadLoader(loader, reader, num_ahead=config.num_batches_ahead), [recorded(data.readers)]


def recorded(readers: Sequence[BlockReader[Any]]) -> TechniqueBuilder:
    """Returns a technique that adds the figures of each step to the record, and their sums to the facts of the
    stage.
    """
    before: dict[str, float] = {}

    def metrics() -> Mapping[str, float]:
        # The readers count from their start; a record has the changes since the one before it.
        sums = _sums(readers)
        blocks = {f"cache/{name}_blocks": float(number) for name, number in sums["blocks"].items()}
        now = {**blocks, "cache/source_bytes": float(sums["bytes"][SOURCE]), "cache/wait_s": sums["wait_s"]}
        changes = {name: value - before.get(name, 0.0) for name, value in now.items()}
        before.update(now)
        return changes

    return lambda run: Technique(name=ROW_CACHE, metrics=metrics, summary=lambda: _sums(readers), needs=frozenset())


def _sums(readers: Sequence[BlockReader[Any]]) -> dict[str, Any]:
    """Adds up the figures of the readers and of the tiers that they read from."""
    # Rows and images may read through the same tiers, which count once.
    tiers = {id(reader.tiers): reader.tier_figures for reader in readers}
    return _added([asdict(reader.figures) for reader in readers]) | _added([asdict(one) for one in tiers.values()])


def _added(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Adds up numbers, and numbers by tier, that have the same names."""
    first = figures[0]
    return {
        name: _added([one[name] for one in figures]) if isinstance(value, dict) else sum(one[name] for one in figures)
        for name, value in first.items()
    }


def cache_blocks(stage: StageData) -> Sequence[Block]:
    """Returns the table of the report about the cache; none where rows were mapped into memory."""
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
    caption = f"Of what batches needed, {percent(ready)} was there before they were asked for"
    if waits:
        p99 = waits[min(len(waits) - 1, int(0.99 * len(waits)))]
        caption += f"; batches waited {seconds(statistics.median(waits))} (median) and {seconds(p99)} (p99)"
    caption += (
        f". Blocks moved towards memory {count(facts['num_promoted'])} times, and {count(facts['num_demoted'])} "
        "were displaced from memory or the disk; these are the figures of the first process since its last start."
    )
    if facts["num_damaged"]:
        caption += f" {count(facts['num_damaged'])} blocks of the cache were damaged and read again."
    return [Table(["read from", "blocks", "share", "bytes"], rows, "Row cache", caption, numeric=(1, 2, 3))]
