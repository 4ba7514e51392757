"""The order in which rows are drawn: a curriculum within a source, a mixture of several, and their settings.

Shares of a mixture are a function of the batch number and of the updates so far, which a checkpoint has. The number of
rows from each source follows the shares exactly: the remaining fraction of a row is carried from a block to the next.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from modelwright.core.config import ConfigError, constant, derive_seed
from modelwright.data.document import KINDS

BY_LOSS = "loss:"
UNMEASURED = 1.0
"""Score of a source before its first measurement: the ratio of its held-out loss to the first one."""


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """Easy rows first: rows are drawn from the easiest fraction, which grows (Platanios et al. 2019)."""

    by: str = "none"
    """Measure of difficulty: `length` in tokens; `compression_ratio`, compressed over uncompressed bytes;
    `loss:FOLDER`, the loss of a Hugging Face model; or a numeric field of the records (named in `data.keep_fields`)."""
    fraction: float = constant(0.5)
    """Fraction of the steps after which all rows are used."""
    initial_competence: float = constant(0.01)
    """Fraction of the rows at the first step (Platanios et al. 2019, section 4)."""

    @property
    def model(self) -> str:
        """Folder of the model whose loss is the difficulty, "" for another measure."""
        return self.by.removeprefix(BY_LOSS) if self.by.startswith(BY_LOSS) else ""

    @property
    def score(self) -> str:
        """Score that rows must be packed with, "" if the measure needs none."""
        return "" if self.by in ("none", "length") or self.model else self.by

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise ConfigError(f"fraction: must be above 0 and at most 1, got {self.fraction}; 0.5 is usual")
        if self.by in ("", "loss", BY_LOSS):
            raise ConfigError(f"by: {self.by!r} names nothing; for example length, or loss:models/small")


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Shares of sources among the rows of every batch. Without these settings, rows are read once per epoch."""

    weights: dict[str, float] = field(default_factory=dict[str, float], hash=False)
    """Weight of each source by name: of each kind (`prose`, `code`), or of each file and corpus as in the documents'
    `source`; {} takes the sources' sizes in tokens. Rows of different sources are packed separately."""
    temperature: float = 1.0
    """Shares are proportional to weight^(1/temperature), equal at large values (Raffel et al. 2020, section 3.5.2)."""
    update: Literal["none", "linear", "heldout_loss", "scores"] = "none"
    """Change of the shares: `linear` moves them from the sources' sizes at the first step to `weights` at the last;
    `heldout_loss` moves them at every evaluation to sources with a high held-out loss (group DRO, Sagawa et al.
    2020); `scores` takes softmax(2 * score), where `weights` are the scores of sources by the task that they serve, and
    a source without one is scored at every evaluation by its held-out loss, divided by that of the first evaluation."""
    score_sharpness: float = constant(2.0)
    """`scores`: factor beta of the scores before the softmax."""
    learning_rate: float = constant(1.0)
    """`heldout_loss`: step size of the exponentiated gradient (Xie et al. 2023, section 2)."""
    smoothing: float = constant(1e-3)
    """Share that is distributed equally after each update (Xie et al. 2023, section 2)."""

    @property
    def is_on(self) -> bool:
        return bool(self.weights) or self.temperature != 1.0 or self.update != "none"

    @property
    def group_by(self) -> Literal["none", "kind", "source"]:
        """Unit that counts as a source."""
        if not self.is_on:
            return "none"
        return "kind" if self.weights and all(name in KINDS for name in self.weights) else "source"

    @property
    def is_measured(self) -> bool:
        """True if evaluations change the shares by held-out losses."""
        return self.update in ("heldout_loss", "scores")

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ConfigError(f"temperature: must be above 0, got {self.temperature}; 1 keeps the weights")
        if self.update == "scores" and self.temperature != 1.0:
            raise ConfigError("temperature: does not apply to update scores, whose shares are a softmax; set it to 1")
        if self.update == "linear" and not self.weights:
            raise ConfigError("update: linear needs weights to move to; set them")
        if self.weights and (min(self.weights.values()) < 0 or sum(self.weights.values()) <= 0):
            raise ConfigError(f"weights: must not be negative, and one must be above 0, got {self.weights}")


@dataclass(frozen=True, kw_only=True)
class BatchingConfig:
    """Order of the packed rows."""

    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    mixture: MixtureConfig = field(default_factory=MixtureConfig)


@dataclass(frozen=True)
class Pacing:
    """Computes the fraction of the rows, easiest first, that a batch draws from. num_steps: steps of the run."""

    config: CurriculumConfig
    num_steps: int

    def competence(self, batch: int) -> float:
        """Returns the fraction, in (0, 1]; 1 without a curriculum. It grows with the square root of the steps
        (Platanios et al. 2019, equation 7), which spends more of them on difficult rows than linear growth does.
        """
        if self.config.by == "none":
            return 1.0
        start = self.config.initial_competence**2
        progress = batch / (self.config.fraction * self.num_steps)
        return min(1.0, (start + progress * (1.0 - start)) ** 0.5)


