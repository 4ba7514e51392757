"""What is drawn for each image of a training batch, and what becomes of it: crop, flip, colors, MixUp, CutMix.

Every draw is a function of (seed, step, number of the image), and partners are drawn within the global batch. So a
batch is the same whatever the number of ranks, and the same again after a kill; a rank makes the partners of its images
itself.

Legend: B rows, C colors, S pixels of a side, K classes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from modelwright.core.errors import ConfigError
from modelwright.core.seeds import derive_seed
from modelwright.ops.image_augment import (
    brightened,
    contrasted,
    cut_and_mixed,
    cut_box,
    flipped,
    mixed,
    saturated,
    shifted,
    soft_target,
)

SHARE_OF_MIXUP = 0.5
"""Where MixUp and CutMix are both on, the probability that an image gets MixUp; otherwise it gets CutMix (Wightman et
al. 2021, "ResNet strikes back").
"""


@dataclass(frozen=True, kw_only=True)
class ImageAugmentationConfig:
    """Random changes of training images. 0 switches each of them off."""

    crop_padding: int = 0
    """Pixels by which an image is padded on every side before a crop of its own size is taken (He et al. 2016); 4 is
    usual for 32 pixels."""
    flip: bool = False
    """Exchange left and right of every other image; not where that changes the class, as with digits."""
    brightness: float = 0.0
    """Images are brightened by a factor from 1 - brightness to 1 + brightness."""
    contrast: float = 0.0
    """Their contrast is changed by a factor from 1 - contrast to 1 + contrast."""
    saturation: float = 0.0
    """Their saturation is changed by a factor from 1 - saturation to 1 + saturation."""
    mixup_alpha: float = 0.0
    """MixUp (Zhang et al. 2018): the share of an image is drawn from Beta(alpha, alpha); 0.2 is usual."""
    cutmix_alpha: float = 0.0
    """CutMix (Yun et al. 2019): the share that is left of an image is drawn from Beta(alpha, alpha); 1 is usual. With
    both, each image gets one of them."""

    def __post_init__(self) -> None:
        if self.crop_padding < 0:
            raise ConfigError(f"crop_padding: must not be negative, got {self.crop_padding}; 0 crops nothing")
        for name in ("brightness", "contrast", "saturation"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}: must be in [0, 1], got {getattr(self, name)}; 0.4 is usual")
        for name in ("mixup_alpha", "cutmix_alpha"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}: must be 0 (off) or above, got {getattr(self, name)}")

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with others."""
        return self.mixup_alpha > 0 or self.cutmix_alpha > 0


@dataclass(frozen=True)
class Augmented:
    """Images in [0, 1] and the distributions over classes that stand for them."""

    images_BCSS: Tensor
    targets_BK: Tensor


@dataclass(frozen=True, kw_only=True)
class ImageAugmentation:
    """The augmentation of one step.

    image: the image [C, S, S] of a number, in [0, 1]; label: its class.
    """

    config: ImageAugmentationConfig
    seed: int
    step: int
    num_classes: int
    smoothing: float
    image: Callable[[int], Tensor]
    label: Callable[[int], int]

    def __call__(self, own: Sequence[int], everyone: Sequence[int]) -> Augmented:
        """The images of the numbers `own`, of which there is one at least; everyone: the numbers of the global batch,
        in any order.
        """
        partners = self.partners(everyone) if self.config.mixes else {}
        changed: dict[int, Tensor] = {}
        for number in {*own, *(partners[one] for one in own if partners)}:
            changed[number] = self.changed(number)
        images, targets = zip(
            *(self._mixed(number, partners.get(number, number), changed) for number in own), strict=True
        )
        return Augmented(torch.stack(images), torch.stack(targets))

    def changed(self, number: int) -> Tensor:
        """One image after crop, flip and colors."""
        config, dice = self.config, self._dice("image", number)
        image_CSS, padding = self.image(number), config.crop_padding
        down, right = (int(one) for one in dice.integers(-padding, padding + 1, 2))
        is_flipped, factors = dice.random() < 0.5, dice.uniform(-1, 1, 3)
        if padding:
            image_CSS = shifted(image_CSS, down, right, _border(image_CSS))
        if config.flip and is_flipped:
            image_CSS = flipped(image_CSS)
        strengths = (config.brightness, config.contrast, config.saturation)
        for change, strength, factor in zip((brightened, contrasted, saturated), strengths, factors, strict=True):
            if strength:
                image_CSS = change(image_CSS, 1 + strength * float(factor))
        return image_CSS

    def partners(self, everyone: Sequence[int]) -> dict[int, int]:
        """What each image of the global batch is mixed with: a permutation of the numbers that occur in it."""
        numbers = sorted(set(everyone))
        order = np.argsort(self._dice("partners").random(len(numbers)), kind="stable")
        return {number: numbers[place] for number, place in zip(numbers, order, strict=True)}

    def _mixed(self, number: int, partner: int, changed: Mapping[int, Tensor]) -> tuple[Tensor, Tensor]:
        """The image, mixed with its partner's, and its target [K]."""
        image_CSS, target_K = changed[number], self._target(number)
        if not self.config.mixes:
            return image_CSS, target_K
        dice, other_CSS = self._dice("mix", number), changed[partner]
        mixup, cutmix = self.config.mixup_alpha, self.config.cutmix_alpha
        is_mixup = cutmix == 0 or (mixup > 0 and dice.random() < SHARE_OF_MIXUP)
        alpha = mixup if is_mixup else cutmix
        share = float(dice.beta(alpha, alpha))
        if is_mixup:
            image_CSS = mixed(image_CSS, other_CSS, share)
        else:
            height, width = image_CSS.shape[-2:]
            box = cut_box(height, width, share, (int(dice.integers(height)), int(dice.integers(width))))
            image_CSS, share = cut_and_mixed(image_CSS, other_CSS, box), 1.0 - box.share(height, width)
        return image_CSS, share * target_K + (1.0 - share) * self._target(partner)

    def _target(self, number: int) -> Tensor:
        return soft_target(self.num_classes, self.label(number), smoothing=self.smoothing)

    def _dice(self, *names: str | int) -> np.random.Generator:
        """A stream of its own for each purpose: a setting does not change what is drawn for another one."""
        return np.random.Generator(np.random.Philox(derive_seed(self.seed, "images", self.step, *names)))


def _border(image_CSS: Tensor) -> float:
    """The gray that a crop is padded with: the mean of the image's outermost pixels, which keeps white paper white."""
    edges = (image_CSS[:, 0], image_CSS[:, -1], image_CSS[:, :, 0], image_CSS[:, :, -1])
    return float(torch.cat(edges, dim=1).mean())
