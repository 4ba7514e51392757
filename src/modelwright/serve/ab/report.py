"""The report on an A/B test, for its page and the API."""

import math
from typing import Any

from modelwright.serve.ab.experiment import Experiment
from modelwright.serve.ab.guards import GUARD_ALPHA, REPORT_ALPHA, mismatch
from modelwright.serve.ab.state import CONTROL, TREATMENT, ExperimentState
from modelwright.serve.ab.statistics import (
    Epoch,
    FixedHorizonResult,
    difference_interval,
    log_e_value,
    promised_requests,
    ratio_interval,
    two_proportions,
    welch,
)

PROMISED_FACTOR = 5.0
"""The promise is for a version whose error rate is so many times the limit."""


PROMISED_PROBABILITY = 0.99


def report_of(experiment: Experiment) -> dict[str, Any]:
    """Plain data for JSON; what is infinite or unknown is None. Intervals hold at every look; p-values for a fixed
    number of observations are there after the end only, because while a test runs they mislead.
    """
    state, request = experiment.state, experiment.request
    return {
        "name": experiment.name,
        "mode": request.mode,
        "unit": request.unit,
        "share": experiment.share,
        "status": experiment.status,
        "reason": experiment.reason,
        "started_at": experiment.started_at,
        "ended_at": experiment.ended_at,
        "versions": {CONTROL: experiment.control_version, TREATMENT: experiment.treatment_version},
        "requests": state.requests,
        "errors": state.errors,
        "shadows": state.shadows,
        "sample_ratio": _sample_ratio(state),
        "measures": [_events(state, "failed"), _events(state, "slow"), _scores(state)],
        "slow_s": state.slow_s,
        "guard": {"alpha": GUARD_ALPHA, **_promise(request.max_error_rate)},
        "fixed_horizon": {} if experiment.status == "running" else _fixed_horizon(state),
    }


def _promise(limit: float) -> dict[str, Any]:
    """Within how many requests to it a bad version is taken away."""
    rate = min(PROMISED_FACTOR * limit, 0.99)
    return {
        "max_error_rate": limit,
        "promised_error_rate": rate,
        "promised_requests": promised_requests(rate, limit, GUARD_ALPHA, PROMISED_PROBABILITY),
        "probability": PROMISED_PROBABILITY,
    }


def _sample_ratio(state: ExperimentState) -> dict[str, Any]:
    """Units by arm, and the interval of how many of those that B should have came, relative to A; right is 1."""
    seen = state.events["seen"]
    units = {arm: seen.of_arm(arm) for arm in (CONTROL, TREATMENT)}
    expected = sum(epoch.share * epoch.count for epoch in seen.as_epochs())
    low, high = ratio_interval(seen.as_epochs(), REPORT_ALPHA)
    return {
        "units": units,
        "expected_in_b": expected,
        "low": _finite(low),
        "high": _finite(high),
        "p_value": _p_value(seen.as_epochs()),
        "is_right": not mismatch(state),
    }


def _events(state: ExperimentState, kind: str) -> dict[str, Any]:
    """Units with an event, and the interval of how many times as frequent it is in B."""
    epochs = state.events[kind].as_epochs()
    units = {arm: state.events[kind].of_arm(arm) for arm in (CONTROL, TREATMENT)}
    low, high = ratio_interval(epochs, REPORT_ALPHA)
    return {
        "name": kind,
        "kind": "ratio",
        **units,
        "low": _finite(low),
        "high": _finite(high),
        "p_value": _p_value(epochs),
    }


def _scores(state: ExperimentState) -> dict[str, Any]:
    control, treatment = state.scores[CONTROL], state.scores[TREATMENT]
    low, high = difference_interval(control, treatment, REPORT_ALPHA)
    return {
        "name": "score",
        "kind": "difference",
        CONTROL: _finite(control.mean),
        TREATMENT: _finite(treatment.mean),
        "counts": {CONTROL: control.count, TREATMENT: treatment.count},
        "low": _finite(low),
        "high": _finite(high),
    }


def _fixed_horizon(state: ExperimentState) -> dict[str, Any]:
    seen, failed = state.events["seen"], state.events["failed"]
    rates = {arm: (failed.of_arm(arm), seen.of_arm(arm)) for arm in (CONTROL, TREATMENT)}
    return {
        "failed": _comparison(two_proportions(rates[CONTROL], rates[TREATMENT])),
        "score": _comparison(welch(state.scores[CONTROL], state.scores[TREATMENT])),
    }


def _comparison(found: FixedHorizonResult | None) -> dict[str, float] | None:
    return vars(found) if found else None


def _p_value(epochs: list[Epoch]) -> float:
    """The p-value of equal rates, valid at every look."""
    return min(1.0, math.exp(-float(log_e_value(epochs))))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
