"""A model's weights as one vector and back: the names in order, so that all sides agree.

frozen: names of weights that clients do not train but the server changes; they come before the trained ones.
"""

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import torch

from modelwright.core.errors import ModelwrightError
from modelwright.model.decoder import Decoder


def weight_vector(model: Decoder, frozen: Sequence[str] = ()) -> np.ndarray:
    """All trained weights [N, float32], by the order of their names."""
    parts = [parameter.detach().cpu().float().reshape(-1) for _, parameter in _parameters(model, frozen)]
    return torch.cat(parts).numpy().copy()


@torch.no_grad()
def set_weights(model: Decoder, vector: np.ndarray, frozen: Sequence[str] = ()) -> None:
    """Write a vector of `weight_vector`'s form into the model. Raises `ModelwrightError` for one of another size."""
    parameters = _parameters(model, frozen)
    total = sum(parameter.numel() for _, parameter in parameters)
    if vector.shape != (total,):
        raise ModelwrightError(f"federated: {vector.shape} weights arrived for a model of {total}; use the same model")
    first = 0
    for _, parameter in parameters:
        part = torch.from_numpy(vector[first : first + parameter.numel()].copy())
        parameter.copy_(part.view_as(parameter))
        first += parameter.numel()


def weight_slices(model: Decoder, frozen: Sequence[str] = ()) -> dict[str, slice]:
    """Where each weight is in a vector of `weight_vector`'s form, by name."""
    slices, first = dict[str, slice](), 0
    for name, parameter in _parameters(model, frozen):
        slices[name] = slice(first, first + parameter.numel())
        first += parameter.numel()
    return slices


def shape_digest(model: Decoder) -> str:
    """Equal for models with the same names and shapes of weights: 64 hexadecimal digits."""
    shapes = [[name, list(parameter.shape)] for name, parameter in _parameters(model, ())]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()


def _parameters(model: Decoder, frozen: Sequence[str]) -> list[tuple[str, torch.nn.Parameter]]:
    named = {id(parameter): (name, parameter) for name, parameter in sorted(model.named_parameters(), reverse=True)}
    trained = sorted((one for one in named.values() if one[1].requires_grad), key=lambda one: one[0])
    return [*((name, model.get_parameter(name)) for name in frozen), *trained]
