"""`TrainedClassifier`: a trained image classifier, which maps image files to probabilities of classes.

Its folder has `classifier.safetensors` with weights and running statistics, and `classifier.json` with the shape and
the names of the classes. A quantized classifier also has its grid, which `compress/int8.py` writes: convolutions
and projections are integers with batch norms folded in, the first layer and the head keep their format.

Legend: N images, K classes, S pixels of a side.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from modelwright.compress.fold import fold_batch_norms
from modelwright.compress.int8 import TrainedGrid
from modelwright.compress.integer_linear import GridLinear
from modelwright.core.artifacts import write_atomic
from modelwright.core.config import dump, parse
from modelwright.core.errors import ConfigError, ModelError
from modelwright.data.images.decode import square_pixels
from modelwright.model.decoder import Linear
from modelwright.model.hf import read_json, read_tensors, save_tensors
from modelwright.model.vision.classifier import ImageClassifier, Shape
from modelwright.model.vision.config import ResNetConfig, VisionConfig
from modelwright.objectives.image_classification import normalized


def quantize_classifier(model: ImageClassifier, grid: TrainedGrid) -> ImageClassifier:
    """Returns a new classifier for inference; `model` is not changed. grid: has ranges by names of layers."""
    result = copy.deepcopy(model).eval()
    # Folded first: the codes are those of the weights with the norms in them
    fold_batch_norms(result)
    for name, one in list(result.named_modules()):
        if isinstance(one, Linear):
            layer = GridLinear(grid.codes(name, one.weight), grid.weights, grid.inputs(name))
            layer.bias = nn.Parameter(one.bias.detach(), requires_grad=False) if one.has_bias else None
            parent, _, leaf = name.rpartition(".")
            setattr(result.get_submodule(parent), leaf, layer)
    return result.requires_grad_(False)


WEIGHTS, SETTINGS = "classifier.safetensors", "classifier.json"
IMAGES_AT_ONCE = 64
_SHAPES: dict[str, type[ResNetConfig] | type[VisionConfig]] = {"resnet": ResNetConfig, "vit": VisionConfig}


@dataclass(frozen=True)
class TrainedClassifier:
    """A classifier with the names of its classes. grid: grid of its integers, None in floating point."""

    model: ImageClassifier
    classes: Sequence[str]
    grid: TrainedGrid | None = None

    def quantized(self, grid: TrainedGrid) -> "TrainedClassifier":
        """Returns a quantized copy, with batch norms folded into the integer weights."""
        return replace(self, model=quantize_classifier(self.model, grid), grid=grid)

    @property
    def fit(self) -> Literal["crop", "stretch"]:
        """Conversion of an image to a square."""
        return self.model.shape.fit if isinstance(self.model.shape, VisionConfig) else "crop"

    def classify(self, files: Sequence[bytes]) -> NDArray[np.float64]:
        """Probabilities of all classes for image files [N, K]. Raises `ImageFault` for one that cannot be used."""
        size = self.model.shape.image_size
        return self.probabilities([square_pixels(one, size=size, fit=self.fit) for one in files])

    @torch.no_grad()
    def probabilities(self, squares: Sequence[NDArray[np.uint8]]) -> NDArray[np.float64]:
        """Probabilities of all classes for images as pixels [3, S, S], [N, K]."""
        self.model.eval()
        device = self.model.head.weight.device
        found = [np.zeros((0, len(self.classes)))]
        for first in range(0, len(squares), IMAGES_AT_ONCE):
            pixels = torch.from_numpy(np.stack(squares[first : first + IMAGES_AT_ONCE])).float() / 255.0
            logits = self.model(normalized(pixels, self.model.shape).to(device))
            found.append(logits.double().softmax(dim=1).cpu().numpy())
        return np.concatenate(found)


def save_classifier(classifier: TrainedClassifier, folder: Path) -> None:
    """Write a classifier into a folder."""
    shape: Shape = classifier.model.shape
    kind = next(name for name, one in _SHAPES.items() if isinstance(shape, one))
    weights = {name: one.detach().cpu().contiguous() for name, one in classifier.model.state_dict().items()}
    save_tensors(folder / WEIGHTS, weights)
    if classifier.grid is not None:
        classifier.grid.save(folder)
    settings = {"architecture": kind, "shape": dump(shape, constants=True), "classes": list(classifier.classes)}
    write_atomic(folder / SETTINGS, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def load_classifier(folder: Path) -> TrainedClassifier:
    """Read the classifier that the stage `vision` wrote. Raises `ModelError` for a folder of another kind."""
    settings = read_json(folder / SETTINGS)
    try:
        shape = parse(_SHAPES[settings["architecture"]], settings["shape"], constants=True)
        classes = [str(name) for name in settings["classes"]]
    except (KeyError, TypeError, ConfigError) as error:
        path = folder / SETTINGS
        raise ModelError(f"{path}: is not that of an image classifier ({error}); copy the folder again") from None
    weights, _ = read_tensors(folder / WEIGHTS)
    grid, model = TrainedGrid.load(folder), ImageClassifier(shape, len(classes))
    if grid is not None:
        # Random weights, for the names and shapes of a quantized classifier's tensors
        model = quantize_classifier(model, grid)
    wanted = {name: one.shape for name, one in model.state_dict().items()}
    if wanted != {name: one.shape for name, one in weights.items()}:
        raise ModelError(f"{folder / WEIGHTS}: does not fit {SETTINGS} in the same folder; copy the folder again")
    model.load_state_dict(weights)
    return TrainedClassifier(model.eval(), classes, grid)
