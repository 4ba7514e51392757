"""Augmentation of images as pure functions of parameters that `objectives/image_batches.py` draws.

Values are in [0, 1]. Torchvision has these transforms, too; its build on the package index is for CUDA and cannot be
imported together with PyTorch for CPUs, and its MixUp and CutMix draw once for a batch from a global generator, so that
a batch that is divided among ranks would become another one.

Legend: C colors, H rows, W columns, K classes.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def shifted(image_CHW: Tensor, down: int, right: int, fill: float) -> Tensor:
    """Moves the image by numbers of pixels, which may be negative, with `fill` in the freed area: a random crop of the
    padded image (He et al. 2016, section 4.2).
    """
    height, width = image_CHW.shape[-2:]
    down, right = max(-height, min(height, down)), max(-width, min(width, right))
    return F.pad(image_CHW, (right, -right, down, -down), value=fill)


def flipped(image_CHW: Tensor) -> Tensor:
    """The image with left and right exchanged."""
    return image_CHW.flip(-1)


class CutBox(NamedTuple):
    """Rows `top` to `bottom` and columns `left` to `right`, without the last ones."""

    top: int
    bottom: int
    left: int
    right: int

    def share(self, height: int, width: int) -> float:
        """Share of an image's pixels inside the box."""
        return (self.bottom - self.top) * (self.right - self.left) / (height * width)


def mixed(image_CHW: Tensor, other_CHW: Tensor, share: float) -> Tensor:
    """MixUp (Zhang et al. 2018, section 2): `share` of the image and the rest of the other."""
    return torch.lerp(other_CHW, image_CHW, share)


def cut_box(height: int, width: int, share: float, center: tuple[int, int]) -> CutBox:
    """The box that CutMix replaces so that `share` of the image is left (Yun et al. 2019, section 3.1). It is cut off
    at the borders, so the share that is left in the end is 1 - `CutBox.share`. center: its row and column.
    """
    scale = (1.0 - share) ** 0.5
    half_height, half_width = int(height * scale) // 2, int(width * scale) // 2
    row, column = center
    return CutBox(
        max(0, row - half_height),
        min(height, row + half_height),
        max(0, column - half_width),
        min(width, column + half_width),
    )


def cut_and_mixed(image_CHW: Tensor, other_CHW: Tensor, box: CutBox) -> Tensor:
    """CutMix: the box of the other image in place of the image's own."""
    out_CHW = image_CHW.clone()
    place = (slice(None), slice(box.top, box.bottom), slice(box.left, box.right))
    out_CHW[place] = other_CHW[place]
    return out_CHW


def soft_target(num_classes: int, label: int, *, smoothing: float = 0.0) -> Tensor:
    """The distribution [K] of a label: `smoothing` spread over all classes (Szegedy et al. 2016, section 7)."""
    target_K = torch.full((num_classes,), smoothing / num_classes, dtype=torch.float64)
    target_K[label] += 1.0 - smoothing
    return target_K
