"""`StoredImage`: the image of a document: checked, upright, of a bounded size, with its hash.

In `Document.meta["image"]`: `data`, base64; `width` and `height` of the original; `hash`, perceptual, hexadecimal.
"""

import base64
import binascii
import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.fft
from numpy.typing import NDArray

from modelwright.data.images.decode import decode, image_size, pillow

KEY = "image"
"""Key of the image in `Document.meta`."""
STORED_SIDE = 256
"""Pixels of the shorter side of reduced images: the input of small models, and a little more for random crops."""
HASH_BITS = 64
_HASH_SIDE, _LOW = 32, 8
_QUALITY = 92
_LOSSLESS = (b"\x89PNG", b"BM", b"GIF8")
"""Beginnings of files of lossless formats: PNG, BMP and GIF."""


@dataclass(frozen=True)
class StoredImage:
    """width, height: pixels of the original; data: an encoded file, JPEG or PNG; hash: 64 bits."""

    data: bytes
    width: int
    height: int
    hash: int

    @property
    def digest(self) -> str:
        """Digest of the file, which identifies the pixels."""
        return hashlib.blake2b(self.data, digest_size=8).hexdigest()

    def plain(self) -> dict[str, Any]:
        data = base64.b64encode(self.data).decode()
        return {"data": data, "width": self.width, "height": self.height, "hash": f"{self.hash:016x}"}

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> "StoredImage":
        """Returns the image of `plain`'s result."""
        # Without `validate`, foreign characters would be skipped and a damaged record accepted.
        data = base64.b64decode(fields["data"], validate=True)
        return cls(data, int(fields["width"]), int(fields["height"]), int(fields["hash"], 16))


def is_stored_image(value: Any) -> bool:
    """Returns True for a JSON value of the form of `StoredImage.plain`."""
    if not isinstance(value, dict):
        return False
    try:
        image = StoredImage.from_plain(value)
    except (KeyError, TypeError, ValueError, binascii.Error):
        return False
    return image.width > 0 and image.height > 0 and 0 <= image.hash < 2**HASH_BITS


def store_image(data: bytes) -> StoredImage:
    """Converts an image file: lossless formats become PNG, others JPEG. Raises `ImageFault` for an unusable file."""
    width, height = image_size(data)
    pixels = decode(data, most_side=STORED_SIDE)
    return StoredImage(encode(pixels, lossless=data.startswith(_LOSSLESS)), width, height, perceptual_hash(pixels))


def encode(pixels: NDArray[np.uint8], *, lossless: bool) -> bytes:
    """Encodes pixels [H, W, 3] as PNG or JPEG."""
    file = io.BytesIO()
    options: dict[str, Any] = {"format": "PNG"} if lossless else {"format": "JPEG", "quality": _QUALITY}
    pillow().fromarray(pixels).save(file, **options)
    return file.getvalue()


def perceptual_hash(pixels: NDArray[np.uint8]) -> int:
    """Returns 64 bits of which few change when an image is scaled, compressed again or made lighter: one for each of
    the lowest 8 x 8 frequencies of its 32 x 32 gray values, 1 above their median (pHash, Zauner 2010, section 3.2.1).
    """
    module = pillow()
    small = module.fromarray(pixels).convert("L").resize((_HASH_SIDE, _HASH_SIDE), module.Resampling.LANCZOS)
    frequencies = np.asarray(scipy.fft.dctn(np.asarray(small, dtype=np.float64), norm="ortho"))[:_LOW, :_LOW]
    bits = frequencies > np.median(frequencies)
    return int.from_bytes(np.packbits(bits).tobytes(), "big")
