"""The step images: limits on the size and the shape of images, and near-duplicates by their perceptual hashes."""

import itertools
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from modelwright.core.config import ConfigError
from modelwright.data.clean.deduplicate import BandGroups, keep_in, kept_in
from modelwright.data.clean.fingerprints import BandFiles
from modelwright.data.clean.steps.quality import IMAGE_LIMITS, QualityConfig
from modelwright.data.clean.steps.step import Columns, Decisions, Drop, Drops, MeasuredCorpus, StepSpec
from modelwright.data.document import KINDS, Document
from modelwright.data.images.decode import HASH_BITS, KEY
from modelwright.data.workers import ShardEngine

TOO_SMALL, TOO_LONG, NEAR = "image too small", "image too elongated", "near-duplicate image"
# Bands of 12 bits have groups of 250 images in a million: a bound as low as that of texts would miss some.
_MOST_IN_GROUP = 65_535


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """Limits on images, and their near-duplicates. Sizes are those of the original files."""

    min_side: int = 32
    """Fewest pixels of the shorter side."""
    max_aspect: float = 4.0
    """Longest side over shortest side."""
    max_hash_distance: int = 4
    """Largest number of different bits, of 64, between the perceptual hashes of near-duplicates. The largest image is
    kept, or a held-out one if there is one. -1 keeps near-duplicates."""

    def __post_init__(self) -> None:
        if self.min_side < 1:
            raise ConfigError(f"min_side: must be at least 1, got {self.min_side}")
        if self.max_aspect < 1:
            raise ConfigError(f"max_aspect: must be at least 1, got {self.max_aspect}; 4 is usual")
        if not -1 <= self.max_hash_distance <= 16:
            raise ConfigError(f"max_hash_distance: must be from -1 to 16, got {self.max_hash_distance}; 4 is usual")


@dataclass(frozen=True)
class Images:
    config: ImagesConfig
    name: str = "images"

    def measure(self, documents: Sequence[Document], columns: Columns) -> Columns:
        """Measures `image_width` and `image_height` [N] in pixels and `image_hash` [N] uint64; 0 without an image."""
        facts = [document.meta[KEY] if document.kind == "image" else _NO_IMAGE for document in documents]
        return {
            "image_width": np.array([one["width"] for one in facts], np.int32),
            "image_height": np.array([one["height"] for one in facts], np.int32),
            "image_hash": np.array([int(one["hash"], 16) for one in facts], np.uint64),
        }

    def decide(self, corpus: MeasuredCorpus) -> Decisions:
        """Drops by size and shape, then near-duplicates of the others."""
        is_image = corpus.alive & (corpus.column("kind") == KINDS.index("image"))
        width, height = corpus.column("image_width"), corpus.column("image_height")
        is_small = is_image & (np.minimum(width, height) < self.config.min_side)
        is_long = np.maximum(width, height) > self.config.max_aspect * np.minimum(width, height)
        is_long &= is_image & ~is_small
        near = np.empty((0, 3), np.int64)
        if self.config.max_hash_distance >= 0:
            # Held-out images first, then the largest: the first of near-duplicates is kept.
            split, left = corpus.column("split"), np.flatnonzero(is_image & ~is_small & ~is_long)
            area = width[left].astype(np.int64) * height[left]
            order = left[np.lexsort((left, -area, -split[left]))].astype(np.uint32)
            del left, area, split  # as large as the columns
            hashes, most = corpus.column("image_hash"), self.config.max_hash_distance
            near = near_duplicates(order, hashes, most, corpus.folder, corpus.engine)
            near = near[np.argsort(near[:, 0])]
        numbers = np.sort(np.concatenate([np.flatnonzero(is_small | is_long), near[:, 0]]))

        def drop(place: int) -> Drop:
            number = int(numbers[place])
            size = f"{width[number]} x {height[number]}"
            if is_small[number]:
                return Drop(TOO_SMALL, f"{size}, limit {self.config.min_side}")
            if is_long[number]:
                return Drop(TOO_LONG, f"{size}, limit {self.config.max_aspect:g}")
            _, instead, distance = map(int, near[np.searchsorted(near[:, 0], number)])
            return Drop(NEAR, f"{distance} bits from {corpus.identifier(instead)}")

        return Decisions(drops=Drops(numbers, drop))


_NO_IMAGE = {"width": 0, "height": 0, "hash": "0"}


def images_config(quality: QualityConfig) -> ImagesConfig:
    """Selects the limits on images among those of the step quality."""
    limits = {name.removeprefix("image."): quality.limits[name] for name in IMAGE_LIMITS if name in quality.limits}
    whole = {name: int(value) for name, value in limits.items() if name != "max_aspect"}
    try:
        return ImagesConfig(**{**limits, **whole})
    except ConfigError as error:
        raise ConfigError(f"clean.quality.limits.image.{error}") from None


IMAGES = StepSpec(
    name="images",
    build=lambda config, seed: Images(images_config(config)),
    remedies={
        TOO_SMALL: "--clean.quality.limits.image.min_side 1",
        TOO_LONG: "--clean.quality.limits.image.max_aspect 1000",
        NEAR: "--clean.quality.limits.image.max_hash_distance -1",
    },
    section="quality",
)


def near_duplicates(
    order: NDArray[np.uint32], hashes: NDArray[np.uint64], most: int, folder: Path, engine: ShardEngine
) -> NDArray[np.int64]:
    """Returns `(number, the one kept instead, bits between them)` [D, 3] of each image that differs in at most `most`
    bits from one that was kept before it. order: the numbers of the images, the best first; hashes [N]: of all
    documents; folder: for temporary files; engine: where images are grouped by band.

    Hashes are cut into `most` + 1 bands: two that differ in `most` bits agree in at least one of them. The images of
    one value of a band are a group, as for texts; of those that are kept the first 65,535 are candidates.
    """
    with tempfile.TemporaryDirectory(dir=folder) as files:
        bands = BandFiles(Path(files))
        edges = [HASH_BITS * band // (most + 1) for band in range(most + 2)]
        for band, (low, high) in enumerate(itertools.pairwise(edges)):
            part = (hashes >> np.uint64(low)) & np.uint64((1 << (high - low)) - 1)
            part.tofile(bands.path(band))
        del part  # as large as the hashes
        groups = BandGroups(order, bands, engine, num_bands=most + 1, most=_MOST_IN_GROUP)
        found = array("q")
        for number, places in groups:
            own = groups.groups(places)
            candidates = np.concatenate([np.asarray(kept_in(band, place)) for band, place in own])
            distances = np.bitwise_count(hashes[candidates] ^ hashes[number])
            if len(candidates) and (nearest := int(distances.min())) <= most:
                found.extend((number, int(candidates[distances == nearest].min()), nearest))
            else:
                keep_in(own, number)
    return np.array(found, np.int64).reshape(-1, 3)
