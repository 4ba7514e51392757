"""scikit-learn's handwritten digits with captions: image-text pairs that need no download.

1,797 images of 8 x 8 pixels (Alpaydin and Kaynak 1998), enlarged to 32 x 32. A caption says which digit it is, and
how thick its strokes are and where they lean, which is measured from the pixels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelwright.core.seeds import derive_seed
from modelwright.data.document import Document, Split
from modelwright.data.images.read import LABEL_FIELD
from modelwright.data.images.stored import KEY, encode, store_image

HELDOUT_FRACTION = 1 / 10
SIDE = 32
_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_FORMS = (
    "A handwritten {word}, {thickness}, {lean}.",
    "The digit {digit} in {thickness}, {lean}.",
    "Someone wrote a {word} with {thickness}; it is {lean}.",
    "{word}: a digit drawn in {thickness}, {lean}.",
)
_MOST = 16.0
"""The largest value of a pixel."""
_THIN, _THICK = 0.288, 0.321
"""Mean ink between which strokes are of medium thickness: about the thirds of the data set."""
_LEFT, _RIGHT = -0.093, 0.012
"""Horizontal shift for each row upwards between which a digit is upright: about the thirds."""


@dataclass(frozen=True)
class _DigitTraits:
    thickness: str
    lean: str


def digit_images() -> Iterator[Document]:
    """An image-text pair for each digit, always the same ones, in the order of the data set."""
    from sklearn.datasets import load_digits  # takes a second

    digits: Any = load_digits()
    for number, (gray, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        yield _document(number, np.asarray(gray, dtype=np.float64), int(label))


def _document(number: int, gray: NDArray[np.float64], label: int) -> Document:
    split: Split = "heldout" if derive_seed(0, "digits", "split", number) / 2**63 < HELDOUT_FRACTION else "train"
    traits = _traits(gray)
    form = _FORMS[derive_seed(0, "digits", "form", number) % len(_FORMS)]
    caption = form.format(word=_WORDS[label], digit=label, thickness=traits.thickness, lean=traits.lean)
    pixels = np.repeat((255 * (1.0 - gray / _MOST)).round().astype(np.uint8)[..., None], 3, axis=2)
    factor = SIDE // pixels.shape[0]
    file = encode(np.repeat(np.repeat(pixels, factor, axis=0), factor, axis=1), lossless=True)
    return Document(
        id=f"digits:{number}",
        text=caption[0].upper() + caption[1:],
        kind="image",
        split=split,
        source="digits",
        meta={KEY: store_image(file).plain(), "digit": label, LABEL_FIELD: str(label)},
    )


def _traits(gray: NDArray[np.float64]) -> _DigitTraits:
    """How thick the strokes are, by the mean ink, and where they lean, by the slope of the ink's center."""
    ink = gray / _MOST
    mean = ink.mean()
    rows, columns = np.mgrid[: ink.shape[0], : ink.shape[1]]
    total = ink.sum()
    row, column = (rows * ink).sum() / total, (columns * ink).sum() / total
    slope = -((rows - row) * (columns - column) * ink).sum() / ((rows - row) ** 2 * ink).sum()
    thickness = "thin strokes" if mean < _THIN else "thick strokes" if mean > _THICK else "medium strokes"
    lean = "leaning left" if slope < _LEFT else "leaning right" if slope > _RIGHT else "upright"
    return _DigitTraits(thickness, lean)
