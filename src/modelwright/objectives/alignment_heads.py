"""Heads of a decoder that map texts, code and images to one space.

Legend: N images or pieces, D width of the decoder, E width of the space, S pixels of a side.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from modelwright.model.vision.config import VisionConfig
from modelwright.model.vision.folders import load_vision_tower
from modelwright.model.vision.vit import VisionTower

TEXT, CODE, IMAGE, SCALE = "text", "code", "image", "scale"
"""Names in `Decoder.heads`."""
MAX_SCALE = 100.0
"""Largest scale of cosines; a larger one makes training unstable (Radford et al. 2021, section 2.5)."""


class Projection(nn.Module):
    """A linear map without bias that computes in the format of its weight."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_outputs, num_inputs) / math.sqrt(num_inputs))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.to(self.weight.dtype), self.weight)


class ImageEncoder(nn.Module):
    """A vision tower with its projection."""

    def __init__(self, tower: VisionTower, embed_dim: int) -> None:
        super().__init__()
        self.tower = tower
        self.projection = Projection(tower.config.model_dim, embed_dim)

    def forward(self, pixels_NCSS: Tensor) -> Tensor:
        """Maps images to vectors [N, E]."""
        return self.projection(self.tower(pixels_NCSS))


class LearnedScale(nn.Module):
    """Factor of cosines, at most `MAX_SCALE`, and the bias that is added."""

    def __init__(self, temperature: float, bias: float) -> None:
        super().__init__()
        # One dimension each, because FSDP cannot shard scalars
        self.log_scale = nn.Parameter(torch.tensor([-math.log(temperature)]))
        self.bias = nn.Parameter(torch.tensor([bias]))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the scale and the bias, [2]; x is ignored, since heads are called with an input."""
        return torch.cat([_Cap.apply(self.log_scale, math.log(MAX_SCALE)).exp(), self.bias])  # type: ignore[union-attr]


class _Cap(torch.autograd.Function):
    """min(x, most), with the gradient of values beyond the limit that descent would lower."""

    @staticmethod
    def forward(ctx, x, most):
        ctx.save_for_backward(x > most)
        return x.clamp(max=most)

    @staticmethod
    def backward(ctx, grad):
        # With `clamp`, a value that an update has moved past the limit would stay there forever
        (is_beyond,) = ctx.saved_tensors
        return torch.where(is_beyond, grad.clamp(min=0.0), grad), None


def alignment_heads(
    vision: VisionConfig, *, model_dim: int, embed_dim: int, temperature: float, bias: float
) -> Mapping[str, nn.Module]:
    """Returns the heads by name. Raises `ModelError` if the folder of the vision tower cannot be read."""
    # Initial values come from PyTorch's default generator, in this order, unless the tower has a folder
    tower = load_vision_tower(Path(vision.init_from)) if vision.init_from else VisionTower(vision)
    return {
        TEXT: Projection(model_dim, embed_dim),
        CODE: Projection(model_dim, embed_dim),
        IMAGE: ImageEncoder(tower, embed_dim),
        SCALE: LearnedScale(temperature, bias),
    }
