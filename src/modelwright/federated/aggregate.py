"""From the clients' updates to the next global weights: what is refused, what is scaled down, the weighted mean."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from modelwright.core.errors import ModelwrightError


@dataclass(frozen=True)
class ClientUpdate:
    """What a client sends: the change of its weights [N, float32], and how much it counts."""

    change: np.ndarray
    weight: float

    @property
    def norm(self) -> float:
        return float(np.linalg.norm(self.change.astype(np.float64)))


@dataclass(frozen=True, kw_only=True)
class Aggregate:
    """The mean update [N, float64], and what was done to which client's."""

    change: np.ndarray
    refused: tuple[str, ...]
    """Clients whose updates were not finite, or counted for nothing."""
    scaled: tuple[str, ...]
    """Clients whose updates were scaled down."""
    total_weight: float


def usable_updates(updates: Mapping[str, ClientUpdate], *, size: int) -> dict[str, ClientUpdate]:
    """Those of the right size, with finite values and a finite weight above 0."""
    return {
        name: update
        for name, update in updates.items()
        if update.change.shape == (size,)
        and bool(np.isfinite(update.change).all())
        and 0 < update.weight < float("inf")
    }


def clipped(update: ClientUpdate, most: float) -> ClientUpdate:
    """The update scaled down to a norm of `most`, if it is longer."""
    norm = update.norm
    if norm <= most:
        return update
    return ClientUpdate(update.change * np.float32(most / norm), update.weight)


def mean_update(updates: Mapping[str, ClientUpdate], *, size: int, most: float, max_norm_ratio: float) -> Aggregate:
    """FedAvg's weighted mean of the updates that can be used.

    size: number of weights; most: norm to which updates are scaled down, 0 for `max_norm_ratio` times the median norm
    alone. Raises `ModelwrightError` if none can be used.
    """
    usable = usable_updates(updates, size=size)
    if not usable:
        raise ModelwrightError(f"federated: none of {len(updates)} updates can be used")
    bound = max_norm_ratio * statistics.median(update.norm for update in usable.values())
    bound = min(bound, most) if most else bound
    bounded = {name: clipped(update, bound) for name, update in usable.items()}
    total = sum(update.weight for update in bounded.values())
    change = np.zeros(size, dtype=np.float64)
    for name in sorted(bounded):  # the same sum whatever the order of arrival
        change += bounded[name].change.astype(np.float64) * (bounded[name].weight / total)
    return Aggregate(
        change=change,
        refused=tuple(sorted(updates.keys() - usable.keys())),
        scaled=tuple(sorted(name for name, update in usable.items() if update.norm > bound)),
        total_weight=total,
    )
