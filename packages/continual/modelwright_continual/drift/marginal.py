"""The distribution of one feature in the reference, and its distance from that of a window."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from modelwright_continual.drift.features import Value
from modelwright_continual.drift.sessions import Floats, Ints, Units, correlation_within
from modelwright_continual.drift.statistics import bin_shares, cdf_at, decile_edges, psi, total_variation

LEAST_UNITS = 10
"""Minimum number of a window's sessions with a value; a feature with fewer is not tested there."""
UNKNOWN = "(new)"
"""Category of labels that do not occur in the reference."""


@dataclass(frozen=True, eq=False)
class Marginal:
    """One feature of the reference. values [N]: numbers, or indices into `categories`; NaN for a missing value."""

    name: str
    kind: Literal["number", "category"]
    values: Floats
    units: Units
    categories: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, kind: Literal["number", "category"], values: Sequence[Value], units: Units) -> "Marginal":
        categories = (*sorted({str(one) for one in values if one is not None}), UNKNOWN) if kind == "category" else ()
        empty = cls(name, kind, np.empty(0), units, categories)
        return cls(name, kind, empty.coded(values), units, categories)

    def coded(self, values: Sequence[Value]) -> Floats:
        """Encodes values as numbers; a category that is missing from the reference gets the last index."""
        if self.kind == "number":
            return np.array([np.nan if one is None else one for one in values], dtype=np.float64)
        codes = {category: code for code, category in enumerate(self.categories)}
        return np.array([codes.get(str(one), len(codes) - 1) for one in values], dtype=np.float64)

    @cached_property
    def present(self) -> NDArray[np.bool_]:
        return ~np.isnan(self.values)

    @cached_property
    def present_units(self) -> Units:
        return self.units.present(self.present)

    @cached_property
    def correlation(self) -> float:
        """Intraclass correlation within sessions, of the ranks of numbers or of the indicators of categories."""
        values = self.values[self.present]
        if self.kind == "number":
            indicators = (rankdata(values) / len(values))[:, None]
        else:
            indicators = (values[:, None] == np.arange(len(self.categories))).astype(np.float64)
        return correlation_within(indicators, self.present_units.of_record)

    @cached_property
    def variance(self) -> float:
        return self.present_units.variance(self.correlation)

    @cached_property
    def edges(self) -> Floats:
        """Inner edges of the bins: deciles, or between the categories."""
        if self.kind == "category":
            return np.arange(len(self.categories) - 1, dtype=np.float64)
        return decile_edges(self.values[self.present], self.present_units.record_weights)

    def shares(self, values: Floats, units: Units) -> Floats:
        """Returns the weight of each bin among values without NaN."""
        return bin_shares(values, units.record_weights, self.edges)

    @cached_property
    def reference_shares(self) -> Floats:
        return self.shares(self.values[self.present], self.present_units)

    def compare(self, values: Floats, units: Units) -> "Distance":
        """Returns the distance between the reference and a window's values [n], NaN for missing ones."""
        mask = ~np.isnan(values)
        values, units = values[mask], units.present(mask)
        if len(units.weights) < LEAST_UNITS:
            # A statistic of 0 has a p-value of 1, so the feature cannot alarm.
            return Distance(0.0, 0.0, 0.0)
        if self.kind == "number":
            mine = self.values[self.present]
            points = np.concatenate([mine, values])
            theirs = cdf_at(points, values, units.record_weights)
            effect = float(np.abs(theirs - cdf_at(points, mine, self.present_units.record_weights)).max())
        else:
            effect = total_variation(self.shares(values, units), self.reference_shares)
        deviation = np.sqrt(self.variance + units.variance(self.correlation))
        return Distance(effect, effect / float(deviation), psi(self.reference_shares, self.shares(values, units)))


@dataclass(frozen=True)
class Distance:
    """Distance between two distributions. effect: KS distance or total variation; statistic: the effect in standard
    errors of a share near one half; psi: over the reference's deciles or categories.
    """

    effect: float
    statistic: float
    psi: float


@dataclass(frozen=True, eq=False)
class ResampledMarginal:
    """A marginal prepared for many windows that are drawn from the reference's own records. positions [N]: rank of each
    record's value among the distinct values, -1 for a missing value.
    """

    source: Marginal
    positions: Ints
    num_places: int

    @classmethod
    def of(cls, source: Marginal) -> "ResampledMarginal":
        distinct, places = np.unique(source.values[source.present], return_inverse=True)
        positions = np.full(len(source.values), -1, dtype=np.int64)
        positions[source.present] = places
        return cls(source, positions, len(distinct))

    def cumulative(self, multiplicities: Floats) -> Floats:
        """Returns the distribution function at each distinct value, with a leading 0, of a reference in which unit u is
        repeated multiplicities[u] times [U].
        """
        owners = self.source.units.of_record[self.source.present]
        sizes = np.bincount(owners, minlength=len(multiplicities))
        weights = multiplicities[owners] / sizes[owners]
        sums = np.bincount(self.positions[self.source.present], weights, minlength=self.num_places).cumsum()
        return np.concatenate([[0.0], sums / sums[-1]])

    def compare(self, records: Ints, units: Units, reference: Floats) -> tuple[float, float]:
        """Returns effect and statistic of the window of these records [n], as `Marginal.compare` does. reference:
        result of `cumulative`.
        """
        positions = self.positions[records]
        if self.source.present.all():
            counted = units
        else:
            counted, positions = units.present(positions >= 0), positions[positions >= 0]
        if len(counted.weights) < LEAST_UNITS:
            return 0.0, 0.0
        weights = counted.record_weights
        if self.source.kind == "number":
            order = np.argsort(positions)
            positions, weights = positions[order], weights[order]
            sums = weights.cumsum()
            # within equal values the first is lowest and the last is highest, so ties need no care
            above = (sums - reference[positions + 1]).max()
            below = (reference[positions] - sums + weights).max()
            effect = float(max(above, below))
        else:
            shares = np.bincount(positions, weights, minlength=self.num_places).astype(np.float64)
            effect = total_variation(shares, np.diff(reference))
        deviation = np.sqrt(self.source.variance + counted.variance(self.source.correlation))
        return effect, effect / float(deviation)
