"""scikit-learn's handwritten digits with captions: image-text pairs that need no download.

1,797 images of 8 x 8 pixels (Alpaydin and Kaynak 1998), enlarged to 32 x 32. A caption names the digit, and the
thickness and slant of its strokes, which are measured from the pixels.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelwright.core.seeds import derive_seed
from modelwright.data.document import Document, Split
from modelwright.data.images.decode import KEY, encode, store_image
from modelwright.data.images.read import LABEL_FIELD

SIDE = 32
_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_FORMS = (
    "A handwritten {word}, {thickness}, {lean}.",
    "The digit {digit} in {thickness}, {lean}.",
    "Someone wrote a {word} with {thickness}; it is {lean}.",
    "{word}: a digit drawn in {thickness}, {lean}.",
)
_MOST = 16.0
"""Maximum value of a pixel."""
_THIN, _THICK = 0.288, 0.321
"""Limits of the mean ink of strokes of medium thickness: about the thirds of the data set."""
_LEFT, _RIGHT = -0.093, 0.012
"""Limits of the horizontal shift per row upwards of an upright digit: about the thirds."""


def digit_images() -> Iterator[Document]:
    """Yields an image-text pair for each digit, always the same ones, in the order of the data set."""
    from sklearn.datasets import load_digits  # takes a second

    digits: Any = load_digits()
    for number, (image, target) in enumerate(zip(digits.images, digits.target, strict=True)):
        ink: NDArray[np.float64] = np.asarray(image, dtype=np.float64) / _MOST
        label = int(target)
        # Thickness is the mean ink; the slant is the regression of the ink's column on its row, which counts downwards.
        mean, total = ink.mean(), ink.sum()
        rows, columns = np.mgrid[: ink.shape[0], : ink.shape[1]]
        row, column = (rows * ink).sum() / total, (columns * ink).sum() / total
        slope = -((rows - row) * (columns - column) * ink).sum() / ((rows - row) ** 2 * ink).sum()
        thickness = "thin strokes" if mean < _THIN else "thick strokes" if mean > _THICK else "medium strokes"
        lean = "leaning left" if slope < _LEFT else "leaning right" if slope > _RIGHT else "upright"
        form = _FORMS[derive_seed(0, "digits", "form", number) % len(_FORMS)]
        caption = form.format(word=_WORDS[label], digit=label, thickness=thickness, lean=lean)
        pixels = np.repeat((255 * (1.0 - ink)).round().astype(np.uint8)[..., None], 3, axis=2)
        factor = SIDE // pixels.shape[0]
        file = encode(np.repeat(np.repeat(pixels, factor, axis=0), factor, axis=1), lossless=True)
        split: Split = "heldout" if derive_seed(0, "digits", "split", number) / 2**63 < GENERATED_HELDOUT else "train"
        yield Document(
            id=f"digits:{number}",
            text=caption[0].upper() + caption[1:],
            kind="image",
            split=split,
            source="digits",
            meta={KEY: store_image(file).plain(), "digit": label, LABEL_FIELD: str(label)},
        )
