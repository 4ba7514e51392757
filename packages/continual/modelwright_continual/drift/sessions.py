"""Sessions as the units of statistics: a request counts as its share of a session, not as an independent observation.

Requests of one session resemble each other, so statistics that assume independence find differences where none exist,
and a session of a thousand requests would outvote all others. Here every session has the same weight, spread over its
requests (cluster-weighted analysis: Williamson, Datta & Satten, Biometrics 59, 2003; the expectation of within-cluster
resampling: Hoffman, Sen & Weinberg, Biometrika 88, 2001). A user with many sessions has at most the share that the
busiest user of the reference had.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from modelwright_continual.drift.requests import RequestRecord

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Units:
    """Units of statistics: a unit is a session, or all sessions of a user whose share would be too large. of_record
    [N]: unit of each record; weights [U]: of each unit, before normalization.
    """

    of_record: Ints
    weights: Floats

    def present(self, mask: NDArray[np.bool_]) -> "Units":
        """Returns the units of a subset of the records; mask [N]. Units without records are removed."""
        kept, codes = np.unique(self.of_record[mask], return_inverse=True)
        return Units(codes, self.weights[kept])

    @property
    def sizes(self) -> Ints:
        """Number of records of each unit [U]."""
        return np.bincount(self.of_record, minlength=len(self.weights))

    @property
    def record_weights(self) -> Floats:
        """Weight of each record [N]; the weights sum to 1."""
        return (self.weights / self.sizes / self.weights.sum())[self.of_record]

    def variance(self, correlation: float) -> float:
        """Returns the variance of a weighted mean, in multiples of the variance of one record.

        correlation: between two records of a unit. A unit of n records and weight w adds w^2 (correlation + (1 -
        correlation) / n), the design effect of cluster samples (Kish, Survey Sampling, 1965).
        """
        shares = self.weights / self.weights.sum()
        return float(np.sum(shares**2 * (correlation + (1 - correlation) / self.sizes)))


def session_codes(records: Sequence[RequestRecord]) -> tuple[Ints, Ints]:
    """Returns the session number of each record [N] and the user number of each session [sessions]. A record without a
    session counts as a separate session, and a session without a user as a separate user.
    """
    # A tuple cannot collide with a session or user whose name happens to equal the id.
    names = [record.get("session") or ("", record["id"]) for record in records]
    sessions: dict[object, int] = {}
    codes = np.array([sessions.setdefault(name, len(sessions)) for name in names], dtype=np.int64)
    owners: dict[int, object] = {}
    for code, record in zip(codes.tolist(), records, strict=True):
        owners.setdefault(code, record.get("user") or ("", code))
    users: dict[object, int] = {}
    return codes, np.array(
        [users.setdefault(owners[code], len(users)) for code in range(len(sessions))], dtype=np.int64
    )


def make_units(sessions: Ints, users: Ints, max_user_share: float) -> Units:
    """Makes each session a unit of weight 1, except that the sessions of a user with a larger share than
    `max_user_share` form one unit of that share. sessions [N]: of each record, numbered without gaps; users [S]: of
    each session.
    """
    num_of_user = np.bincount(users)
    if not len(users) or num_of_user.max() <= max_user_share * len(users):
        return Units(sessions, np.ones(len(users)))
    limit = weight_limit(num_of_user[num_of_user > 0].astype(np.float64), max_user_share)
    is_busy = num_of_user > limit
    # Numbers from len(users) on stand for all sessions of a busy user.
    keys = np.where(is_busy[users], len(users) + users, np.arange(len(users)))
    kept, unit_of_session = np.unique(keys, return_inverse=True)
    weights = np.where(kept < len(users), 1.0, limit)
    return Units(unit_of_session[sessions], weights)


def weight_limit(weights: Floats, max_share: float) -> float:
    """Returns the limit L such that weights cut at L have at most `max_share` each; with too few of them, all become
    equal.
    """
    ordered = np.sort(weights)[::-1]
    rest = ordered.sum() - np.cumsum(ordered)
    for num_cut in range(1, len(ordered)):
        if num_cut * max_share >= 1:
            break
        # The `num_cut` largest are cut to L = max_share * (num_cut * L + rest), solved for L.
        limit = max_share * rest[num_cut - 1] / (1 - num_cut * max_share)
        if limit >= ordered[num_cut]:
            return float(limit)
    return float(ordered[-1])


def correlation_within(indicators: Floats, units: Ints) -> float:
    """Returns the intraclass correlation by the ANOVA estimator for unequal sizes (Donner, Int. Statist. Rev. 54,
    1986), clipped to [0, 1]. indicators [N, K]: K variables, whose sums of squares are added; units [N].
    """
    num_records, num_units = len(indicators), int(units.max()) + 1
    sizes = np.bincount(units, minlength=num_units).astype(np.float64)
    if num_units < 2 or num_records <= num_units:
        return 0.0
    centered = indicators - indicators.mean(axis=0)
    sums = np.zeros((num_units, indicators.shape[1]))
    np.add.at(sums, units, centered)
    between = float((sums**2 / sizes[:, None]).sum())
    within = max(0.0, float((centered**2).sum()) - between) / (num_records - num_units)
    between /= num_units - 1
    # The adjusted mean size n0 of the estimator, which equals the size if all units have the same.
    mean_size = (num_records - float((sizes**2).sum()) / num_records) / (num_units - 1)
    total = between + (mean_size - 1) * within
    return float(np.clip((between - within) / total, 0.0, 1.0)) if total > 0 else 0.0
