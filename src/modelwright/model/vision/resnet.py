"""`ResNet`: the residual network for small images of He et al. 2016, section 4.2, from pixels to one vector an image.

Its convolutions between the first and the last layer are products of a decoder's `Linear`, so every number format and
every rounding of training reaches them. The first one stays in the format of the weights, as first layers of quantized
networks do.

Legend: N images, C channels, H rows, W columns, S pixels of a side, O channels of the output, K columns of a patch, D
width.
"""

# PyTorch leaves the types of unflatten and of a module's result open.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelwright.model.decoder import Linear
from modelwright.model.vision.batch_norm import BatchNorm
from modelwright.model.vision.config import ResNetConfig
from modelwright.ops.lowp_emulation import convolution
from modelwright.ops.lowp_linear import plain_cast

NUM_COLORS = 3


class Convolution(nn.Module):
    """A convolution as the product of patches with a `Linear`; it has a bias once its batch norm is folded into it."""

    def __init__(self, num_inputs: int, num_outputs: int, *, size: int, stride: int) -> None:
        super().__init__()
        self.size, self.stride, self.padding = size, stride, size // 2
        self.kernel = Linear(num_inputs * size * size, num_outputs)
        nn.init.kaiming_normal_(self.kernel.weight, mode="fan_in", nonlinearity="relu")

    def forward(self, x_NCHW: Tensor) -> Tensor:
        # In the format of the weights, or one that they are only cast to, PyTorch's convolution computes the same
        # without copying patches; another class of kernel, such as one with integer weights, multiplies patches itself
        if type(self.kernel) is not Linear:
            return self.by_patches(x_NCHW)
        weight_OI, product = self.kernel.own_weight(), self.kernel.product
        cast = x_NCHW.dtype if product is F.linear else plain_cast(product)
        if cast is None:
            return self.by_patches(x_NCHW)
        weight_OCkk = weight_OI.to(cast).unflatten(1, (-1, self.size, self.size))
        bias_O = self.kernel.bias if self.kernel.has_bias else None
        return convolution(x_NCHW.to(cast), weight_OCkk, bias_O, stride=self.stride, padding=self.padding)

    def by_patches(self, x_NCHW: Tensor) -> Tensor:
        """Returns the convolution as a product of patches, in the kernel's own number format."""
        side = (x_NCHW.shape[-1] + 2 * self.padding - self.size) // self.stride + 1
        patches_NKL = F.unfold(x_NCHW, self.size, padding=self.padding, stride=self.stride)
        out_NLO = self.kernel(patches_NKL.transpose(1, 2))
        return out_NLO.transpose(1, 2).unflatten(2, (-1, side))


class ResidualBlock(nn.Module):
    """Two convolutions with batch norms, added to the input; a projection takes the input to another shape."""

    NORMS: ClassVar[dict[str, str]] = {"conv1": "norm1", "conv2": "norm2", "shortcut": "shortcut_norm"}
    """The norm after each convolution."""

    def __init__(self, num_inputs: int, num_outputs: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = Convolution(num_inputs, num_outputs, size=3, stride=stride)
        self.norm1 = BatchNorm(num_outputs)
        self.conv2 = Convolution(num_outputs, num_outputs, size=3, stride=1)
        self.norm2 = BatchNorm(num_outputs)
        is_same = num_inputs == num_outputs and stride == 1
        self.shortcut = None if is_same else Convolution(num_inputs, num_outputs, size=1, stride=stride)
        self.shortcut_norm = None if is_same else BatchNorm(num_outputs)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        out_NCHW = F.relu(self.norm1(self.conv1(x_NCHW)))
        out_NCHW = self.norm2(self.conv2(out_NCHW))
        if self.shortcut is not None and self.shortcut_norm is not None:
            x_NCHW = self.shortcut_norm(self.shortcut(x_NCHW))
        return F.relu(x_NCHW + out_NCHW)


class ResNet(nn.Module):
    """A first convolution, stages of residual blocks that halve the image, and the mean over the remaining pixels."""

    NORMS: ClassVar[dict[str, str]] = {"stem": "norm"}
    """The norm after the first convolution."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        widths = config.widths
        self.stem = nn.Conv2d(NUM_COLORS, widths[0], kernel_size=3, padding=1, bias=False)
        nn.init.kaiming_normal_(self.stem.weight, mode="fan_in", nonlinearity="relu")
        self.norm = BatchNorm(widths[0])
        blocks: list[nn.Module] = []
        for stage, width in enumerate(widths):
            for block in range(config.blocks_per_stage):
                stride = 2 if stage and not block else 1
                blocks.append(ResidualBlock(widths[max(0, stage - (not block))], width, stride=stride))
        self.blocks = nn.Sequential(*blocks)

    def forward(self, pixels_NCSS: Tensor) -> Tensor:
        """Vectors of images [N, D]. pixels_NCSS: [N, 3, S, S], normalized."""
        pixels_NCSS = pixels_NCSS.contiguous(memory_format=torch.channels_last)  # in which convolutions are fastest
        out_NCHW = self.blocks(F.relu(self.norm(self.stem(pixels_NCSS))))
        return out_NCHW.to(pixels_NCSS.dtype).mean((2, 3))


def normed_convolutions(module: nn.Module) -> dict[str, str]:
    """Names of all convolutions of a module that a batch norm follows, and of these norms."""
    found: dict[str, str] = {}
    for name, one in module.named_modules():
        if isinstance(one, ResNet | ResidualBlock):
            place = f"{name}." if name else ""
            norms = {own: norm for own, norm in one.NORMS.items() if isinstance(getattr(one, norm), BatchNorm)}
            found |= {f"{place}{own}": f"{place}{norm}" for own, norm in norms.items()}
    return found
