"""Image classifiers whose convolutions and projections are integers on a trained or chosen grid, batch norms folded
into them. The first layer and the head keep their format.
"""

import copy

from torch import nn

from modelwright.compress.fold import fold_batch_norms
from modelwright.compress.grid_linear import GridLinear
from modelwright.compress.grid_model import TrainedGrid
from modelwright.model.decoder import Linear
from modelwright.model.vision.classifier import ImageClassifier


def quantize_classifier(model: ImageClassifier, grid: TrainedGrid) -> ImageClassifier:
    """A new classifier for inference; `model` is not changed. grid: its ranges are by the names of the layers within
    the classifier.
    """
    result = copy.deepcopy(model).eval()
    fold_batch_norms(result)
    for name, one in list(result.named_modules()):
        if isinstance(one, Linear):
            layer = GridLinear(grid.codes(name, one.weight), grid.weights, grid.inputs(name))
            layer.bias = nn.Parameter(one.bias.detach(), requires_grad=False) if one.has_bias else None
            parent, _, leaf = name.rpartition(".")
            setattr(result.get_submodule(parent), leaf, layer)
    return result.requires_grad_(False)
