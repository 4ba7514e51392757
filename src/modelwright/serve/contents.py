"""What a message says: its text, and the images in it.

Images come in the request itself, as `data:` URLs; an address is never fetched. They are read (`images.py`) when the
model is known that answers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from modelwright.data.tokenizer.chat import IMAGE_MARK

SHOWN_CHARACTERS = 80
"""What a message repeats of a client's own words at most."""


@dataclass(frozen=True)
class ImagePart:
    """An image in a message. number: of the part, from 0; data: base64."""

    number: int
    data: str


@dataclass(frozen=True)
class Said:
    """The content of a message. marked: its text with a mark where each image stands."""

    marked: str
    images: tuple[ImagePart, ...] = ()

    @property
    def text(self) -> str:
        """Without images."""
        return self.marked.replace(IMAGE_MARK, "").strip("\n") if self.images else self.marked


def read_content(content: Any) -> Said | None:
    """The content of a message; parts are joined by line breaks."""
    if content is None:
        return None
    if isinstance(content, str):
        return Said(_unmarked(content))
    if not isinstance(content, list):
        raise ValueError("must be a text or a list of parts")
    images: list[ImagePart] = []
    texts: list[str] = []
    for number, part in enumerate(cast(list[Any], content)):
        kind = cast(Mapping[str, Any], part).get("type") if isinstance(part, dict) else None
        if kind == "image_url":
            images.append(ImagePart(number, _data_of(part, number)))
            texts.append(IMAGE_MARK)
        else:
            texts.append(_unmarked(_part_text(part)))
    return Said("\n".join(texts), tuple(images))


def short(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def _unmarked(text: str) -> str:
    """Unicode keeps the mark out of texts."""
    return text.replace(IMAGE_MARK, "") if IMAGE_MARK in text else text


def _part_text(part: Any) -> str:
    kind = cast(Mapping[str, Any], part).get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise ValueError(f"parts of type {short(kind)!r} are not supported by this server, which reads text and images")
    if kind != "text" or set(part) != {"type", "text"} or not isinstance(part["text"], str):
        raise ValueError('each part must be {"type": "text", "text": "..."}')
    return part["text"]


def _data_of(part: Mapping[str, Any], number: int) -> str:
    """The base64 text of an image part."""
    image = part.get("image_url")
    url = cast(Mapping[str, Any], image).get("url") if isinstance(image, dict) else None
    if set(part) != {"type", "image_url"} or not isinstance(url, str) or not {"url", "detail"} >= set(cast(Any, image)):
        raise ValueError(
            f'part {number}: an image must be {{"type": "image_url", "image_url": {{"url": "data:image/..."}}}}'
        )
    head, comma, data = url.partition(",")
    if not head.lower().startswith("data:"):
        raise ValueError(
            f"part {number}: this server fetches nothing, so {short(url)!r} is not read; send the image itself as "
            "data:image/png;base64,..."
        )
    if not comma or not head.lower().endswith(";base64"):
        raise ValueError(f"part {number}: a data: URL must have its image in base64: data:image/png;base64,...")
    return data


CONTENT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "anyOf": [
                    {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                        "additionalProperties": False,
                    },
                    {
                        "type": "object",
                        "properties": {
                            "type": {"const": "image_url"},
                            "image_url": {
                                "type": "object",
                                "properties": {
                                    "url": {"type": "string", "pattern": "^data:[^,]*;base64,"},
                                    "detail": {"enum": ["auto", "low", "high"]},
                                },
                                "required": ["url"],
                                "additionalProperties": False,
                            },
                        },
                        "required": ["type", "image_url"],
                        "additionalProperties": False,
                    },
                ]
            },
        },
        {"type": "null"},
    ]
}
