"""Small pictures of images for the report."""

import base64
import io

from modelwright.data.images.decode import decode, pillow

SIDE = 64
"""Most pixels of a side."""


def thumbnail(data: bytes) -> str:
    """An image file as a small PNG in a `data:` URL."""
    image, file = pillow().fromarray(decode(data)), io.BytesIO()
    image.thumbnail((SIDE, SIDE))
    image.save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
