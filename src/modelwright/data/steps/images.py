"""The step images: limits on the size and the shape of images, and near-duplicates by their perceptual hashes."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from modelwright.core.errors import ConfigError
from modelwright.data.document import KINDS, Document
from modelwright.data.images.stored import HASH_BITS, KEY
from modelwright.data.measured_corpus import MeasuredCorpus
from modelwright.data.steps.quality import IMAGE_LIMITS, QualityConfig
from modelwright.data.steps.step import Columns, Decisions, Drop, StepSpec

TOO_SMALL, TOO_LONG, NEAR = "image too small", "image too elongated", "near-duplicate image"


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """Limits on images, and their near-duplicates. Sizes are those of the original files."""

    min_side: int = 32
    """Fewest pixels of the shorter side."""
    max_aspect: float = 4.0
    """Longest side over shortest side."""
    max_hash_distance: int = 4
    """Images are near-duplicates if at most so many of the 64 bits of their perceptual hashes differ. The largest of
    them is kept, or a held-out one where there is any. -1 keeps near-duplicates."""

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
        """`image_width` and `image_height` [N] in pixels and `image_hash` [N] uint64; 0 for documents without one."""
        facts = [document.meta[KEY] if document.kind == "image" else _NO_IMAGE for document in documents]
        return {
            "image_width": np.array([one["width"] for one in facts], np.int32),
            "image_height": np.array([one["height"] for one in facts], np.int32),
            "image_hash": np.array([int(one["hash"], 16) for one in facts], np.uint64),
        }

    def decide(self, corpus: MeasuredCorpus) -> Decisions:
        """Drop by size and shape, then near-duplicates of what is left."""
        is_image = corpus.alive & (corpus.column("kind") == KINDS.index("image"))
        width, height = corpus.column("image_width"), corpus.column("image_height")
        drops: dict[int, Drop] = {}
        for number in map(int, np.flatnonzero(is_image)):
            shorter, longer = sorted((int(width[number]), int(height[number])))
            if shorter < self.config.min_side:
                drops[number] = Drop(TOO_SMALL, f"{width[number]} x {height[number]}, limit {self.config.min_side}")
            elif longer > self.config.max_aspect * shorter:
                detail = f"{width[number]} x {height[number]}, limit {self.config.max_aspect:g}"
                drops[number] = Drop(TOO_LONG, detail)
        if self.config.max_hash_distance < 0:
            return Decisions(drops=drops)
        left = np.array([number for number in np.flatnonzero(is_image) if int(number) not in drops], np.int64)
        area, heldout = width.astype(np.int64) * height, corpus.column("split")
        order = left[np.lexsort((left, -area[left], -heldout[left]))]
        hashes = corpus.column("image_hash")
        for number, instead, distance in near_duplicates(order, hashes, self.config.max_hash_distance):
            drops[number] = Drop(NEAR, f"{distance} bits from {corpus.identifier(instead)}")
        return Decisions(drops=drops)


_NO_IMAGE = {"width": 0, "height": 0, "hash": "0"}


def images_config(quality: QualityConfig) -> ImagesConfig:
    """The limits among those of the step quality."""
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


def near_duplicates(order: NDArray[np.int64], hashes: NDArray[np.uint64], most: int) -> list[tuple[int, int, int]]:
    """`(number, the one kept instead, bits between them)` for each image that differs in at most `most` bits from one
    that was kept before it. order: the numbers of the images, the best first.

    Hashes are cut into `most` + 1 bands: two that differ in `most` bits agree in one of them at least.
    """
    kept_in: list[dict[int, list[int]]] = [{} for _ in range(most + 1)]
    found: list[tuple[int, int, int]] = []
    for number in map(int, order):
        bands = _bands(int(hashes[number]), most + 1)
        candidates = sorted({one for known, band in zip(kept_in, bands, strict=True) for one in known.get(band, ())})
        if candidates:
            distances = np.bitwise_count(hashes[candidates] ^ hashes[number])
            nearest = int(distances.argmin())
            if distances[nearest] <= most:
                found.append((number, candidates[nearest], int(distances[nearest])))
                continue
        for known, band in zip(kept_in, bands, strict=True):
            known.setdefault(band, []).append(number)
    return found


def _bands(value: int, count: int) -> list[int]:
    """The bits of a hash in `count` parts of nearly equal width."""
    edges = [HASH_BITS * place // count for place in range(count + 1)]
    return [(value >> low) & ((1 << (high - low)) - 1) for low, high in itertools.pairwise(edges)]
