"""Guards that roll B back. They are valid at every moment, and a check of the experiment itself precedes them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import SupportsFloat

from modelwright.core.event_log import EventKind
from modelwright.serve.ab.state import CONTROL, TREATMENT, ExperimentState
from modelwright.serve.ab.statistics import difference_interval, log_e_rate, log_e_value

GUARD_ALPHA = 0.001
"""Probability that a guard ever rolls back a version that is not worse. With four guards and the check, a version as
good as A stays with a probability of at least 99.5% (union bound)."""
REPORT_ALPHA = 0.05
"""Probability that an interval on the page ever misses the true value."""


@dataclass(frozen=True, kw_only=True)
class GuardLimits:
    """Limits that a test sets. `max_error_rate`: highest allowed error rate of requests to B, whatever A's is."""

    max_error_rate: float


@dataclass(frozen=True)
class Guard:
    """A condition that rolls B back."""

    fires: Callable[[ExperimentState, GuardLimits], bool]
    kind: EventKind


def mismatch(state: ExperimentState) -> bool:
    """Returns whether the numbers of units in the arms contradict the shares (sample ratio mismatch). Requests of one
    arm get lost then, and no other figure of the test can be trusted.
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
"""Guards by name. The name is the reason for a rollback in the test's status."""
REASONS: Mapping[str, EventKind] = {
    SAMPLE_RATIO: EventKind(
        "the arms have other shares of units than the test gives them",
        "Requests of one arm get lost, by a proxy, a cache or a client that tries again, so that no figure of the test "
        "can be trusted: see which are missing (modelwright requests export), and begin another test.",
    ),
    **{name: guard.kind for name, guard in GUARDS.items()},
}
"""Reasons for which the server ends a test on its own."""


def verdict(state: ExperimentState, limits: GuardLimits) -> str:
    """Returns the reason to roll B back, one of `REASONS`, or "" if B may stay."""
    # first, because with lost requests the figures that the guards compare are biased
    if mismatch(state):
        return SAMPLE_RATIO
    return next((name for name, guard in GUARDS.items() if guard.fires(state, limits)), "")


def _exceeds(log_e: SupportsFloat) -> bool:
    """Returns whether an e-value rejects its hypothesis. By Ville's inequality the level is `GUARD_ALPHA` at every
    moment.
    """
    return float(log_e) >= math.log(1 / GUARD_ALPHA)
