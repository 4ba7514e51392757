"""Images in the prompt of a decoder: `ImagePrefix` computes an embedding for each patch, which replaces one image token
(Liu et al. 2023, "Visual Instruction Tuning"; the projector is that of LLaVA 1.5).

Legend: B rows, T tokens, N images, I images of a row at most, P patches, C colors, S pixels of a side, D width of the
decoder.
"""

# PyTorch leaves the types of a module's result open.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modelwright.core.errors import ConfigError
from modelwright.model.decoder import Decoder, Insert
from modelwright.model.vision.vit import VisionTower

IMAGES = "images"
"""The name in `Decoder.heads`."""
PIXELS = "prompt_images_BICSS"
"""Name of the batch extra with the images: uint8, for each row in the order of their tokens."""


class ImageProjector(nn.Module):
    """Two layers with a GELU, from a tower's width to a decoder's (LLaVA 1.5, Liu et al. 2024, section 3.2)."""

    def __init__(self, num_inputs: int, model_dim: int) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(num_inputs, model_dim), nn.Linear(model_dim, model_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(nn.functional.gelu(self.linear_1(x.to(self.linear_1.weight.dtype))))


@dataclass(frozen=True)
class ImageTokens:
    """Tokens of images in prompts. token_id: the image token; num_patches: image tokens of one image."""

    token_id: int
    num_patches: int

    def starts(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the positions at which the images of a prompt start. Raises `ConfigError` if an image is cut off."""
        places = [place for place, token in enumerate(token_ids) if token == self.token_id]
        starts = places[:: self.num_patches]
        for number, start in enumerate(starts):
            own = places[number * self.num_patches : (number + 1) * self.num_patches]
            if own != list(range(start, start + self.num_patches)):
                raise ConfigError(
                    f"prompt: the image tokens at {start} are not {self.num_patches} in a row, which one image has"
                )
        return starts


class ImagePrefix(nn.Module):
    """A vision tower with its projector, which reads block `feature_layer`; as in `transformers`, -1 is the last."""

    def __init__(self, tower: VisionTower, model_dim: int, *, feature_layer: int, token_id: int) -> None:
        super().__init__()
        config = tower.config
        if not -config.num_layers <= feature_layer <= -1:
            raise ConfigError(
                f"feature_layer: must be between -{config.num_layers} and -1 for a tower of {config.num_layers} blocks,"
                f" got {feature_layer}"
            )
        self.tower = tower
        self.projector = ImageProjector(config.model_dim, model_dim)
        self.feature_layer = feature_layer
        self.num_blocks = config.num_layers + 1 + feature_layer
        """Number of the tower's blocks that run."""
        self.tokens = ImageTokens(token_id, config.num_patches)

    def forward(self, pixels_NCSS: Tensor) -> Tensor:
        """Embeddings of patches [N, P, D]. pixels_NCSS: see `VisionTower.forward`."""
        return self.projector(self.tower.patch_states(pixels_NCSS, num_blocks=self.num_blocks))

    def freeze(self, *, whole_tower: bool) -> None:
        """Freeze the tower, or only those of its parts that do not reach the projector."""
        # Parts behind the projector's layer would never get a gradient
        tower = self.tower
        unused = [*tower.blocks[self.num_blocks :], tower.norm_out, *([tower.pool] if tower.pool else [])]
        for module in [tower] if whole_tower else unused:
            module.requires_grad_(False)


def image_prefix(model: Decoder) -> ImagePrefix | None:
    """Returns the vision part of a model, None for a model without."""
    prefix = dict(model.heads.items()).get(IMAGES)
    assert prefix is None or isinstance(prefix, ImagePrefix)
    return prefix


def inserted_images(model: Decoder, tokens_BT: Tensor, extras: Mapping[str, Tensor]) -> Insert | None:
    """Returns a function that puts a batch's images in place of their tokens [B, T], in order; None without images."""
    prefix, pixels_BICSS = image_prefix(model), extras.get(PIXELS)
    if prefix is None or pixels_BICSS is None:
        return None
    is_image_BT = tokens_BT == prefix.tokens.token_id
    counts_B1 = is_image_BT.sum(dim=1, keepdim=True) // prefix.tokens.num_patches
    is_there_BI = torch.arange(pixels_BICSS.shape[1], device=tokens_BT.device) < counts_B1
    # One blank image more: every rank and every microbatch has a gradient of the tower, whatever images it got.
    pixels_NCSS = torch.cat([pixels_BICSS[is_there_BI], torch.zeros_like(pixels_BICSS[:1, 0])])

    def insert(hidden_BTD: Tensor) -> Tensor:
        # The blank image is cut off after the tower, so that its gradient is zero
        embeddings_MD = prefix(pixels_NCSS)[:-1].flatten(0, 1)
        return replaced(hidden_BTD, is_image_BT.flatten().nonzero()[:, 0], embeddings_MD)

    return insert


def replaced(hidden_BTD: Tensor, places_M: Tensor, embeddings_MD: Tensor) -> Tensor:
    """Returns the embeddings with those at some positions, counted over all rows, replaced."""
    flat_ND = hidden_BTD.flatten(0, 1).index_copy(0, places_M, embeddings_MD.to(hidden_BTD.dtype))
    return flat_ND.view_as(hidden_BTD)
