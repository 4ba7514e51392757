"""An A/B test: its request, its state, its tables, whose functions belong to the database's thread, and its report.

A salted hash decides the arm, so a unit keeps its arm without any table of assignments. All counts survive a round trip
through JSON.

The guards that roll B back are valid at every moment, and a check of the experiment itself precedes them.
"""

import hashlib
import json
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Annotated, Any, Literal, SupportsFloat

from pydantic import Field

from modelwright.core.records import EventKind
from modelwright.serve.ab import statistics
from modelwright.serve.ab.statistics import Epoch, Moments, difference_interval, log_e_rate, log_e_value
from modelwright.serve.account.database import Database
from modelwright.serve.api.fields import RequestModel

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


Share = Annotated[float, Field(gt=0, lt=1)]


class ExperimentRequest(RequestModel):
    """POST /admin/ab. `path`: run or model folder of B; `share`: share of units that get B; `unit`: unit of
    randomization, which keeps its arm; `mode`: "split", or "shadow" to send B copies of requests and discard its
    answers; `max_error_rate`: error rate of requests to B above which it is rolled back, whatever A's is.
    """

    name: Annotated[str, Field(pattern="^[a-z0-9][a-z0-9-]{0,39}$")]
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    share: Share = 0.5
    unit: Literal["session", "user"] = "session"
    mode: Literal["split", "shadow"] = "split"
    max_error_rate: Annotated[float, Field(gt=0, le=0.5)] = 0.01


class ShareRequest(RequestModel):
    """POST /admin/ab/share."""

    share: Share


class EndRequest(RequestModel):
    """POST /admin/ab/end. `promote`: true puts B in service, false keeps A."""

    promote: bool


Status = Literal["running", "rolled_back", "ended", "promoted", "interrupted"]

_TABLES = (
    """CREATE TABLE IF NOT EXISTS experiments (
        name TEXT NOT NULL PRIMARY KEY, request TEXT NOT NULL, salt TEXT NOT NULL,
        share DOUBLE PRECISION NOT NULL, control_version TEXT NOT NULL, treatment_version TEXT NOT NULL,
        started_at DOUBLE PRECISION NOT NULL, ended_at DOUBLE PRECISION, status TEXT NOT NULL, reason TEXT NOT NULL,
        state TEXT NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS experiment_units (
        experiment TEXT NOT NULL, unit TEXT NOT NULL, had INTEGER NOT NULL, PRIMARY KEY (experiment, unit))""",
    """CREATE TABLE IF NOT EXISTS experiment_answers (
        id TEXT NOT NULL PRIMARY KEY, experiment TEXT NOT NULL, unit TEXT NOT NULL, arm TEXT NOT NULL)""",
)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A test with its state. `reason`: why the server ended it, "" if it runs or a user ended it."""

    name: str
    request: ExperimentRequest
    salt: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    share: float
    control_version: str
    treatment_version: str
    started_at: float = field(default_factory=time.time)
    ended_at: float | None = None
    status: Status = "running"
    reason: str = ""
    state: ExperimentState = field(default_factory=ExperimentState)


COLUMNS = tuple(field.name for field in fields(Experiment))


def create_tables(database: Database) -> None:
    for statement in _TABLES:
        database.execute(statement)


def insert(database: Database, experiment: Experiment) -> None:
    """Inserts a test. Its name must be unused."""
    plain = {name: getattr(experiment, name) for name in COLUMNS}
    plain |= {"request": experiment.request.model_dump_json(), "state": experiment.state.to_json()}
    names = ", ".join(f":{name}" for name in COLUMNS)
    database.execute(f"INSERT INTO experiments ({', '.join(COLUMNS)}) VALUES ({names})", plain)


def experiments(database: Database, status: str = "%") -> Iterator[Experiment]:
    """Yields the tests whose status matches an SQL pattern, newest first."""
    query = f"SELECT {', '.join(COLUMNS)} FROM experiments WHERE status LIKE :status ORDER BY started_at DESC"
    for row in database.rows(query, {"status": status}):
        plain = dict(zip(COLUMNS, row, strict=True))
        plain["request"] = ExperimentRequest.model_validate(json.loads(plain["request"]))
        yield Experiment(**{**plain, "state": ExperimentState.from_json(plain["state"])})


def find_running(database: Database, name: str = "") -> Experiment | None:
    """Returns the running test, or None if no test is running or its name is not `name`."""
    return next((test for test in experiments(database, "running") if name in ("", test.name)), None)


def take_request(database: Database, answer_id: str, assignment: Assignment, event: RequestEvent) -> str:
    """Counts a request. Returns the reason if a guard ended the test on it, else ""."""
    experiment = find_running(database, assignment.experiment)
    if experiment is None:  # requests that were assigned before the end may finish after it
        return ""
    _record(database, experiment.name, assignment.unit, lambda had: experiment.state.take_request(event, had))
    values = {"id": answer_id, "experiment": experiment.name, "unit": assignment.unit, "arm": assignment.arm}
    database.execute("INSERT INTO experiment_answers VALUES (:id, :experiment, :unit, :arm)", values)
    return _judge(database, experiment)


def take_score(database: Database, answer_id: str, score: float) -> tuple[bool, str, str]:
    """Counts feedback. Returns whether its answer is known, the test, and why that ended the test, else ""."""
    query = "SELECT experiment, unit, arm FROM experiment_answers WHERE id = :id"
    for name, unit, arm in list(database.rows(query, {"id": answer_id})):
        experiment = find_running(database, name)
        if experiment is None:
            return True, name, ""
        _record(database, name, unit, partial(experiment.state.take_score, arm, score))
        return True, name, _judge(database, experiment)
    return False, "", ""


def take_shadow(database: Database, name: str, outcome: str) -> str:
    """Counts the outcome of a copied request. Returns the reason if a guard ended the test on it, else ""."""
    experiment = find_running(database, name)
    if experiment is None:
        return ""
    experiment.state.take_shadow(outcome)
    return _judge(database, experiment)


def set_share(database: Database, name: str, share: float) -> bool:
    """Changes B's share of a test. Returns false if the test has ended."""
    statement = "UPDATE experiments SET share = :share WHERE name = :name AND status = 'running'"
    return database.execute(statement, {"share": share, "name": name}) > 0


