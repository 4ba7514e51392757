"""Batches of rows with images, and the random augmentation of the images in training: crop, flip, colors, MixUp,
CutMix.

Every draw is a function of (seed, step, number of the image), and partners are drawn within the global batch. So a
batch is the same for any number of ranks and after a kill; a rank computes the partners of its images itself.

Legend: B rows, C colors, S pixels of a side (or pieces of a row, in image numbers), K classes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelwright.core.config import ConfigError, derive_seed
from modelwright.data.images.store import ImageStore
from modelwright.data.rows.ahead import ImagesAhead, Look, PlannedRows, own_images
from modelwright.data.rows.batch import TokenBatch
from modelwright.data.rows.cache.reader import BlockReader
from modelwright.model.vision.config import VisionConfig
from modelwright.objectives.next_token import numbered_batches
from modelwright.ops import image_augment
from modelwright.ops.piece_sums import count_pieces, piece_ends, piece_sums


def image_batches(
    source: PlannedRows, images: ImageStore | None, *, first: int, rank: int, world_size: int,
    needed: Look[Sequence[int]] = own_images,
) -> Iterator[TokenBatch]:  # fmt: skip
    """`numbered_batches` that reads images ahead, unless they are mapped; `needed` returns a batch's image numbers."""
    ahead: ImagesAhead | None = None
    if images is not None and isinstance(images.reader, BlockReader):
        ahead = ImagesAhead(images.reader, source, needed, num_ahead=images.num_ahead)
    for index, batch in enumerate(numbered_batches(source, first=first, rank=rank, world_size=world_size), start=first):
        if ahead is not None:
            ahead.expect(index, rank, world_size)
        yield batch


def image_numbers(batch: TokenBatch) -> Tensor:
    """Image number of each piece, int64 [B, S]; -1 for pieces without one."""
    # Each token of a piece has its value, so that a sum over the ends alone is the value itself
    values_BT = batch.extras["values_BT"] * piece_ends(batch.segments_BT)
    return piece_sums(values_BT, batch.segments_BT, count_pieces(batch.segments_BT)).round().long() - 1


def fill_squares(
    pixels: NDArray[np.uint8], numbers: Sequence[Sequence[int]], store: ImageStore | None, shape: VisionConfig
) -> None:
    """Write images into pixels [rows, most images of a row, 3, S, S]. numbers: image numbers of each row."""
    flat = [number for of_row in numbers for number in of_row]
    if not flat:
        return
    assert store is not None, "rows with images come with a store"
    squares = store.squares(flat, size=shape.image_size, fit=shape.fit)
    for row, of_row in enumerate(numbers):
        for place, square in enumerate(islice(squares, len(of_row))):
            pixels[row, place] = square


SHARE_OF_MIXUP = 0.5
"""Probability of MixUp if both are on; else CutMix (Wightman et al. 2021, "ResNet strikes back")."""


@dataclass(frozen=True, kw_only=True)
class ImageAugmentationConfig:
    """Random changes of training images. 0 switches each of them off."""

    crop_padding: int = 0
    """Pixels of padding on every side before a crop of the original size (He et al. 2016); 4 for 32 pixels."""
    flip: bool = False
    """Exchange left and right of every other image; not where that changes the class, as with digits."""
    mixup_alpha: float = 0.0
    """MixUp (Zhang et al. 2018): the share of an image is drawn from Beta(alpha, alpha); 0.2 is usual."""
    cutmix_alpha: float = 0.0
    """CutMix (Yun et al. 2019): the remaining share of an image is drawn from Beta(alpha, alpha); 1 is usual. With both
    on, each image gets MixUp or CutMix."""

    def __post_init__(self) -> None:
        if self.crop_padding < 0:
            raise ConfigError(f"crop_padding: must not be negative, got {self.crop_padding}; 0 crops nothing")
        for name in ("mixup_alpha", "cutmix_alpha"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}: must be 0 (off) or above, got {getattr(self, name)}")

    @property
    def mixes(self) -> bool:
        """True if images are mixed with others."""
        return self.mixup_alpha > 0 or self.cutmix_alpha > 0


