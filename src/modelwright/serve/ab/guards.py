"""When B goes: guards that hold at every moment, and a check of the experiment itself before any of them."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from modelwright.serve.ab.assignment import CONTROL, TREATMENT
from modelwright.serve.ab.sequential import ALL_RATIOS, WORSE_RATIOS, difference_interval, log_e_rate, log_e_value
from modelwright.serve.ab.state import ExperimentState

GUARD_ALPHA = 0.001
"""The probability that a guard ever takes a version away that is not worse. There are four guards and the check, so a
version as good as A stays with a probability of at least 99.5%."""

REPORT_ALPHA = 0.05
"""The probability that an interval on the page ever misses the truth."""


@dataclass(frozen=True, kw_only=True)
class GuardLimits:
    """`max_error_rate`: of requests to B, whatever A's is."""

    max_error_rate: float


Guard = Callable[[ExperimentState, GuardLimits], bool]


def mismatch(state: ExperimentState) -> bool:
    """Whether the numbers of units in the arms contradict the shares: then requests of an arm get lost, and nothing
    else that the test says can be trusted.
    """
    return _exceeds(float(log_e_value(state.events["seen"].as_epochs(), ALL_RATIOS)))


def _too_many_errors(state: ExperimentState, limits: GuardLimits) -> bool:
    return _exceeds(float(log_e_rate(state.requests[TREATMENT], state.errors[TREATMENT], limits.max_error_rate)))


def _more_errors(state: ExperimentState, limits: GuardLimits) -> bool:
    return _exceeds(float(log_e_value(state.events["failed"].as_epochs(), WORSE_RATIOS)))


def _slower(state: ExperimentState, limits: GuardLimits) -> bool:
    return _exceeds(float(log_e_value(state.events["slow"].as_epochs(), WORSE_RATIOS)))


def _rated_worse(state: ExperimentState, limits: GuardLimits) -> bool:
    return difference_interval(state.scores[CONTROL], state.scores[TREATMENT], GUARD_ALPHA)[1] < 0


GUARDS: dict[str, Guard] = {
    "error_limit": _too_many_errors,
    "errors": _more_errors,
    "latency": _slower,
    "quality": _rated_worse,
}
"""Each by the name that the status gives as the reason for a rollback."""


def verdict(state: ExperimentState, limits: GuardLimits) -> str:
    """Why B has to go: "sample_ratio" or the name of a guard; "" if it may stay."""
    if mismatch(state):
        return "sample_ratio"
    return next((name for name, guard in GUARDS.items() if guard(state, limits)), "")


def _exceeds(log_e: float) -> bool:
    return log_e >= math.log(1 / GUARD_ALPHA)
