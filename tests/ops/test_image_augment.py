"""Augmentation of images against Pillow and against the written definitions."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor

from modelwright.ops.image_augment import (
    cut_and_mixed,
    cut_box,
    flipped,
    mixed,
    shifted,
    soft_target,
)  # fmt: skip

HEIGHT, WIDTH = 9, 12


def picture(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)


def tensor_of(pixels: np.ndarray | Image.Image) -> Tensor:
    return torch.from_numpy(np.array(pixels).transpose(2, 0, 1)).double() / 255


def test_a_flip_is_that_of_pillow() -> None:
    assert torch.equal(flipped(tensor_of(picture())), tensor_of(ImageOps.mirror(Image.fromarray(picture()))))


@pytest.mark.parametrize(("down", "right"), [(0, 0), (2, -3), (-1, 4), (HEIGHT + 5, 0), (0, -WIDTH)])
def test_a_shift_is_written_out(down: int, right: int) -> None:
    image = tensor_of(picture())
    found = shifted(image, down, right, 0.25)
    for row in range(HEIGHT):
        for column in range(WIDTH):
            from_row, from_column = row - down, column - right
            inside = 0 <= from_row < HEIGHT and 0 <= from_column < WIDTH
            expected = image[:, from_row, from_column] if inside else torch.full((3,), 0.25, dtype=torch.float64)
            assert torch.equal(found[:, row, column], expected)


def test_mixup_is_the_convex_combination() -> None:
    one, other = tensor_of(picture(1)), tensor_of(picture(2))
    torch.testing.assert_close(mixed(one, other, 0.3), 0.3 * one + 0.7 * other, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_box_and_share_of_cutmix_agree_after_clipping_at_the_border(share: float) -> None:
    """The share of the label is the share of pixels that are left, wherever the box is; inside it is the one drawn."""
    one, other = torch.zeros(1, HEIGHT, WIDTH), torch.ones(1, HEIGHT, WIDTH)
    clipped = 0
    for row in range(HEIGHT):
        for column in range(WIDTH):
            box = cut_box(HEIGHT, WIDTH, share, (row, column))
            result = cut_and_mixed(one, other, box)
            assert float(result.sum()) == pytest.approx(box.share(HEIGHT, WIDTH) * HEIGHT * WIDTH)
            sides = [2 * (int(length * (1 - share) ** 0.5) // 2) for length in (HEIGHT, WIDTH)]
            is_whole = (box.bottom - box.top, box.right - box.left) == tuple(sides)
            clipped += not is_whole
            fits = all(
                half <= place and place + half <= length
                for half, place, length in zip([s // 2 for s in sides], (row, column), (HEIGHT, WIDTH), strict=True)
            )
            assert is_whole == fits
    assert clipped or share in (0.9, 1.0)
    assert not one.any()


def test_a_large_image_keeps_about_the_share_that_was_drawn() -> None:
    box = cut_box(1000, 1000, 0.37, (500, 500))
    assert box.share(1000, 1000) == pytest.approx(0.63, abs=0.005)


def test_a_smoothed_label_is_a_distribution() -> None:
    target = soft_target(5, 2, smoothing=0.1)
    assert float(target.sum()) == pytest.approx(1.0)
    assert target.tolist() == pytest.approx([0.02, 0.02, 0.92, 0.02, 0.02])
