"""Images as squares of pixels of the size that a model wants."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from modelwright.data.images.decode import decode, pillow

Fit = Literal["crop", "stretch"]
"""How an image becomes a square: its center is taken, or it is stretched."""


def square_pixels(data: bytes, *, size: int, fit: Fit) -> NDArray[np.uint8]:
    """An image file as a square [3, size, size]. Raises `ImageFault`."""
    return squared(decode(data), size=size, fit=fit)


def squared(pixels: NDArray[np.uint8], *, size: int, fit: Fit) -> NDArray[np.uint8]:
    """Pixels [H, W, 3] as a square [3, size, size]."""
    image = pillow().fromarray(pixels)
    box = None
    if fit == "crop":
        side = min(image.size)
        left, top = (image.width - side) / 2, (image.height - side) / 2
        box = (left, top, left + side, top + side)
    square = image.resize((size, size), pillow().Resampling.BICUBIC, box=box)
    return np.ascontiguousarray(np.asarray(square, dtype=np.uint8).transpose(2, 0, 1))
