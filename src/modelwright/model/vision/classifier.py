"""`ImageClassifier`: a vision transformer, or the residual network for small images of He et al. 2016, section 4.2,
with a linear layer over the classes.

The ResNet's convolutions between the first and the last layer are products of a decoder's `Linear`, so every number
format and every rounding of training reaches them. The first one stays in the format of the weights, as first layers of
quantized networks do.

Legend: N images, C channels, H rows, W columns, S pixels of a side, O channels of the output, L places of a patch, D
width, K classes, R ranks.
"""

# PyTorch leaves the types of split, unflatten, of iterated modules and of a module's result open.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelwright.model.decoder import Linear
from modelwright.model.vision.config import ResNetConfig, VisionConfig
from modelwright.model.vision.vit import VisionTower
from modelwright.ops.lowp_linear import plain_cast
from modelwright.ops.matmul import convolution

Shape = ResNetConfig | VisionConfig
"""Shape of an image classifier; its type selects the tower."""


class ImageClassifier(nn.Module):
    """Logits of images. The first layer and the last one compute in the format of the weights."""

    def __init__(self, shape: Shape, num_classes: int) -> None:
        super().__init__()
        if isinstance(shape, ResNetConfig):
            self.tower: nn.Module = ResNet(shape)
            width = shape.widths[-1]
        else:
            self.tower, width = VisionTower(shape), shape.model_dim
            # Only the blocks: patch embedding and head compute in the format of the weights
            for name, layer in list(self.tower.blocks.named_modules()):
                if type(layer) is nn.Linear:
                    # `Linear` multiplies in training's number format; names stay
                    place, _, own = name.rpartition(".")
                    projection = Linear(layer.in_features, layer.out_features, bias=True)
                    projection.weight, projection.bias = layer.weight, layer.bias
                    setattr(self.tower.blocks.get_submodule(place), own, projection)
        self.head = nn.Linear(width, num_classes)
        nn.init.normal_(self.head.weight, std=width**-0.5)
        nn.init.zeros_(self.head.bias)
        self.shape, self.num_classes = shape, num_classes

    def forward(self, pixels_NCSS: Tensor) -> Tensor:
        """Logits [N, K]. pixels_NCSS: normalized."""
        return self.head(self.tower(pixels_NCSS.to(self.head.weight.dtype)))


def has_batch_norm(shape: Shape) -> bool:
    """Returns whether a classifier of this shape computes statistics over the images of a batch."""
    return isinstance(shape, ResNetConfig)


def forward_flops(shape: Shape, num_classes: int) -> int:
    """FLOPs of one image forward, counted by PyTorch on tensors without values."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        model = ImageClassifier(shape, num_classes).eval()
        pixels = torch.zeros(1, 3, shape.image_size, shape.image_size)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(pixels)
    return counter.get_total_flops()


Gather = Callable[[Tensor], Tensor]
"""`(own [E]) -> vectors of all ranks [R, E]`, with gradients."""


def alone(own_E: Tensor) -> Tensor:
    """`Gather` of one process."""
    return own_E[None]


class BatchNorm(nn.Module):
    """Normalizes each channel over images and pixels; in evaluation by running statistics.

    The running statistics are buffers: equal on all ranks, part of checkpoints, and unchanged by a batch whose moments
    are not finite, because the update of such a batch is skipped (an overflow in FP16). momentum: the share of a batch
    in them; as in PyTorch they use the unbiased variance.
    """

    def __init__(self, num_channels: int, *, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight, self.bias = nn.Parameter(torch.ones(num_channels)), nn.Parameter(torch.zeros(num_channels))
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("running_mean", torch.zeros(num_channels))
        self.register_buffer("running_var", torch.ones(num_channels))
        self.gather: Gather = alone

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Normalizes x, in its format. N may be 0 on some ranks."""
        wide_NCHW = x_NCHW.to(torch.promote_types(x_NCHW.dtype, torch.float32))
        if not self.training:
            mean_C, var_C = self.running_mean, self.running_var
            out_NCHW = F.batch_norm(wide_NCHW, mean_C, var_C, self.weight, self.bias, training=False, eps=self.eps)
            return out_NCHW.to(x_NCHW.dtype)
        if self.gather is alone and wide_NCHW.numel() > len(self.weight):
            # One process: PyTorch's own operator reads and writes x in its format and sums in FP32 at least, where the
            # operators below keep several wide copies. It refuses a single value for each channel. With a momentum of
            # 1 it leaves the batch's own statistics in these two tensors.
            mean_C, var_C = torch.zeros_like(self.running_mean), torch.ones_like(self.running_var)
            out_NCHW = F.batch_norm(
                x_NCHW, mean_C, var_C, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps
            )  # fmt: skip
            self._track(mean_C, var_C)
            return out_NCHW
        # Counts, means and sums of squared deviations of all ranks, merged by the formula of Chan et al. 1983, which,
        # unlike the mean of squares minus the square of the mean, does not cancel
        num_channels, num_values = len(self.weight), wide_NCHW.numel() // len(self.weight)
        own_mean_C = wide_NCHW.sum((0, 2, 3)) / max(1, num_values)
        own_squares_C = (wide_NCHW - own_mean_C[:, None, None]).square().sum((0, 2, 3))
        own_E = torch.cat([own_mean_C.new_full((1,), num_values), own_mean_C, own_squares_C])
        counts_R1, means_RC, squares_RC = self.gather(own_E).split([1, num_channels, num_channels], dim=1)
        count = counts_R1.sum().clamp(min=1)
        mean_C = (counts_R1 * means_RC).sum(0) / count
        squares_C = (squares_RC + counts_R1 * (means_RC - mean_C).square()).sum(0)
        # Unbiased for the running statistics, biased for the norm, as in PyTorch
        self._track(mean_C.detach(), squares_C.detach() / (count - 1).clamp(min=1))
        scale_C = self.weight * (squares_C / count + self.eps).rsqrt()
        centered_NCHW = wide_NCHW - mean_C[:, None, None]
        return (centered_NCHW * scale_C[:, None, None] + self.bias[:, None, None]).to(x_NCHW.dtype)

    @torch.no_grad()
    def _track(self, mean_C: Tensor, var_C: Tensor) -> None:
        # Selected on the device: an `if` would wait for an accelerator in every layer
        is_finite = mean_C.isfinite().all() & var_C.isfinite().all()
        for running_C, now_C in ((self.running_mean, mean_C), (self.running_var, var_C)):
            moved_C = torch.lerp(running_C, now_C.to(running_C.dtype), self.momentum)
            running_C.copy_(torch.where(is_finite, moved_C, running_C))


@contextmanager
def statistics_over(module: nn.Module, gather: Gather) -> Generator[None]:
    """Within the block all batch norms of a module use statistics over the ranks that `gather` reaches."""
    norms = [one for one in module.modules() if isinstance(one, BatchNorm)]
    for norm in norms:
        norm.gather = gather
    try:
        yield
    finally:
        for norm in norms:
            norm.gather = alone


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
