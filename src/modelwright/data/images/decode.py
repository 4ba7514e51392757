"""Decodes the file of one image to pixels; every fault is an `ImageFault` with a reason to count.

The size is checked in the header, before anything is decompressed. Pixels are upright (EXIF), in 8-bit RGB, with
transparent parts on white, and optionally squares of a model's size. Pillow, of the extra `images`, decodes.

`StoredImage`: the image of a document: checked, upright, of a bounded size, with its hash.

In `Document.meta["image"]`: `data`, base64; `width` and `height` of the original; `hash`, perceptual, hexadecimal.
"""

import base64
import binascii
import hashlib
import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from modelwright.core.config import ConfigError, DataError

if TYPE_CHECKING:
    from PIL import Image

MAX_PIXELS = 50_000_000
"""Maximum pixels of an image: a file of a few kilobytes can need gigabytes of memory (a decompression bomb)."""
EMPTY, VECTOR, NOT_AN_IMAGE, TRUNCATED, DAMAGED, TOO_LARGE = (
    "empty image file", "vector image", "not an image", "truncated image", "damaged image", "too many pixels",
)  # fmt: skip
"""Reasons for which an image is skipped."""
_SVG_STARTS = (b"<svg", b"<?xml", b"<!doctype svg")
_16_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_TO_8_BITS = 257
"""Divisor from 16 to 8 bits: 65535 / 255."""
Fit = Literal["crop", "stretch"]
"""Conversion of an image to a square: its center is cropped, or it is stretched."""


class ImageFault(DataError):
    """An image that cannot be used. reason: one of the constants of this file."""

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason


def pillow() -> Any:
    """Imports `PIL.Image`. Raises `ConfigError` if Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError("images: need the package Pillow: pip install 'modelwright[images]'") from None
    return Image


def decode(data: bytes, *, most_side: int = 0, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8]:
    """Decodes an image file to pixels [H, W, 3]. most_side: maximum length of the shorter side, to which larger images
    are reduced, which is fast for JPEG; 0 keeps the size. Raises `ImageFault`.
    """
    with _opened(data, max_pixels) as image:
        module = pillow()
        from PIL import ImageOps

        # JPEG decodes at 1/2, 1/4 or 1/8 of its size; twice the side leaves the filter enough pixels.
        if most_side:
            image.draft("RGB", (2 * most_side, 2 * most_side))
        # The image for display: upright, RGB, on white.
        image.load()
        upright = ImageOps.exif_transpose(image)
        if upright.mode in _16_BITS or upright.mode == "I":
            # Pillow clips at 255 where it converts 16 bits by itself.
            values = np.asarray(upright).astype(np.int64).clip(0, 65535) // _TO_8_BITS
            upright = module.fromarray(values.astype(np.uint8))
            del values  # eight bytes a pixel
        elif upright.mode == "F":
            upright = module.fromarray(np.nan_to_num(np.asarray(upright)).clip(0, 255).astype(np.uint8))
        if upright.has_transparency_data:
            upright = upright.convert("RGBA")
            upright = module.alpha_composite(module.new("RGBA", upright.size, "white"), upright)
        upright = upright.convert("RGB")
        shorter = min(upright.size)
        if most_side and shorter > most_side:
            # An extreme ratio must not round a side to 0.
            scale = [max(1, round(side * most_side / shorter)) for side in upright.size]
            upright = upright.resize((scale[0], scale[1]), module.Resampling.BICUBIC, reducing_gap=2.0)
        return np.asarray(upright, dtype=np.uint8)


def image_size(data: bytes, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Returns width and height of the upright image, from its header. Raises `ImageFault`."""
    with _opened(data, max_pixels) as image:
        width, height = image.size
        is_turned = image.getexif().get(_ORIENTATION, 1) in _TURNED
        return (height, width) if is_turned else (width, height)


_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)
"""EXIF tag, and its values for images that are turned by a quarter for display."""


@contextmanager
def _opened(data: bytes, max_pixels: int) -> Iterator["Image.Image"]:
    """Opens an image and reads its header. All errors of Pillow in the block become an `ImageFault`."""
    if not data:
        raise ImageFault(EMPTY, "is empty")
    # SVG is text, perhaps after a byte order mark.
    start = data[:256].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith(_SVG_STARTS):
        raise ImageFault(VECTOR, "is a vector image (SVG), which has no pixels; convert it to PNG")
    module = pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about metadata, and Pillow's own limit, which is higher than this one
            with module.open(io.BytesIO(data)) as image:
                width, height = image.size
                if width * height > max_pixels:
                    raise ImageFault(TOO_LARGE, f"has {width} x {height} pixels, limit {max_pixels:,}")
                yield image
    except ImageFault:
        raise
    except module.UnidentifiedImageError:
        raise ImageFault(NOT_AN_IMAGE, "is of no known image format") from None
    except module.DecompressionBombError as error:
        raise ImageFault(TOO_LARGE, f"has too many pixels ({error})") from None
    except (OSError, EOFError) as error:
        # Pillow writes "image file is truncated" where pixels end and "Truncated File Read" where a header does. For
        # WebP it says neither, but the container states its length.
        is_cut = "truncated" in str(error).lower() or isinstance(error, EOFError)
        is_cut |= data[:4] == b"RIFF" and 8 + int.from_bytes(data[4:8], "little") > len(data)
        raise ImageFault(TRUNCATED if is_cut else DAMAGED, f"cannot be decoded ({error})") from None
    except (ValueError, SyntaxError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        # Pillow's readers raise whatever a damaged header leads to.
        raise ImageFault(DAMAGED, f"cannot be decoded ({type(error).__name__}: {error})") from None


def square_pixels(data: bytes, *, size: int, fit: Fit) -> NDArray[np.uint8]:
    """Decodes an image file to a square [3, size, size]. Raises `ImageFault`."""
    return squared(decode(data), size=size, fit=fit)


def squared(pixels: NDArray[np.uint8], *, size: int, fit: Fit) -> NDArray[np.uint8]:
    """Converts pixels [H, W, 3] to a square [3, size, size]."""
    image = pillow().fromarray(pixels)
    box = None
    if fit == "crop":
        side = min(image.size)
        left, top = (image.width - side) / 2, (image.height - side) / 2
        box = (left, top, left + side, top + side)
    square = image.resize((size, size), pillow().Resampling.BICUBIC, box=box)
    return np.ascontiguousarray(np.asarray(square, dtype=np.uint8).transpose(2, 0, 1))


KEY, LABEL_FIELD = "image", "label"
"""Keys of the image and of its class in `Document.meta`."""
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
    import scipy.fft

    frequencies = np.asarray(scipy.fft.dctn(np.asarray(small, dtype=np.float64), norm="ortho"))[:_LOW, :_LOW]
    bits = frequencies > np.median(frequencies)
    return int.from_bytes(np.packbits(bits).tobytes(), "big")
