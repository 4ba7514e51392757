"""Thresholds for a given mean run length between false alarms, by a block bootstrap over the reference's sessions.

A window without drift is simulated by drawing sessions of the reference with replacement until they have as many
requests as a window. The sample that it is compared with is drawn too, because the reference is itself a sample:
otherwise, later windows would differ from it more than resampled ones do. A block is a session within one window of the
reference, since a window never sees more of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from modelwright.core.progress import Progress
from modelwright_continual.drift.config import DriftConfig
from modelwright_continual.drift.marginal import Marginal, ResampledMarginal
from modelwright_continual.drift.sessions import Floats, Ints, Units, make_units
from modelwright_continual.drift.statistics import adjusted_where_moved

DRAWS_PER_WINDOW = 50
"""Resampled windows for each window of the run length, so that about fifty of them alarm."""
NUM_REFERENCES = 50
"""Number of resampled references; each is compared with an equal share of the windows."""


@dataclass(frozen=True)
class DriftCalibration:
    """The calibrated thresholds. nulls [features, draws]: statistics of windows without drift, each row sorted; level:
    an adjusted p-value at or below it is an alarm; run_length: mean number of windows between false alarms at that
    level; low, high: its 95% interval, which covers the finite number of draws and the variation between references of
    this size.
    """

    nulls: Floats
    level: float
    run_length: float
    low: float
    high: float


class BlockSampler:
    """Draws windows of whole sessions. blocks [N]: session of each record, within its window of the reference; users
    [F]: user of each block.
    """

    def __init__(self, blocks: Ints, users: Ints, max_user_share: float) -> None:
        self._members = np.argsort(blocks, kind="stable")
        self._sizes = np.bincount(blocks)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._users, self._max_user_share = users, max_user_share
        self.num_blocks = len(self._sizes)

    def draw(self, num_records: int, rng: np.random.Generator) -> tuple[Ints, Units]:
        """Returns the indices [num_records] of a window's records and their units; the last session is cut to fit."""
        mean = len(self._members) / self.num_blocks
        blocks = np.empty(0, dtype=np.int64)
        while (total := int(self._sizes[blocks].sum())) < num_records:
            # 20% more than the mean need, so that a second draw is rarely necessary.
            more = int((num_records - total) / mean * 1.2) + 10
            blocks = np.concatenate([blocks, rng.integers(0, self.num_blocks, more)])
        ends = np.cumsum(self._sizes[blocks])
        last = int(np.searchsorted(ends, num_records))
        blocks, ends = blocks[: last + 1], ends[: last + 1]
        sizes = self._sizes[blocks]
        begins = ends - sizes
        sizes[-1] -= ends[-1] - num_records
        places = np.repeat(self._starts[blocks] - begins, sizes) + np.arange(num_records)
        codes = np.repeat(np.arange(len(blocks)), sizes)
        return self._members[places], make_units(codes, self._users[blocks], self._max_user_share)


def calibrate(
    marginals: Sequence[Marginal],
    sampler: BlockSampler,
    config: DriftConfig,
    *,
    with_embedding: bool,
    progress: Progress,
) -> DriftCalibration:
    """Draws windows and chooses the level. with_embedding: whether the classifier two-sample test is among the
    features; its p-values come from permutations, so they are uniform without drift. They are treated as independent of
    the others.
    """
    rng = np.random.default_rng(config.seed)
    per_reference = max(1, round(DRAWS_PER_WINDOW * config.run_length / NUM_REFERENCES))
    prepared = [ResampledMarginal.of(marginal) for marginal in marginals]
    effects, statistics = (np.zeros((NUM_REFERENCES, per_reference, len(marginals))) for _ in range(2))
    progress.begin("resample windows", NUM_REFERENCES * per_reference, "windows")
    for group in range(NUM_REFERENCES):
        counts = np.bincount(rng.integers(0, sampler.num_blocks, sampler.num_blocks), minlength=sampler.num_blocks)
        references = [one.cumulative(counts.astype(np.float64)) for one in prepared]
        for draw in range(per_reference):
            records, units = sampler.draw(config.window_requests, rng)
            for column, (one, reference) in enumerate(zip(prepared, references, strict=True)):
                effects[group, draw, column], statistics[group, draw, column] = one.compare(records, units, reference)
        progress.advance((group + 1) * per_reference)
    progress.end()
    nulls = np.sort(statistics.reshape(-1, len(marginals)).T, axis=1)
    p_values = null_p_values(statistics, nulls)
    if with_embedding:
        shape = (*p_values.shape[:2], 1)
        p_values = np.concatenate([p_values, rng.random(shape)], axis=2)
        # No effect is drawn for the embedding, so it always counts as moved, which makes the level stricter.
        effects = np.concatenate([effects, np.full(shape, np.inf)], axis=2)
    least = adjusted_where_moved(p_values, effects, config.min_effect).min(axis=2)
    level = alarm_level(least, config.run_length)
    return DriftCalibration(nulls, level, *run_length(least <= level))


def alarm_level(least: Floats, run_length: float) -> float:
    """Returns the level at which one drawn window in `run_length` alarms. least: smallest adjusted p-value of each
    window, infinite if no feature has moved by the smallest effect. If fewer windows than that have moved, all of these
    alarm, since the smallest effect alone is rare enough.
    """
    level = float(np.quantile(least, 1 / run_length, method="lower"))
    # The largest finite number: every window that has moved alarms, and one with infinite p-values does not.
    return level if np.isfinite(level) else float(np.finfo(np.float64).max)


def null_p_values(statistics: Floats, nulls: Floats) -> Floats:
    """Returns (1 + number of draws at least as large) / (1 + draws) for statistics [..., features]; nulls [features,
    draws].
    """
    columns = [
        (1 + len(null) - np.searchsorted(null, statistics[..., column], side="left")) / (1 + len(null))
        for column, null in enumerate(nulls)
    ]
    return np.stack(columns, axis=-1) if columns else np.empty((*statistics.shape[:-1], 0))


def run_length(alarms: Floats) -> tuple[float, float, float]:
    """Returns the mean number of windows between false alarms and its 95% interval. alarms [references, draws]: draws
    that alarm.

    The variance of the rate is that of its estimate plus the variance between references beyond sampling noise of the
    draws; the interval is normal for the logarithm. Without any alarm the run length is at least the number of draws,
    and the interval begins at the exact bound for a rate with no observed event.
    """
    rates = alarms.mean(axis=1)
    rate = float(rates.mean())
    if rate == 0.0:
        return float(alarms.size), 1 / (1 - 0.025 ** (1 / alarms.size)), float("inf")
    between = max(0.0, float(rates.var(ddof=1)) - rate * (1 - rate) / alarms.shape[1])
    deviation = np.sqrt(float(rates.var(ddof=1)) / len(rates) + between) / rate
    return 1 / rate, float(np.exp(-1.96 * deviation)) / rate, float(np.exp(1.96 * deviation)) / rate
