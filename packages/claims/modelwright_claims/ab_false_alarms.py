"""Claim: A/B tests of equal versions, looked at after every event, raise a false alarm in at most 5% of runs.

The traffic is made up; every decision is the server's own code: who gets which arm (`arm_of`), the counting
(`ExperimentState`), when a version is withdrawn (`verdict`), and the intervals on the page shows. Both arms are the
same, with sessions whose requests resemble each other, outages that hit both, and in half of the runs a share of B
that grows while the test runs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from modelwright.core.config import derive_seed
from modelwright.serve.ab.experiment import (
    CONTROL,
    REPORT_ALPHA,
    TREATMENT,
    ExperimentState,
    RequestEvent,
    arm_of,
    verdict,
)
from modelwright.serve.ab.statistics import BURN_IN, difference_interval, log_e_value, two_proportions, welch
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared, described
from modelwright_claims.judging import Judgment
from modelwright_claims.product_runs import side_by_side
from modelwright_claims.statistics import share

MOST_ALARMS = 5.0
"""Percent of runs, for each interval."""
MOST_ROLLBACKS = 0.5
"""Percent of runs, for all guards together: what `GUARD_ALPHA` promises."""
MAX_ERROR_RATE = 0.02
SHARES = ((0.5, 0.5), (0.1, 0.5))
"""B's share in the first third of a run and afterwards; runs take them in turn."""
ALARM, ROLLED_BACK, REPEATED = "false alarm, ", "rolled back", "repeated fixed-number test, "
UNITS, ERRORS, LATENCY, SCORES = "units by arm", "errors", "slow answers", "feedback"
SEQUENTIAL = (UNITS, ERRORS, LATENCY, SCORES)
AT_ONCE = 2
FIRST_RUN, NUM_RUNS = 1000, 3000
"""Fixed beforehand: so many runs that a true share of 4% is told from 5%. Earlier measurements had runs below 1000."""


