"""A model's weights as one vector and back: the names in order, so that all sides agree."""

import hashlib
import json

import numpy as np
import torch

from modelwright.core.errors import ModelwrightError
from modelwright.model.decoder import Decoder


def weight_vector(model: Decoder) -> np.ndarray:
    """All trained weights [N, float32], by the order of their names."""
    parts = [parameter.detach().cpu().float().reshape(-1) for _, parameter in _parameters(model)]
    return torch.cat(parts).numpy().copy()


@torch.no_grad()
def set_weights(model: Decoder, vector: np.ndarray) -> None:
    """Write a vector of `weight_vector`'s form into the model. Raises `ModelwrightError` for one of another size."""
    parameters = _parameters(model)
    total = sum(parameter.numel() for _, parameter in parameters)
    if vector.shape != (total,):
        raise ModelwrightError(f"federated: {vector.shape} weights arrived for a model of {total}; use the same model")
    first = 0
    for _, parameter in parameters:
        part = torch.from_numpy(vector[first : first + parameter.numel()].copy())
        parameter.copy_(part.view_as(parameter))
        first += parameter.numel()


def shape_digest(model: Decoder) -> str:
    """Equal for models with the same names and shapes of weights: 64 hexadecimal digits."""
    shapes = [[name, list(parameter.shape)] for name, parameter in _parameters(model)]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()


def _parameters(model: Decoder) -> list[tuple[str, torch.nn.Parameter]]:
    named = {id(parameter): (name, parameter) for name, parameter in sorted(model.named_parameters(), reverse=True)}
    return sorted((one for one in named.values() if one[1].requires_grad), key=lambda one: one[0])
