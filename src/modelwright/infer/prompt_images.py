"""Images in prompts: where their tokens stand, and what takes the place of the tokens' embeddings.

An image is encoded alone and once, when a chunk of its prompt needs it: its bits depend on no other request, and an
image whose keys and values are in the cache is not encoded at all.

Legend: C colors, S pixels of a side, P patches, D model width.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelwright.core.errors import ConfigError
from modelwright.model.decoder import Decoder
from modelwright.model.vision.image_prefix import ImagePrefix, image_prefix

Pixels = NDArray[np.uint8]
"""An image as a square of the size that the model reads, [C, S, S]."""


@dataclass(eq=False)
class PromptImage:
    """An image whose tokens are those from `start` to `end` of a prompt. digest: of its pixels; embeddings_PD: None
    until they are needed.
    """

    start: int
    end: int
    pixels_CSS: Tensor
    digest: bytes
    embeddings_PD: Tensor | None = None

    def embeddings(self, prefix: ImagePrefix) -> Tensor:
        """What takes the place of the embeddings of its tokens, [P, D]."""
        found = self.embeddings_PD
        if found is None:
            found = self.embeddings_PD = torch.as_tensor(prefix(self.pixels_CSS[None])[0])
        return found

    def has_tokens_in(self, start: int, end: int) -> bool:
        return self.start < end and start < self.end


def prompt_images(model: Decoder, prompt_ids: Sequence[int], images: Sequence[Pixels]) -> tuple[PromptImage, ...]:
    """The images of a prompt, in the order of their tokens. Raises `ConfigError` if they do not fit the model or the
    image tokens of the prompt.
    """
    prefix = image_prefix(model)
    if prefix is None:
        if images:
            raise ConfigError("images: this model reads text only; leave them out")
        return ()
    tokens, size = prefix.tokens, prefix.tower.config.image_size
    starts = tokens.starts(prompt_ids)
    if len(starts) != len(images):
        raise ConfigError(f"images: the prompt has image tokens for {len(starts)} images, and {len(images)} were given")
    if any(image.shape != (3, size, size) for image in images):
        raise ConfigError(f"images: each must have 3 colors of {size} x {size} pixels")
    device = model.norm.weight.device
    return tuple(
        PromptImage(
            start,
            start + tokens.num_patches,
            torch.from_numpy(np.ascontiguousarray(image)).to(device),
            hashlib.sha256(image.tobytes()).digest(),
        )
        for start, image in zip(starts, images, strict=True)
    )