@dataclass(frozen=True)
class Augmented:
    """Images in [0, 1] and their target distributions over classes."""

    images_BCSS: Tensor
    targets_BK: Tensor


@dataclass(frozen=True, kw_only=True)
class ImageAugmentation:
    """Augmentation of one step. image: returns the image [C, S, S] of a number, in [0, 1]; label: returns its class."""

    config: ImageAugmentationConfig
    seed: int
    step: int
    num_classes: int
    smoothing: float
    image: Callable[[int], Tensor]
    label: Callable[[int], int]

    def __call__(self, own: Sequence[int], everyone: Sequence[int]) -> Augmented:
        """Augments the images `own`, at least one. everyone: numbers of the global batch's images, in any order."""
        partners = self.partners(everyone) if self.config.mixes else {}
        mixup, cutmix = self.config.mixup_alpha, self.config.cutmix_alpha
        changed = {number: self.changed(number) for number in {*own, *(partners[one] for one in own if partners)}}
        images, targets = list[Tensor](), list[Tensor]()
        for number in own:
            image_CSS, target_K = changed[number], self._target(number)
            if partners:
                dice, partner = self._dice("mix", number), partners[number]
                is_mixup = cutmix == 0 or (mixup > 0 and dice.random() < SHARE_OF_MIXUP)
                alpha = mixup if is_mixup else cutmix
                share = float(dice.beta(alpha, alpha))
                if is_mixup:
                    image_CSS = image_augment.mixed(image_CSS, changed[partner], share)
                else:
                    height, width = image_CSS.shape[-2:]
                    box = image_augment.cut_box(
                        height, width, share, (int(dice.integers(height)), int(dice.integers(width)))
                    )
                    # The share is that of the box, which the border of the image may have cut
                    image_CSS, share = (
                        image_augment.cut_and_mixed(image_CSS, changed[partner], box),
                        1.0 - box.share(height, width),
                    )
                target_K = share * target_K + (1.0 - share) * self._target(partner)
            images.append(image_CSS)
            targets.append(target_K)
        return Augmented(torch.stack(images), torch.stack(targets))

    def changed(self, number: int) -> Tensor:
        """Returns an image after crop and flip."""
        config, dice = self.config, self._dice("image", number)
        image_CSS, padding = self.image(number), config.crop_padding
        # All is drawn whether it is used or not: a setting does not shift the draws of the others
        down, right = (int(one) for one in dice.integers(-padding, padding + 1, 2))
        is_flipped = dice.random() < 0.5
        if padding:
            # Padded with the gray of the outermost pixels' mean, which keeps white paper white
            edges = (image_CSS[:, 0], image_CSS[:, -1], image_CSS[:, :, 0], image_CSS[:, :, -1])
            image_CSS = image_augment.shifted(image_CSS, down, right, float(torch.cat(edges, dim=1).mean()))
        if config.flip and is_flipped:
            image_CSS = image_augment.flipped(image_CSS)
        return image_CSS

    def partners(self, everyone: Sequence[int]) -> dict[int, int]:
        """Draws the partner of each image of the global batch: a permutation of its distinct numbers."""
        numbers = sorted(set(everyone))
        order = np.argsort(self._dice("partners").random(len(numbers)), kind="stable")
        return {number: numbers[place] for number, place in zip(numbers, order, strict=True)}

    def _target(self, number: int) -> Tensor:
        return image_augment.soft_target(self.num_classes, self.label(number), smoothing=self.smoothing)

    def _dice(self, *names: str | int) -> np.random.Generator:
        """Returns a separate random stream for each purpose, so that a setting does not change other draws."""
        return np.random.Generator(np.random.Philox(derive_seed(self.seed, "images", self.step, *names)))
