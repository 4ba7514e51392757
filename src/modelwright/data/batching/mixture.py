"""`Mixture`: the shares of sources over a run, and which of them each row of a block of rows comes from.

Shares are a function of the batch number and of the updates so far, which a checkpoint holds. The number of rows from
each source follows the shares exactly: what a block of whole rows leaves over is carried to the next one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modelwright.core.errors import ConfigError
from modelwright.data.batching.config import MixtureConfig

UNMEASURED = 1.0
"""The score of a source that has not been measured yet: all of its first held-out loss is left."""


class Mixture:
    """Shares [S] float64 of the sources `names` in each batch. sizes: tokens of each source. num_steps: batches of
    the run. Raises `ConfigError` if a weight names no source.
    """

    def __init__(self, config: MixtureConfig, names: Sequence[str], sizes: Sequence[int], *, num_steps: int) -> None:
        self.names = tuple(names)
        self.num_steps = num_steps
        by_size = dict(zip(names, map(float, sizes), strict=True))
        self.last = self._shares(config.weights or by_size, config.temperature)
        if config.update == "scores":
            scores = np.array([config.weights.get(name, UNMEASURED) for name in self.names])
            self.last = softmax_shares(scores, beta=config.score_sharpness)
        self.first = self._shares(by_size, config.temperature) if config.update == "linear" else self.last
        self.history: list[tuple[int, list[float]]] = []
        """Updates: the first batch that each applies to, ascending, and the shares from then on."""
        self.generation = 0
        """How often the history was replaced: plans of batches made before that are void."""

    def _shares(self, weights: Mapping[str, float], temperature: float) -> np.ndarray:
        unknown = [name for name in weights if name not in self.names]
        if unknown:
            known = ", ".join(repr(name) for name in self.names)
            raise ConfigError(
                f"batching.mixture.weights: there is no source {unknown[0]!r}; the packed rows have {known} "
                "(weights for prose and code alone make kinds the sources)"
            )
        values = np.array([weights.get(name, 0.0) for name in self.names], dtype=np.float64)
        scaled = np.where(values > 0, (values / values.max()) ** (1.0 / temperature), 0.0)
        return scaled / scaled.sum()

    def shares(self, batch: int) -> np.ndarray:
        """The shares [S] in batch `batch`."""
        for first_batch, shares in reversed(self.history):
            if first_batch <= batch:
                return np.array(shares)
        progress = min(1.0, batch / max(1, self.num_steps - 1))
        return (1.0 - progress) * self.first + progress * self.last

    def update(self, first_batch: int, shares: np.ndarray) -> None:
        """Use other shares in the blocks that begin at batch `first_batch` or later."""
        assert not self.history or self.history[-1][0] <= first_batch, "updates come in order"
        self.history.append((first_batch, shares.tolist()))

    def state_dict(self) -> dict[str, Any]:
        return {"names": list(self.names), "history": [list(entry) for entry in self.history]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert tuple(state["names"]) == self.names, "a checkpoint of other rows"
        self.history = [(int(first), [float(share) for share in shares]) for first, shares in state["history"]]
        self.generation += 1


def apportion(owed: np.ndarray, num_rows: int) -> np.ndarray:
    """How many of `num_rows` rows each source gives, [S] int64. owed: rows that each source should have given by then
    beyond those that it gave, [S]; its sum is `num_rows`. The largest remainders are rounded up.
    """
    counts = np.floor(np.maximum(owed, 0.0)).astype(np.int64)
    while counts.sum() > num_rows:  # sources that gave too many before leave too few rows for the others
        counts[np.argmin(np.where(counts > 0, owed - counts, np.inf))] -= 1
    missing = num_rows - int(counts.sum())
    counts[np.argsort(counts - owed, kind="stable")[:missing]] += 1
    return counts


def softmax_shares(scores: np.ndarray, *, beta: float) -> np.ndarray:
    """The shares [S] of sources with these scores [S]: softmax(beta * score)."""
    grown = np.exp(beta * (scores - scores.max()))
    return grown / grown.sum()


def exponentiated_gradient(shares: np.ndarray, excess: np.ndarray, *, rate: float, smoothing: float) -> np.ndarray:
    """Shares [S] after one update with the excess losses [S]: shares grow by exp(rate x excess loss, at least 0), are
    normalized, and a share of `smoothing` is distributed equally (DoReMi, Xie et al. 2023, algorithm 1).
    """
    logits = rate * np.maximum(excess, 0.0)
    grown = shares * np.exp(logits - logits.max())
    return (1.0 - smoothing) * grown / grown.sum() + smoothing / len(shares)
