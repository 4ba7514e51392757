"""Images of a chat request to the pixels that the model reads. Called in another thread: decoding takes time."""

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING

from modelwright.data.images.decode import ImageFault, decode
from modelwright.data.images.squares import squared
from modelwright.data.images.stored import STORED_SIDE
from modelwright.infer.sequence import Pixels
from modelwright.serve.config import PromptImagesConfig
from modelwright.serve.errors import ApiError

if TYPE_CHECKING:
    from modelwright.serve.engines.client import EngineInfo
    from modelwright.serve.protocol import Message


def read_images(messages: Sequence["Message"], info: "EngineInfo", config: PromptImagesConfig) -> list[Pixels]:
    """The images of a conversation, in order. Raises `ApiError` 400 that names the part: for a model that reads text
    only, for too many images, and for files that are too large or cannot be decoded.
    """
    pixels: list[Pixels] = []
    for number, message in enumerate(messages):
        for part in message.content.images if message.content else ():
            where = f"messages.{number}.content.{part.number}"
            if not info.reads_images:
                raise _refusal(where, "this model reads no images; remove the part", code="unsupported_image")
            if len(pixels) == config.max_count:
                raise _refusal(where, f"one request may have at most {config.max_count} images; remove the others")
            pixels.append(_pixels(part.data, where, info, config))
    return pixels


def _pixels(data: str, where: str, info: "EngineInfo", config: PromptImagesConfig) -> Pixels:
    if len(data) * 3 // 4 > config.max_bytes + 2:
        raise _refusal(where, f"the image has more than {config.max_bytes:,} bytes; make it smaller")
    try:
        file = base64.b64decode(data, validate=True)
    except ValueError:  # binascii.Error, or the plain one for characters beyond ASCII
        raise _refusal(where, "the data: URL is not valid base64") from None
    try:
        pixels = decode(file, most_side=max(STORED_SIDE, info.image_size), max_pixels=config.max_pixels)
    except ImageFault as fault:
        raise _refusal(where, f"the image {fault}") from None
    return squared(pixels, size=info.image_size, fit="crop" if info.crops_images else "stretch")


def _refusal(where: str, reason: str, *, code: str = "invalid_image") -> ApiError:
    return ApiError(400, f"Invalid value for {where!r}: {reason}.", param="messages", code=code)