def end(database: Database, name: str, status: Status, reason: str = "") -> bool:
    """Ends a test. Returns false if it has ended already. Rows of single units and answers are deleted, because the
    report needs only the counts.
    """
    values = {"name": name, "status": status, "reason": reason, "now": time.time()}
    statement = (
        "UPDATE experiments SET status = :status, reason = :reason, ended_at = :now "
        "WHERE name = :name AND status = 'running'"
    )
    if not database.execute(statement, values):
        return False
    for table in ("experiment_units", "experiment_answers"):
        database.execute(f"DELETE FROM {table} WHERE experiment = :name", {"name": name})
    return True


def _judge(database: Database, experiment: Experiment) -> str:
    values = {"state": experiment.state.to_json(), "name": experiment.name}
    database.execute("UPDATE experiments SET state = :state WHERE name = :name", values)
    reason = verdict(experiment.state, experiment.request.max_error_rate)
    if reason:
        end(database, experiment.name, "rolled_back", reason)
    return reason


def _record(database: Database, experiment: str, unit: str, take: Callable[[int], int]) -> None:
    """Updates the bits of a unit's events with a method of `ExperimentState`."""
    values: dict[str, Any] = {"experiment": experiment, "unit": unit}
    query = "SELECT had FROM experiment_units WHERE experiment = :experiment AND unit = :unit"
    had = take(next((had for (had,) in database.rows(query, values)), 0))
    statement = (
        "INSERT INTO experiment_units VALUES (:experiment, :unit, :had) "
        "ON CONFLICT (experiment, unit) DO UPDATE SET had = excluded.had"
    )
    database.execute(statement, {**values, "had": had})


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
    score_low, score_high = statistics.difference_interval(control, treatment, REPORT_ALPHA)
    # p-values for a fixed number of observations mislead whoever looks while the test runs, so they come after its end
    fixed_horizon: dict[str, Any] = {}
    if experiment.status != "running":
        rates = [(failed.of_arm(arm), seen.of_arm(arm)) for arm in (CONTROL, TREATMENT)]
        comparisons = {"failed": statistics.two_proportions(*rates), "score": statistics.welch(control, treatment)}
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
            "promised_requests": statistics.promised_requests(
                promised_rate, request.max_error_rate, GUARD_ALPHA, PROMISED_PROBABILITY
            ),
            "probability": PROMISED_PROBABILITY,
        },
        "fixed_horizon": fixed_horizon,
    }


def _events(state: ExperimentState, kind: str) -> dict[str, Any]:
    """Returns the units with an event, the interval of its rate ratio of B to A, and the p-value of equal rates."""
    epochs = state.events[kind].as_epochs()
    low, high = statistics.ratio_interval(epochs, REPORT_ALPHA)
    return {
        "name": kind,
        "kind": "ratio",
        **{arm: state.events[kind].of_arm(arm) for arm in (CONTROL, TREATMENT)},
        "low": _finite(low),
        "high": _finite(high),
        # 1/e is a p-value by Markov's inequality, and valid at every look because e is an e-process
        "p_value": min(1.0, math.exp(-float(statistics.log_e_value(epochs)))),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