class RowOrder:
    """An endless sequence of draws from the rows [N] int64 of one source; draw number n is a function of the seed, n
    and the competence at that time. difficulty: one value per row, [N], None without a curriculum.
    """

    def __init__(self, rows: np.ndarray, difficulty: np.ndarray | None, *, seed: int) -> None:
        self.rows = rows if difficulty is None else rows[np.argsort(difficulty, kind="stable")]
        self.seed = seed
        self._epoch_order = lru_cache(maxsize=2)(lambda epoch: permutation(derive_seed(seed, "rows", epoch), len(rows)))

    def draw(self, numbers: np.ndarray, competence: float) -> np.ndarray:
        """Returns the rows of the draws `numbers` [K] int64. Below full competence they are drawn uniformly, with
        replacement, from the easiest fraction of the rows; after that, all rows are read once per epoch.
        """
        num_rows = len(self.rows)
        # With replacement, because the set of easy rows grows during an epoch of them.
        if competence < 1.0:
            num_easy = max(1, int(competence * num_rows))
            places = (uniform(derive_seed(self.seed, "easy"), numbers) * num_easy).astype(np.int64)
            return self.rows[places]
        epochs = numbers // num_rows
        drawn = np.empty(len(numbers), dtype=np.int64)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            drawn[of_epoch] = self._epoch_order(int(epoch))[numbers[of_epoch] % num_rows]
        return self.rows[drawn]

    def epochs(self, numbers: np.ndarray, competence: float) -> np.ndarray:
        """Returns the number of earlier draws of each row, [K] int64; with replacement, the number of the draw."""
        return numbers if competence < 1.0 else numbers // len(self.rows)


def permutation(seed: int, size: int) -> np.ndarray:
    """Returns a permutation of `size` numbers [size] int64."""
    # NumPy keeps Philox's raw stream stable across versions, but not `Generator.permutation`.
    return np.argsort(np.random.Philox(seed).random_raw(size), kind="stable")


def uniform(seed: int, numbers: np.ndarray) -> np.ndarray:
    """Returns a random number in [0, 1) for the seed and each of `numbers`: SplitMix64 (Steele et al. 2014)."""
    state = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((state ^ (state >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53  # 53 bits, the precision of a double


class Mixture:
    """Shares [S] float64 of the sources `names` in each batch. sizes: tokens of each source. num_steps: batches of the
    run. Raises `ConfigError` for the weight of an unknown source.
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
        """Updates: the first batch of each, ascending, and the shares from then on."""
        self.generation = 0
        """Number of replacements of the history; each invalidates the plans of batches that were made before."""

    def _shares(self, weights: Mapping[str, float], temperature: float) -> np.ndarray:
        unknown = [name for name in weights if name not in self.names]
        if unknown:
            known = ", ".join(repr(name) for name in self.names)
            raise ConfigError(
                f"batching.mixture.weights: unknown source {unknown[0]!r}; the packed rows have {known} "
                "(weights for prose and code alone make kinds the sources)"
            )
        values = np.array([weights.get(name, 0.0) for name in self.names], dtype=np.float64)
        # Divided by the largest, or a small temperature would overflow; weight 0 stays 0 at any temperature.
        scaled = np.where(values > 0, (values / values.max()) ** (1.0 / temperature), 0.0)
        return scaled / scaled.sum()

    def shares(self, batch: int) -> np.ndarray:
        """Returns the shares [S] in batch `batch`."""
        # The latest update that applies.
        for first_batch, shares in reversed(self.history):
            if first_batch <= batch:
                return np.array(shares)
        progress = min(1.0, batch / max(1, self.num_steps - 1))
        return (1.0 - progress) * self.first + progress * self.last

    def update(self, first_batch: int, shares: np.ndarray) -> None:
        """Changes the shares of the blocks that begin at batch `first_batch` or later."""
        assert not self.history or self.history[-1][0] <= first_batch, "updates come in order"
        self.history.append((first_batch, shares.tolist()))

    def state_dict(self) -> dict[str, Any]:
        return {"names": list(self.names), "history": [list(entry) for entry in self.history]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert tuple(state["names"]) == self.names, "a checkpoint of other rows"
        self.history = [(int(first), [float(share) for share in shares]) for first, shares in state["history"]]
        self.generation += 1


def apportion(owed: np.ndarray, num_rows: int) -> np.ndarray:
    """Divides `num_rows` rows among sources, [S] int64. owed: rows that are still to be drawn from each source, [S];
    its sum is `num_rows`. The largest remainders are rounded up.
    """
    counts = np.floor(np.maximum(owed, 0.0)).astype(np.int64)
    while counts.sum() > num_rows:  # sources that gave too many before leave too few rows for the others
        counts[np.argmin(np.where(counts > 0, owed - counts, np.inf))] -= 1
    missing = num_rows - int(counts.sum())
    counts[np.argsort(counts - owed, kind="stable")[:missing]] += 1
    return counts


def softmax_shares(scores: np.ndarray, *, beta: float) -> np.ndarray:
    """Returns the shares [S] of sources with these scores [S]: softmax(beta * score)."""
    # Less the largest score, or the exponential could overflow.
    grown = np.exp(beta * (scores - scores.max()))
    return grown / grown.sum()


def exponentiated_gradient(shares: np.ndarray, excess: np.ndarray, *, rate: float, smoothing: float) -> np.ndarray:
    """Returns the shares [S] after one update with the excess losses [S]: shares are multiplied by
    exp(rate * max(excess, 0)) and normalized, and a share of `smoothing` is distributed equally (DoReMi, Xie et al.
    2023, algorithm 1).
    """
    # Smoothing keeps every share above 0: a factor could not raise a share of 0 again.
    logits = rate * np.maximum(excess, 0.0)
    grown = shares * np.exp(logits - logits.max())
    return (1.0 - smoothing) * grown / grown.sum() + smoothing / len(shares)
