"""The arms of an A/B test: who gets which, and what has been counted in each.

A salted hash decides the arm, so that nobody is asked twice and nothing has to be remembered. All counts survive a
round trip through JSON.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from modelwright.serve.ab.statistics import Epoch, Moments

CONTROL, TREATMENT = "A", "B"

_BITS = 53
"""Bits of the hash that are used: as many as a float holds exactly."""


@dataclass(frozen=True)
class Assignment:
    """The arm of one request. unit: the pseudonym of its user or session; share: of units that get B at that moment."""

    experiment: str
    unit: str
    arm: str
    share: float


def position(salt: str, unit: str) -> float:
    """A number in [0, 1) that belongs to a unit: uniform over units, and another one under another salt."""
    digest = hashlib.sha256(f"{salt}\0{unit}".encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8], "big") >> (64 - _BITS)) / 2**_BITS


def arm_of(salt: str, unit: str, share: float) -> str:
    """The arm of a unit when B has this share of them. As the share grows, units change from A to B and none back."""
    return TREATMENT if position(salt, unit) < share else CONTROL


LATENCY_SAMPLE = 100
"""Answers of A from which the threshold for slow ones is taken; it does not change afterwards."""

SLOW_QUANTILE = 0.95

SEEN, FAILED, SLOW, RATED = 1, 2, 4, 8
"""Bits that record which events a unit has already had."""

EventKind = Literal["seen", "failed", "slow"]


@dataclass(frozen=True, kw_only=True)
class RequestEvent:
    """A finished request. latency_s: None without a whole answer; is_error: the server could not answer."""

    arm: str
    share: float
    is_error: bool
    latency_s: float | None


@dataclass(kw_only=True)
class EventCounts:
    """Units with an event, for each share that B has had: `[share, units, units in B]`."""

    epochs: list[list[float]] = field(default_factory=list)

    def add(self, share: float, arm: str) -> None:
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
    """`requests` and `errors` count requests by arm, `events` units by kind; `scores`: of feedback, one for each unit;
    `latencies`: of A, until there are enough of them for `slow_s`.
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
    """Copies of requests to B by what became of them."""

    def take_request(self, event: RequestEvent, had: int) -> int:
        """Count a request. had: what its unit has had before; returns what it has had now."""
        self.requests[event.arm] += 1
        self.errors[event.arm] += event.is_error
        has = had | SEEN | (FAILED if event.is_error else 0)
        if event.latency_s is not None:
            has |= self._take_latency(event.arm, event.latency_s)
        for bit, kind in ((SEEN, "seen"), (FAILED, "failed"), (SLOW, "slow")):
            if has & bit and not had & bit:
                self.events[kind].add(event.share, event.arm)
        return has

    def take_score(self, arm: str, score: float, had: int) -> int:
        """Count feedback; the first of a unit alone, because later ones are no independent observations."""
        if not had & RATED:
            self.scores[arm].add(score)
        return had | RATED

    def take_shadow(self, what: str) -> None:
        self.shadows[what] = self.shadows.get(what, 0) + 1
        if what in ("answered", "failed"):
            self.requests[TREATMENT] += 1
            self.errors[TREATMENT] += what == "failed"

    def _take_latency(self, arm: str, latency_s: float) -> int:
        """`SLOW` for a slow answer once it is known what that is."""
        if self.slow_s is not None:
            return SLOW if latency_s > self.slow_s else 0
        if arm == CONTROL:
            self.latencies.append(latency_s)
        if len(self.latencies) == LATENCY_SAMPLE:
            self.slow_s = sorted(self.latencies)[math.ceil(SLOW_QUANTILE * LATENCY_SAMPLE) - 1]
            self.latencies = []
        return 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "ExperimentState":
        fields: dict[str, Any] = json.loads(text)
        fields["events"] = {kind: EventCounts(**counts) for kind, counts in fields["events"].items()}
        fields["scores"] = {arm: Moments(**moments) for arm, moments in fields["scores"].items()}
        return cls(**fields)
