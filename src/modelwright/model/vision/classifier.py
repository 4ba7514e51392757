"""`ImageClassifier`: a ResNet or a vision transformer with a linear layer over the classes.

Legend: N images, S pixels of a side, D width, K classes.
"""

# PyTorch leaves the types of iterated modules open.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import torch
from torch import Tensor, nn

from modelwright.model.decoder import Linear
from modelwright.model.vision.config import ResNetConfig, VisionConfig
from modelwright.model.vision.resnet import ResNet
from modelwright.model.vision.vit import VisionTower

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
            for block in self.tower.blocks:
                use_projections(block)
        self.head = nn.Linear(width, num_classes)
        nn.init.normal_(self.head.weight, std=width**-0.5)
        nn.init.zeros_(self.head.bias)
        self.shape, self.num_classes = shape, num_classes

    def forward(self, pixels_NCSS: Tensor) -> Tensor:
        """Logits [N, K]. pixels_NCSS: normalized."""
        return self.head(self.tower(pixels_NCSS.to(self.head.weight.dtype)))


def use_projections(module: nn.Module) -> None:
    """Replace linear layers, in place, by `Linear`, which multiplies in training's number format; names stay."""
    for name, layer in list(module.named_modules()):
        if type(layer) is nn.Linear:
            place, _, own = name.rpartition(".")
            projection = Linear(layer.in_features, layer.out_features, bias=True)
            projection.weight, projection.bias = layer.weight, layer.bias
            setattr(module.get_submodule(place), own, projection)


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
