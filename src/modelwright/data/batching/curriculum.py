"""`RowOrder`: the endless sequence of rows that is drawn from one source, easy ones first if there is a curriculum."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from modelwright.core.seeds import derive_seed
from modelwright.data.batching.config import CurriculumConfig


@dataclass(frozen=True)
class Pacing:
    """The fraction of the rows, easiest first, that rows are drawn from in each batch. num_steps: of the run."""

    config: CurriculumConfig
    num_steps: int

    def competence(self, batch: int) -> float:
        """In (0, 1]; 1 without a curriculum. Platanios et al. 2019, equations 6 (linear) and 7 (root)."""
        if self.config.by == "none":
            return 1.0
        exponent = {"linear": 1, "root": 2}[self.config.pacing]
        start = self.config.initial_competence**exponent
        progress = batch / (self.config.fraction * self.num_steps)
        return min(1.0, (start + progress * (1.0 - start)) ** (1.0 / exponent))


class RowOrder:
    """The rows [N] int64 of one source, drawn one after the other without end; draw number n is a function of the seed,
    n and the competence at that time. difficulty: of each row, [N], None without a curriculum.
    """

    def __init__(self, rows: np.ndarray, difficulty: np.ndarray | None, *, seed: int) -> None:
        self.rows = rows if difficulty is None else rows[np.argsort(difficulty, kind="stable")]
        self.seed = seed
        self._epoch_order = lru_cache(maxsize=2)(self._shuffle)

    def draw(self, numbers: np.ndarray, competence: float) -> np.ndarray:
        """The rows of the draws `numbers` [K] int64. Below full competence they are drawn evenly, with replacement,
        from the easiest fraction of the rows; after that, all rows are read once per epoch.
        """
        num_rows = len(self.rows)
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
        """How often the row of each draw [K] int64 was drawn before; with replacement, the number of the draw."""
        return numbers if competence < 1.0 else numbers // len(self.rows)

    def _shuffle(self, epoch: int) -> np.ndarray:
        """A permutation from Philox's raw stream, which NumPy keeps stable (its `permutation` it does not)."""
        return permutation(derive_seed(self.seed, "rows", epoch), len(self.rows))


def permutation(seed: int, size: int) -> np.ndarray:
    """A permutation of `size` numbers [size] int64, from a stream that is the same in all versions of NumPy."""
    return np.argsort(np.random.Philox(seed).random_raw(size), kind="stable")


def uniform(seed: int, numbers: np.ndarray) -> np.ndarray:
    """Random numbers in [0, 1) that depend on the seed and each of `numbers` alone: SplitMix64 (Steele et al. 2014)."""
    state = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((state ^ (state >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53
