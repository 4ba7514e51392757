"""The report on an A/B test, for its page and the API."""

import math
from typing import Any

from modelwright.serve.ab.experiment import Experiment
from modelwright.serve.ab.guards import GUARD_ALPHA, REPORT_ALPHA, mismatch
from modelwright.serve.ab.state import CONTROL, TREATMENT, ExperimentState
from modelwright.serve.ab.statistics import (
    difference_interval,
    log_e_value,
    promised_requests,
    ratio_interval,
    two_proportions,
    welch,
)

PROMISED_FACTOR = 5.0
"""Error rate, in multiples of the limit, for which the report promises a detection time."""

PROMISED_PROBABILITY = 0.99


def report_of(experiment: Experiment) -> dict[str, Any]:
    """Returns the report as data for JSON; infinite and unknown values are None. Intervals are valid at every look."""
    state, request = experiment.state, experiment.request
    seen, failed = state.events["seen"], state.events["failed"]
    arrived = _events(state, "seen")
    promised_rate = min(PROMISED_FACTOR * request.max_error_rate, 0.99)
    control, treatment = state.scores[CONTROL], state.scores[TREATMENT]
    score_low, score_high = difference_interval(control, treatment, REPORT_ALPHA)
    # p-values for a fixed number of observations mislead whoever looks while the test runs, so they come after its end
    fixed_horizon: dict[str, Any] = {}
    if experiment.status != "running":
        rates = [(failed.of_arm(arm), seen.of_arm(arm)) for arm in (CONTROL, TREATMENT)]
        comparisons = {"failed": two_proportions(*rates), "score": welch(control, treatment)}
        fixed_horizon = {name: vars(result) if result else None for name, result in comparisons.items()}
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
        # the interval of B's rate of arrival relative to A's, by which a ratio of 1 is right
        "sample_ratio": {
            "units": {arm: arrived[arm] for arm in (CONTROL, TREATMENT)},
            "expected_in_b": sum(epoch.share * epoch.count for epoch in seen.as_epochs()),
            **{name: arrived[name] for name in ("low", "high", "p_value")},
            "is_right": not mismatch(state),
        },
        "measures": [
            _events(state, "failed"),
            _events(state, "slow"),
            {
                "name": "score",
                "kind": "difference",
                CONTROL: _finite(control.mean),
                TREATMENT: _finite(treatment.mean),
                "counts": {CONTROL: control.count, TREATMENT: treatment.count},
                "low": _finite(score_low),
                "high": _finite(score_high),
            },
        ],
        "slow_s": state.slow_s,
        "guard": {
            "alpha": GUARD_ALPHA,
            "max_error_rate": request.max_error_rate,
            "promised_error_rate": promised_rate,
            "promised_requests": promised_requests(
                promised_rate, request.max_error_rate, GUARD_ALPHA, PROMISED_PROBABILITY
            ),
            "probability": PROMISED_PROBABILITY,
        },
        "fixed_horizon": fixed_horizon,
    }


def _events(state: ExperimentState, kind: str) -> dict[str, Any]:
    """Returns the units with an event, the interval of its rate ratio of B to A, and the p-value of equal rates."""
    epochs = state.events[kind].as_epochs()
    low, high = ratio_interval(epochs, REPORT_ALPHA)
    return {
        "name": kind,
        "kind": "ratio",
        **{arm: state.events[kind].of_arm(arm) for arm in (CONTROL, TREATMENT)},
        "low": _finite(low),
        "high": _finite(high),
        # 1/e is a p-value by Markov's inequality, and valid at every look because e is an e-process
        "p_value": min(1.0, math.exp(-float(log_e_value(epochs)))),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