@dataclass(frozen=True)
class Sign:
    """A sign that a test would be stopped with a finding now. count: changes whenever its inputs do."""

    count: Callable[[ExperimentState], int]
    fires: Callable[[ExperimentState], bool]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The requests of one run. Arrays have one value for each request, in order of time."""

    units: Sequence[str]
    shares: np.ndarray
    is_error: np.ndarray
    latency_s: np.ndarray
    scores: np.ndarray
    """The scores of feedback; NaN for requests without any."""


@dataclass(frozen=True)
class AaRun:
    """A run by its number, which decides its traffic."""

    number: int
    num_requests: int


def measure(setting: Setting) -> Measurement:
    num_runs, num_requests = (40, 400) if setting.quick else (NUM_RUNS, 2000)
    runs = [AaRun(FIRST_RUN + number, num_requests) for number in range(num_runs)]
    outcomes = side_by_side(setting, outcome_of, runs, at_once=AT_ONCE)
    samples = {name: [outcome[name] for outcome in outcomes] for name in outcomes[0]}
    return Measurement(
        samples=samples,
        conditions=described(__name__)
        | {
            "runs": num_runs,
            "requests of a run": num_requests,
            "level of intervals": REPORT_ALPHA,
        },
    )


def outcome_of(run: AaRun) -> dict[str, float]:
    """1 for each sign that ever fired in a run, 0 for the others."""
    return look_at_every_event(made_up_traffic(run.number, run.num_requests))


def made_up_traffic(number: int, num_requests: int) -> Traffic:
    """Sessions of 1 to about 10 requests that overlap; draws for a session hold for all of its requests."""
    draw = np.random.default_rng(derive_seed(number, "A/A traffic"))
    begins = np.sort(draw.random(num_requests) * num_requests)
    lengths = draw.geometric(0.4, num_requests)
    sessions = np.repeat(np.arange(num_requests), lengths)
    times = np.repeat(begins, lengths) + draw.exponential(20.0, len(sessions))
    order = np.argsort(times, kind="stable")[:num_requests]
    sessions, times = sessions[order], times[order]
    care = draw.beta(1.0, 250.0, num_requests)[sessions]
    is_outage = (times.astype(int) % 500) > 480
    mood = draw.beta(4.0, 2.0, num_requests)[sessions]
    rated = draw.random(num_requests) < 0.3
    first, later = SHARES[number % len(SHARES)]
    is_error = draw.random(num_requests) < np.where(is_outage, 0.05, care)
    latency_s = np.exp(draw.normal(0.0, 0.4, num_requests) + draw.normal(0.0, 0.3, num_requests)[sessions])
    return Traffic(
        units=[f"run {number}, session {session}" for session in sessions],
        shares=np.where(np.arange(num_requests) < num_requests // 3, first, later),
        is_error=is_error,
        latency_s=np.where(is_error, np.nan, latency_s),
        scores=np.where(rated, np.where(draw.random(num_requests) < mood, 1.0, -1.0), np.nan),
    )


def look_at_every_event(traffic: Traffic) -> dict[str, float]:
    """Count a run's requests and look after each event: 1 for each sign that ever alarmed, 0 for the others.

    Counting continues after an alarm. A sign is a function of one part of the state, so it is asked when that part has
    changed.
    """
    state, had = ExperimentState(), dict[str, int]()
    fired, seen = dict.fromkeys(SIGNS, 0.0), dict.fromkeys(SIGNS, -1)

    def look() -> None:
        for name, sign in SIGNS.items():
            count = sign.count(state)
            if count != seen[name] and not fired[name]:
                fired[name] = float(sign.fires(state))
            seen[name] = count

    for place, unit in enumerate(traffic.units):
        share_of_b, latency_s = float(traffic.shares[place]), float(traffic.latency_s[place])
        event = RequestEvent(
            arm=arm_of("salt", unit, share_of_b),
            share=share_of_b,
            is_error=bool(traffic.is_error[place]),
            latency_s=None if math.isnan(latency_s) else latency_s,
        )
        had[unit] = state.take_request(event, had.get(unit, 0))
        look()
        if not math.isnan(traffic.scores[place]):
            had[unit] = state.take_score(event.arm, float(traffic.scores[place]), had[unit])
            look()
    return fired


def _num_requests(state: ExperimentState) -> int:
    return sum(state.requests.values()) + _num_scores(state)


def _num_scores(state: ExperimentState) -> int:
    return sum(arm.count for arm in state.scores.values())


def _num_units(state: ExperimentState, *kinds: str) -> int:
    return sum(int(epoch[1]) for kind in kinds for epoch in state.events[kind].epochs)


def _events_differ(kind: str) -> "Sign":
    """The interval of the ratio of units with an event does not contain 1, or their numbers contradict the shares: both
    are that the e-value has reached 1 / alpha.
    """
    limit = math.log(1 / REPORT_ALPHA)
    return Sign(
        count=lambda state: _num_units(state, kind),
        fires=lambda state: float(log_e_value(state.events[kind].as_epochs())) >= limit,
    )


def _scores_differ(state: ExperimentState) -> bool:
    """The interval of the difference of means does not contain 0."""
    low, high = difference_interval(state.scores[CONTROL], state.scores[TREATMENT], REPORT_ALPHA)
    return low > 0 or high < 0


def _errors_by_fixed_number(state: ExperimentState) -> bool:
    arms = [(state.events["failed"].of_arm(arm), state.events["seen"].of_arm(arm)) for arm in (CONTROL, TREATMENT)]
    found = two_proportions(*arms) if min(count for _, count in arms) >= BURN_IN else None
    return found is not None and found.p_value < REPORT_ALPHA


def _scores_by_fixed_number(state: ExperimentState) -> bool:
    arms = [state.scores[arm] for arm in (CONTROL, TREATMENT)]
    found = welch(*arms) if min(arm.count for arm in arms) >= BURN_IN else None
    return found is not None and found.p_value < REPORT_ALPHA


SIGNS: Mapping[str, Sign] = {
    ALARM + UNITS: _events_differ("seen"),
    ALARM + ERRORS: _events_differ("failed"),
    ALARM + LATENCY: _events_differ("slow"),
    ALARM + SCORES: Sign(_num_scores, _scores_differ),
    ROLLED_BACK: Sign(_num_requests, lambda state: bool(verdict(state, MAX_ERROR_RATE))),
    REPEATED + ERRORS: Sign(lambda state: _num_units(state, "seen", "failed"), _errors_by_fixed_number),
    REPEATED + SCORES: Sign(_num_scores, _scores_by_fixed_number),
}
"""The checks that may fire at a look, by the name of their samples."""


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()
    limits = {**dict.fromkeys((ALARM + name for name in SEQUENTIAL), MOST_ALARMS), ROLLED_BACK: MOST_ROLLBACKS}
    for name, limit in limits.items():
        with judgment.part():
            alarms = share(samples[name])
            judgment.figures[name] = alarms.figure("% of runs")
            judgment.ask("", alarms, "%", "<=", limit, what=name, say=name + " in {0.mean:.1f}% of {0.count} runs")
    for name in (ERRORS, SCORES):
        say = f"a repeated fixed-number test of {name} alarms in {{0.mean:.0f}}%"
        judgment.note(REPEATED + name, lambda name=name: share(samples[REPEATED + name]), "% of runs", say=say)
    return judgment.verdict()


CLAIM = declared(__name__)
