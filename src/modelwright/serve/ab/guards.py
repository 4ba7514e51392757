"""When B goes: guards that hold at every moment, and a check of the experiment itself before any of them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import SupportsFloat

from modelwright.core.event_log import EventKind
from modelwright.serve.ab.state import CONTROL, TREATMENT, ExperimentState
from modelwright.serve.ab.statistics import difference_interval, log_e_rate, log_e_value

GUARD_ALPHA = 0.001
"""The probability that a guard ever takes a version away that is not worse. There are four guards and the check, so a
version as good as A stays with a probability of at least 99.5%."""

REPORT_ALPHA = 0.05
"""The probability that an interval on the page ever misses the truth."""


@dataclass(frozen=True, kw_only=True)
class GuardLimits:
    """`max_error_rate`: of requests to B, whatever A's is."""

    max_error_rate: float


@dataclass(frozen=True)
class Guard:
    """One reason for which B goes."""

    fires: Callable[[ExperimentState, GuardLimits], bool]
    kind: EventKind


def mismatch(state: ExperimentState) -> bool:
    """Whether the numbers of units in the arms contradict the shares: then requests of an arm get lost, and nothing
    else that the test says can be trusted.
    """
    return _exceeds(log_e_value(state.events["seen"].as_epochs()))


SAMPLE_RATIO = "sample_ratio"
GUARDS: dict[str, Guard] = {
    "error_limit": Guard(
        lambda state, limits: _exceeds(
            log_e_rate(state.requests[TREATMENT], state.errors[TREATMENT], limits.max_error_rate)
        ),
        EventKind(
            "more requests of B end with an error than the test allows",
            "B fails by itself, whatever A does: its errors are in the server's log. Judge it on the frozen benchmark "
            "before another test (modelwright continual gate).",
        ),
    ),
    "errors": Guard(
        lambda state, _: _exceeds(log_e_value(state.events["failed"].as_epochs(), one_sided=True)),
        EventKind(
            "more requests of B than of A end with an error",
            "Requests that A answers are too long or too many for B, or B is damaged: its errors are in the server's "
            "log. Compare both on the same records (modelwright compare).",
        ),
    ),
    "latency": Guard(
        lambda state, _: _exceeds(log_e_value(state.events["slow"].as_epochs(), one_sided=True)),
        EventKind(
            "B answers more slowly than A",
            "B is larger or in a slower format, or two models are too much for the machine: see what it can do "
            "(modelwright doctor), and quantize B (modelwright export).",
        ),
    ),
    "quality": Guard(
        lambda state, _: difference_interval(state.scores[CONTROL], state.scores[TREATMENT], GUARD_ALPHA)[1] < 0,
        EventKind(
            "users rate B's answers lower than A's",
            "Compare both on the same records (modelwright compare), and train on examples of what was rated lower "
            "(modelwright continual run).",
        ),
    ),
}
"""Each by the name that the status gives as the reason for a rollback."""
REASONS: Mapping[str, EventKind] = {
    SAMPLE_RATIO: EventKind(
        "the arms have other shares of units than the test gives them",
        "Requests of one arm get lost, by a proxy, a cache or a client that tries again, so that no figure of the test "
        "can be trusted: see which are missing (modelwright requests export), and begin another test.",
    ),
    **{name: guard.kind for name, guard in GUARDS.items()},
}
"""All reasons for which a test ends by itself."""


def verdict(state: ExperimentState, limits: GuardLimits) -> str:
    """Why B has to go, one of `REASONS`; "" if it may stay."""
    if mismatch(state):
        return SAMPLE_RATIO
    return next((name for name, guard in GUARDS.items() if guard.fires(state, limits)), "")


def _exceeds(log_e: SupportsFloat) -> bool:
    """Whether an e-value refutes its hypothesis: by Ville's inequality, at a level of `GUARD_ALPHA` at every moment."""
    return float(log_e) >= math.log(1 / GUARD_ALPHA)
