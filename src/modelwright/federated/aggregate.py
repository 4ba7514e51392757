"""From the clients' updates to the next global weights: what is refused, what is scaled down, the weighted mean."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

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
    median_norm: float | None
    """What a later round with a single update measures it by: the lower median of this round's norms, or, after a
    single update, what that one was measured by; None for nothing yet."""


class Combine(Protocol):
    """Puts the changes of clients [M, float64] together, each with its share (they add up to 1), to the change of the
    global weights [N, float64].
    """

    def __call__(self, weights: np.ndarray, changes: Sequence[np.ndarray], shares: Sequence[float]) -> np.ndarray: ...


def mean_of(weights: np.ndarray, changes: Sequence[np.ndarray], shares: Sequence[float]) -> np.ndarray:
    """FedAvg's weighted mean."""
    change = np.zeros(len(changes[0]))
    for of_client, share in zip(changes, shares, strict=True):
        change += of_client * share
    return change


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


def usual_norm(updates: Mapping[str, ClientUpdate], last_median_norm: float | None) -> float | None:
    """The norm that updates are measured by.

    The lower median, which of two updates is the shorter one: between them, a single huge one would raise its own
    bound. A single update has no other beside it, and is measured by that of an earlier round; nor may it change what
    later ones are measured by, or it could grow from round to round.
    """
    if len(updates) == 1:
        return last_median_norm
    return statistics.median_low(update.norm for update in updates.values())


def mean_update(
    updates: Mapping[str, ClientUpdate],
    *,
    size: int,
    most: float,
    max_norm_ratio: float,
    last_median_norm: float | None = None,
    weights: np.ndarray | None = None,
    combine: Combine = mean_of,
) -> Aggregate:
    """FedAvg's weighted mean of the updates that can be used.

    size: numbers of an update; most: norm to which updates are scaled down, 0 for `max_norm_ratio` times the usual
    norm alone; last_median_norm: `Aggregate.median_norm` of the last round that changed the weights; weights: the
    global ones, which `combine` may need. Raises `ModelwrightError` if none can be used, and for a single update that
    neither `most` nor an earlier round gives a bound.
    """
    usable = usable_updates(updates, size=size)
    if not usable:
        raise ModelwrightError(f"federated: none of {len(updates)} updates can be used")
    median_norm = usual_norm(usable, last_median_norm)
    bounds = [most] if most else []
    if median_norm is not None:
        bounds.append(max_norm_ratio * median_norm)
    if not bounds:
        raise ModelwrightError(
            "federated: a single update came, and no earlier round says how long updates are; set privacy.clip_norm, "
            "or min_clients to 2 or more"
        )
    bound = min(bounds)
    bounded = [clipped(usable[name], bound) for name in sorted(usable)]  # the same sum whatever the order of arrival
    total = sum(update.weight for update in bounded)
    changes = [update.change.astype(np.float64) for update in bounded]
    shares = [update.weight / total for update in bounded]
    return Aggregate(
        change=combine(np.zeros(size) if weights is None else weights, changes, shares),
        refused=tuple(sorted(updates.keys() - usable.keys())),
        scaled=tuple(sorted(name for name, update in usable.items() if update.norm > bound)),
        total_weight=total,
        median_norm=median_norm,
    )
