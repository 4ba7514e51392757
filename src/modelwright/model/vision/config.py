"""Shapes of vision transformers and residual networks, and the preparation of their pixels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from modelwright.core.config import ConfigError, constant

TowerActivation = Literal["quick_gelu", "gelu", "gelu_tanh"]
"""`quick_gelu` is x * sigmoid(1.702 x), as in OpenAI's CLIP."""
Pooling = Literal["class_token", "attention"]
Fit = Literal["crop", "stretch"]

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""The means and standard deviations of the colors that OpenAI's CLIP was trained on, in [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Shape of a vision transformer (Dosovitskiy et al. 2021) of the kind that CLIP and SigLIP have."""

    init_from: str = ""
    """Folder of a CLIP or SigLIP model to start from, with its shape; "" for random weights of the shape below."""
    image_size: int = 32
    """Pixels of a side."""
    patch_size: int = 4
    """Pixels of the side of a patch; a divisor of `image_size`."""
    num_layers: int = 4
    """Transformer blocks."""
    model_dim: int = 128
    """Width of the residual stream."""
    num_heads: int = 4
    """Attention heads; a divisor of `model_dim`."""
    ffn_dim: int = 512
    """Width of the feed-forward layer."""
    pooling: Pooling = constant("class_token")
    """Pooled output of an image: that of a `class_token`, with norms before and after the blocks (CLIP, Radford et al.
    2021), or `attention` over all patches by a learned query (SigLIP, Zhai et al. 2023)."""
    activation: TowerActivation = constant("gelu")
    """Activation of the feed-forward layers."""
    norm_eps: float = constant(1e-5)
    """Epsilon of the layer norms."""
    embedding_std: float = constant(0.02)
    """Standard deviation of initial positions, of the class token and of the query that pools."""
    fit: Fit = constant("crop")
    """Conversion of an image to a square: `crop` takes its center, `stretch` all of it."""
    pixel_mean: tuple[float, float, float] = constant((0.5, 0.5, 0.5))
    """Mean that is subtracted from colors in [0, 1]."""
    pixel_std: tuple[float, float, float] = constant((0.5, 0.5, 0.5))
    """Standard deviation that the differences are divided by."""

    def __post_init__(self) -> None:
        for name in ("image_size", "patch_size", "num_layers", "model_dim", "num_heads", "ffn_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, got {getattr(self, name)}")
        if self.image_size % self.patch_size:
            raise ConfigError(f"patch_size: {self.patch_size} must divide image_size ({self.image_size})")
        if self.model_dim % self.num_heads:
            raise ConfigError(f"num_heads: {self.num_heads} must divide model_dim ({self.model_dim})")
        if not all(std > 0 for std in self.pixel_std):
            raise ConfigError(f"pixel_std: must be above 0, got {list(self.pixel_std)}")

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the blocks: patches, and the class token if the tower has one."""
        return self.num_patches + (self.pooling == "class_token")


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """Shape of a residual network for small images (He et al. 2016, section 4.2)."""

    image_size: int = 32
    """Pixels of a side."""
    widths: tuple[int, ...] = (16, 32, 64)
    """Channels of each stage; every stage after the first halves the sides of the image."""
    blocks_per_stage: int = constant(1)
    """Residual blocks of each stage."""

    def __post_init__(self) -> None:
        if self.image_size < 1 or self.blocks_per_stage < 1:
            raise ConfigError(
                f"image_size, blocks_per_stage: must be at least 1, got {self.image_size} and {self.blocks_per_stage}"
            )
        if not self.widths or min(self.widths) < 1:
            raise ConfigError(f"widths: must be one number of channels for each stage, got {list(self.widths)}")
        if self.image_size % 2 ** (len(self.widths) - 1):
            raise ConfigError(
                f"image_size: {self.image_size} cannot be halved {len(self.widths) - 1} times, once for each stage "
                f"after the first; choose a multiple of {2 ** (len(self.widths) - 1)}"
            )


def three(values: Sequence[float]) -> tuple[float, float, float]:
    """Converts a sequence to a number for each color. Raises `ValueError` for another length."""
    red, green, blue = map(float, values)
    return red, green, blue
