"""A model's weights as the single vector that server and clients exchange, with or without adapters.

The mean of the clients' deltas is mean(B A), which differs from mean(B) mean(A). FFA-LoRA (Sun et al. 2024) keeps A at
its initial values, so that the mean of B is exact. FedEx-LoRA (Singhal et al. 2024, arXiv:2410.09432) averages A and B,
and adds the difference between the mean of the products and the product of the means to the frozen weights. FedSA-LoRA
(Guo et al. 2024, arXiv:2410.01463) averages A, and each client keeps its own B.

Legend: A [R, I] and B [O, R] of a projection, s its scale.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from modelwright.core.config import ModelwrightError, derive_seed
from modelwright.model.adapters import ADAPTER, adapters_of, attach_adapters
from modelwright.model.decoder import Decoder
from modelwright.model.hf import load_model
from modelwright.model.low_rank import A, AdapterConfig, B
from modelwright.pipeline.models import find_model
from modelwright_federated.config import FederatedConfig, FederatedLoraConfig


def begin_model(start: Path, config: FederatedConfig) -> Decoder:
    """Loads the model that server and clients begin with, adapters included. start: a run or a model folder."""
    model = load_model(find_model(start).source.folder)
    attach_federated(model, config.lora, derive_seed(config.seed, "lora"))
    return model


def attach_federated(model: Decoder, config: FederatedLoraConfig, seed: int) -> None:
    """Attaches adapters to the model, in place; with `r` 0 nothing changes. seed: must be equal on server
    and clients.
    """
    attach_adapters(model, AdapterConfig(r=config.r, lora_alpha=config.lora_alpha), seed)
    if config.r and config.aggregation == "ffa":
        for adapter in adapters_of(model).values():
            adapter.lora_A.requires_grad_(False)


class GlobalWeights:
    """The exchanged part of a model's weights [N, float32], ordered by name so that server and clients agree.

    `frozen`: names of weights that clients do not train but the server changes; they come first and have `num_frozen`
    numbers in all. `personal`: names of trained weights that stay with each client.
    """

    def __init__(self, model: Decoder, config: FederatedLoraConfig) -> None:
        kind, adapters = config.aggregation if config.r else "", adapters_of(model)
        self.model = model
        self.personal = [f"{name}{ADAPTER}{B}" for name in sorted(adapters)] if kind == "personal" else []
        frozen = [f"{name}.weight" for name in sorted(adapters)] if kind == "fedex" else []
        # A weight that two modules share has two names; the last one in reverse order is the first by the alphabet.
        named = {id(one): (name, one) for name, one in sorted(model.named_parameters(), reverse=True)}
        trained = sorted(name for name, one in named.values() if one.requires_grad and name not in self.personal)
        self.parameters = {name: model.get_parameter(name) for name in (*frozen, *trained)}
        self.num_frozen = sum(self.parameters[name].numel() for name in frozen)
        self.size = sum(one.numel() for one in self.parameters.values())

    def read(self) -> np.ndarray:
        """Returns a copy of the weights [N, float32]."""
        parts = [one.detach().cpu().float().reshape(-1) for one in self.parameters.values()]
        return torch.cat(parts).numpy().copy()

    @torch.no_grad()
    def write(self, vector: np.ndarray) -> None:
        """Copies a vector of this form into the model. Raises `ModelwrightError` for a vector of another size."""
        if vector.shape != (self.size,):
            raise ModelwrightError(
                f"federated: {vector.shape} weights arrived for a model of {self.size}; use the same model"
            )
        for name, place in self.slices().items():
            parameter = self.parameters[name]
            parameter.copy_(torch.from_numpy(vector[place].copy()).view_as(parameter))

    def slices(self) -> dict[str, slice]:
        """Returns the slice of each weight in the vector, by name."""
        slices, first = dict[str, slice](), 0
        for name, parameter in self.parameters.items():
            slices[name] = slice(first, first + parameter.numel())
            first += parameter.numel()
        return slices

    def projections(self) -> list["AdaptedProjection"]:
        """Returns the slices of each projection's weight, A and B, if the server changes frozen weights; else []."""
        places = self.slices() if self.num_frozen else {}
        return [
            AdaptedProjection(
                weight=places[f"{name}.weight"],
                a=places[f"{name}{ADAPTER}{A}"],
                b=places[f"{name}{ADAPTER}{B}"],
                rank=adapter.rank,
                scale=adapter.scale,
            )
            for name, adapter in adapters_of(self.model).items()
            if places
        ]


@dataclass(frozen=True, kw_only=True)
class AdaptedProjection:
    """Slices of the global weights that belong to one projection."""

    weight: slice
    a: slice
    b: slice
    rank: int
    scale: float

    def product(self, weights: np.ndarray) -> np.ndarray:
        """Computes s B A [O, I] of global weights [N]."""
        return self.scale * (weights[self.b].reshape(-1, self.rank) @ weights[self.a].reshape(self.rank, -1))


def add_missed_products(
    mean: np.ndarray, clients: Sequence[np.ndarray], shares: Sequence[float], projections: Sequence[AdaptedProjection]
) -> None:
    """FedEx-LoRA: adds to the frozen weights of the mean [N, float64], in place, the difference between the mean of the
    products and the product of the means. clients: weights of each [N, float64]; shares: sum to 1.
    """
    for projection in projections:
        products = sum(share * projection.product(one) for one, share in zip(clients, shares, strict=True))
        mean[projection.weight] += (products - projection.product(mean)).reshape(-1)
