"""`StoredImage`: an image as it travels with its document: checked, upright, of a bounded size, with its hash.

In `Document.meta["image"]` it is plain data: `data`, the file as base64; `width` and `height` of the original; `hash`,
its perceptual hash in hexadecimal.
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
"""Where a document has its image, in `meta`."""
STORED_SIDE = 256
"""Pixels of the shorter side to which larger images are reduced: what models of this size read, and a little more for
random crops."""
HASH_BITS = 64
_HASH_SIDE, _LOW = 32, 8
_QUALITY = 92
_LOSSLESS = (b"\x89PNG", b"BM", b"GIF8")


@dataclass(frozen=True)
class StoredImage:
    """width, height: pixels of the original; data: an encoded file, JPEG or PNG; hash: 64 bits."""

    data: bytes
    width: int
    height: int
    hash: int

    @property
    def digest(self) -> str:
        """Identifies the pixels."""
        return hashlib.blake2b(self.data, digest_size=8).hexdigest()

    def plain(self) -> dict[str, Any]:
        data = base64.b64encode(self.data).decode()
        return {"data": data, "width": self.width, "height": self.height, "hash": f"{self.hash:016x}"}

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> "StoredImage":
        """The inverse of `plain`."""
        data = base64.b64decode(fields["data"], validate=True)
        return cls(data, int(fields["width"]), int(fields["height"]), int(fields["hash"], 16))


def is_stored_image(value: Any) -> bool:
    """Whether a JSON value is what `StoredImage.plain` gives."""
    if not isinstance(value, dict):
        return False
    try:
        image = StoredImage.from_plain(value)
    except (KeyError, TypeError, ValueError, binascii.Error):
        return False
    return image.width > 0 and image.height > 0 and 0 <= image.hash < 2**HASH_BITS


def store_image(data: bytes) -> StoredImage:
    """An image file in the form in which it is kept: a small PNG stays a PNG, photographs become JPEG. Raises
    `ImageFault` for a file that cannot be used.
    """
    width, height = image_size(data)
    pixels = decode(data, most_side=STORED_SIDE)
    return StoredImage(encode(pixels, lossless=data.startswith(_LOSSLESS)), width, height, perceptual_hash(pixels))


def encode(pixels: NDArray[np.uint8], *, lossless: bool) -> bytes:
    """Pixels [H, W, 3] as PNG or JPEG."""
    file = io.BytesIO()
    options: dict[str, Any] = {"format": "PNG"} if lossless else {"format": "JPEG", "quality": _QUALITY}
    pillow().fromarray(pixels).save(file, **options)
    return file.getvalue()


def perceptual_hash(pixels: NDArray[np.uint8]) -> int:
    """64 bits that change little where an image is scaled, compressed again or made lighter: which of the lowest 8 x 8
    frequencies of its 32 x 32 gray values are above their median (pHash, Zauner 2010, section 3.2.1).
    """
    module = pillow()
    small = module.fromarray(pixels).convert("L").resize((_HASH_SIDE, _HASH_SIDE), module.Resampling.LANCZOS)
    frequencies = np.asarray(scipy.fft.dctn(np.asarray(small, dtype=np.float64), norm="ortho"))[:_LOW, :_LOW]
    bits = frequencies > np.median(frequencies)
    return int.from_bytes(np.packbits(bits).tobytes(), "big")
