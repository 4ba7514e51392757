"""The arms of an A/B test: assignment of units to them, and the counts of each.

A salted hash decides the arm, so a unit keeps its arm without any table of assignments. All counts survive a round trip
through JSON.

The guards that roll B back are valid at every moment, and a check of the experiment itself precedes them.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, SupportsFloat

from modelwright.core.records import EventKind
from modelwright.serve.ab.statistics import Epoch, Moments, difference_interval, log_e_rate, log_e_value

CONTROL, TREATMENT = "A", "B"

_BITS = 53
"""Bits of the hash that are used: the width of a float's mantissa, so that every position is exact."""


@dataclass(frozen=True)
class Assignment:
    """The arm of one request. unit: pseudonym of its user or session; share: share of units that got B at that time."""

    experiment: str
    unit: str
    arm: str
    share: float


def position(salt: str, unit: str) -> float:
    """Returns the number in [0, 1) of a unit: uniform over units, and independent under different salts."""
    digest = hashlib.sha256(f"{salt}\0{unit}".encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8], "big") >> (64 - _BITS)) / 2**_BITS


def arm_of(salt: str, unit: str, share: float) -> str:
    """Returns the arm of a unit at B's current share. As the share grows, units move from A to B and never back."""
    return TREATMENT if position(salt, unit) < share else CONTROL


LATENCY_SAMPLE = 100
"""Number of A's first answers whose latencies set the threshold for slow ones, which stays fixed afterwards."""

SLOW_QUANTILE = 0.95

SEEN, FAILED, SLOW, RATED = 1, 2, 4, 8
"""Bits that record which events a unit has already had."""


@dataclass(frozen=True, kw_only=True)
class RequestEvent:
    """A finished request. latency_s: None for an incomplete answer; is_error: the server failed to answer."""

    arm: str
    share: float
    is_error: bool
    latency_s: float | None


@dataclass(kw_only=True)
class EventCounts:
    """Units with an event, for each share that B has had: `[share, units, units in B]`."""

    epochs: list[list[float]] = field(default_factory=list)

    def add(self, share: float, arm: str) -> None:
        # the probability of B under no effect is the share, so counts under different shares cannot be pooled
        if not self.epochs or self.epochs[-1][0] != share:
            self.epochs.append([share, 0, 0])
        self.epochs[-1][1] += 1
        self.epochs[-1][2] += arm == TREATMENT

    def as_epochs(self) -> list[Epoch]:
        return [Epoch(share, int(count), int(in_treatment)) for share, count, in_treatment in self.epochs]

    def of_arm(self, arm: str) -> int:
        in_treatment = sum(int(epoch[2]) for epoch in self.epochs)
        return in_treatment if arm == TREATMENT else sum(int(epoch[1]) for epoch in self.epochs) - in_treatment


@dataclass(kw_only=True)
class ExperimentState:
    """All counts of a test. `requests` and `errors` count requests by arm, `events` units by kind; `scores`: feedback
    scores, one per unit; `latencies`: A's latencies, kept until there are enough of them for `slow_s`.
    """

    requests: dict[str, int] = field(default_factory=lambda: {CONTROL: 0, TREATMENT: 0})
    errors: dict[str, int] = field(default_factory=lambda: {CONTROL: 0, TREATMENT: 0})
    events: dict[str, EventCounts] = field(
        default_factory=lambda: {"seen": EventCounts(), "failed": EventCounts(), "slow": EventCounts()}
    )
    scores: dict[str, Moments] = field(default_factory=lambda: {CONTROL: Moments(), TREATMENT: Moments()})
    latencies: list[float] = field(default_factory=list)
    slow_s: float | None = None
    shadows: dict[str, int] = field(default_factory=dict)
    """Number of copied requests by outcome."""

    def take_request(self, event: RequestEvent, had: int) -> int:
        """Counts a request. had: bits of the earlier events of its unit; returns them with those of this request."""
        self.requests[event.arm] += 1
        self.errors[event.arm] += event.is_error
        has = had | SEEN | (FAILED if event.is_error else 0)
        if event.latency_s is not None:
            if self.slow_s is not None:
                has |= SLOW if event.latency_s > self.slow_s else 0
            else:
                # the threshold comes from A alone, and no answer is judged slow before it is known
                if event.arm == CONTROL:
                    self.latencies.append(event.latency_s)
                if len(self.latencies) == LATENCY_SAMPLE:
                    self.slow_s = sorted(self.latencies)[math.ceil(SLOW_QUANTILE * LATENCY_SAMPLE) - 1]
                    self.latencies = []
        # a unit counts once per kind of event, because its requests are not independent
        for bit, kind in ((SEEN, "seen"), (FAILED, "failed"), (SLOW, "slow")):
            if has & bit and not had & bit:
                self.events[kind].add(event.share, event.arm)
        return has

    def take_score(self, arm: str, score: float, had: int) -> int:
        """Counts the first feedback of a unit. Later ones are ignored, because they are not independent of it."""
        if not had & RATED:
            self.scores[arm].add(score)
        return had | RATED

    def take_shadow(self, outcome: str) -> None:
        self.shadows[outcome] = self.shadows.get(outcome, 0) + 1
        if outcome in ("answered", "failed"):
            self.requests[TREATMENT] += 1
            self.errors[TREATMENT] += outcome == "failed"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "ExperimentState":
        fields: dict[str, Any] = json.loads(text)
        fields["events"] = {kind: EventCounts(**counts) for kind, counts in fields["events"].items()}
        fields["scores"] = {arm: Moments(**moments) for arm, moments in fields["scores"].items()}
        return cls(**fields)


GUARD_ALPHA = 0.001
"""Probability that a guard ever rolls back a version that is not worse. With four guards and the check, a version as
good as A stays with a probability of at least 99.5% (union bound)."""
REPORT_ALPHA = 0.05
"""Probability that an interval on the page ever misses the true value."""


@dataclass(frozen=True)
class Guard:
    """A condition that rolls B back. fires: takes the counts and the highest allowed error rate of requests to B."""

    fires: Callable[[ExperimentState, float], bool]
    kind: EventKind


def mismatch(state: ExperimentState) -> bool:
    """Returns whether the numbers of units in the arms contradict the shares (sample ratio mismatch). Requests of one
    arm get lost then, and no other figure of the test can be trusted.
    """
    return _exceeds(log_e_value(state.events["seen"].as_epochs()))


SAMPLE_RATIO = "sample_ratio"
GUARDS: dict[str, Guard] = {
    "error_limit": Guard(
        lambda state, max_error_rate: _exceeds(
            log_e_rate(state.requests[TREATMENT], state.errors[TREATMENT], max_error_rate)
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


def verdict(state: ExperimentState, max_error_rate: float) -> str:
    """Returns the reason to roll B back, one of `REASONS`, or "" if B may stay. max_error_rate: highest allowed error
    rate of requests to B, whatever A's is.
    """
    # first, because with lost requests the figures that the guards compare are biased
    if mismatch(state):
        return SAMPLE_RATIO
    return next((name for name, guard in GUARDS.items() if guard.fires(state, max_error_rate)), "")


def _exceeds(log_e: SupportsFloat) -> bool:
    """Returns whether an e-value rejects its hypothesis. By Ville's inequality the level is `GUARD_ALPHA` at every
    moment.
    """
    return float(log_e) >= math.log(1 / GUARD_ALPHA)
