"""Batches of rows with images."""

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from modelwright.data.images.store import ImageStore
from modelwright.data.rows.ahead import ImagesAhead, Look, PlannedRows, own_images
from modelwright.data.rows.batch import TokenBatch
from modelwright.data.rows.cache.reader import BlockReader
from modelwright.model.vision.config import VisionConfig
from modelwright.objectives.next_token import numbered_batches
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
