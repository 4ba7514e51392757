"""Low-rank adapters of a federated training, averaged exactly.

The mean of the clients' deltas is mean(B A), which is not mean(B) mean(A). Two ways are exact. FFA-LoRA (Sun et al.
2024, Improving LoRA in privacy-preserving federated learning) keeps A at its initial values, so that the mean of B is
enough. FedEx-LoRA (Singhal et al. 2024, arXiv:2410.09432) averages A and B, and adds what the mean of the products
exceeds the product of the means by to the frozen weights.

Legend: A [R, I] and B [O, R] of a projection, s its scale.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from modelwright.core.config import only_for
from modelwright.core.errors import ConfigError
from modelwright.federated.aggregate import Combine, mean_of
from modelwright.federated.weights import weight_slices
from modelwright.model.adapter_config import AdapterConfig
from modelwright.model.adapters import adapters_of, attach_adapters
from modelwright.model.decoder import Decoder
from modelwright.model.low_rank import A, B


@dataclass(frozen=True, kw_only=True)
class FederatedLoraConfig:
    """Low-rank adapters, which clients train and send in place of all weights."""

    r: int = 0
    """Rank of the adapters of all projections; 0 trains the model's own weights."""
    lora_alpha: float = field(default=16.0, metadata=only_for("r"))
    """The adapters' output is scaled by lora_alpha / r."""
    aggregation: Literal["ffa", "fedex"] = field(default="ffa", metadata=only_for("r"))
    """`ffa` trains B alone; `fedex` trains A and B, and moves what their averages miss into the frozen weights, which
    the server therefore sends in every round."""

    def __post_init__(self) -> None:
        if self.r < 0:
            raise ConfigError(f"r: must not be negative, got {self.r}; 8 is usual, 0 trains all weights")
        if not self.lora_alpha > 0:
            raise ConfigError(f"lora_alpha: must be above 0, got {self.lora_alpha}")


def attach_federated(model: Decoder, config: FederatedLoraConfig, seed: int) -> None:
    """Give the model the adapters that all sides begin with, in place; `r` 0 changes nothing. seed: equal on all
    sides.
    """
    attach_adapters(model, AdapterConfig(r=config.r, lora_alpha=config.lora_alpha), seed)
    if config.r and config.aggregation == "ffa":
        for adapter in adapters_of(model).values():
            adapter.lora_A.requires_grad_(False)


def frozen_weights(model: Decoder, config: FederatedLoraConfig) -> tuple[str, ...]:
    """The names of the weights that clients do not train but the server changes."""
    if not config.r or config.aggregation != "fedex":
        return ()
    return tuple(f"{name}.weight" for name in adapters_of(model))


def combination(model: Decoder, config: FederatedLoraConfig) -> Combine:
    """How the server puts the clients' changes together."""
    frozen = frozen_weights(model, config)
    if not frozen:
        return mean_of
    places = weight_slices(model, frozen)
    projections = [
        _Projection(
            weight=places[f"{name}.weight"],
            a=places[f"{name}.adapter.{A}"],
            b=places[f"{name}.adapter.{B}"],
            rank=adapter.rank,
            scale=adapter.scale,
        )
        for name, adapter in adapters_of(model).items()
    ]
    return FedExMean(projections)


@dataclass(frozen=True, kw_only=True)
class _Projection:
    """Where the weight, A and B of a projection are in the global weights."""

    weight: slice
    a: slice
    b: slice
    rank: int
    scale: float


@dataclass(frozen=True)
class FedExMean:
    """The mean of A and of B, and in the frozen weights the rest of the mean delta."""

    projections: Sequence[_Projection]

    def __call__(self, weights: np.ndarray, changes: Sequence[np.ndarray], shares: Sequence[float]) -> np.ndarray:
        trained = mean_of(weights, changes, shares)
        change = np.concatenate([np.zeros(len(weights) - len(trained)), trained])
        offset = len(weights) - len(trained)
        before, after = weights.astype(np.float64), weights.astype(np.float64) + change
        for one in self.projections:
            deltas = 0.0
            for of_client, share in zip(changes, shares, strict=True):
                a, b = (before[at] + of_client[at.start - offset : at.stop - offset] for at in (one.a, one.b))
                deltas = deltas + share * _product(a, b, one.rank)
            rest_OI = one.scale * (deltas - _product(after[one.a], after[one.b], one.rank))
            change[one.weight] = rest_OI.reshape(-1)
        return change


def _product(a: np.ndarray, b: np.ndarray, rank: int) -> np.ndarray:
    """B A [O, I]."""
    return b.reshape(-1, rank) @ a.reshape(rank, -1)
