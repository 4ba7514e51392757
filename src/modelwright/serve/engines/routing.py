"""Which engine gets a request, and how many requests may be tried again. Each engine has a circuit breaker, and one
that is much slower than the others is ejected.

Constants are those of Envoy's outlier detection where it has them. That an engine has died or hangs is found elsewhere
(`handle`); here it counts as a failure, after which one answer at a time is tried.
"""

import hashlib
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from modelwright.core.event_log import EventKind
from modelwright.serve.engines.jobs import Job

FAILURES_TO_OPEN = 5
"""Failed answers in a row that open a breaker (Envoy: consecutive_5xx)."""

EJECTION_S = 30.0
"""An engine is left out for so long, times the number of its recent ejections (Envoy: base_ejection_time) ..."""

LONGEST_EJECTION_S = 300.0
"""... but for no longer (Envoy: max_ejection_time). Ejections before a good time of this length are forgotten."""

MOST_EJECTED = 0.5
"""Share of the engines that may be left out at once. Envoy's 10% would be none of a few."""

STEPS_OF_WINDOW = 32
SLOW_FACTOR = 3.0
"""An engine is slow if the median of its steps is so many times that of the others, and of a full step of its own that
was measured at its start. The second bound lets engines differ in what they are asked: one may decode while another
reads long prompts."""

Clock = Callable[[], float]
BreakerState = Literal["closed", "open", "half_open"]
EjectionReason = Literal["failures", "slow"]
EJECTIONS: Mapping[EjectionReason, EventKind] = {
    "failures": EventKind(
        "an engine gets no new answers for a while, because its last ones have failed",
        "Its process meets an error that others do not, most often for lack of memory: it is in the server's log. "
        "Lower serve.engine.kv_cache_tokens or serve.engine.max_num_seqs.",
    ),
    "slow": EventKind(
        "an engine gets no new answers for a while, because it is much slower than the others",
        "Other processes take its cores: look at the load (modelwright doctor), and give the server at most as many "
        "engines as cores (serve.engines).",
    ),
}
"""The log and the metric modelwright_engine_ejections name them."""


class Breaker:
    """The circuit breaker of one engine. Closed: it takes answers. Open: it takes none for a time. Half open: it takes
    one request at a time, until one of them has been answered.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._num_failures = 0
        self._num_openings = 0
        self._closed_at = clock()
        self._opens_again_at: float | None = None  # None while it is closed

    @property
    def state(self) -> BreakerState:
        if self._opens_again_at is None:
            return "closed"
        return "open" if self._clock() < self._opens_again_at else "half_open"

    def succeed(self) -> None:
        """Record a complete answer. One that began before the breaker opened proves nothing while it is open."""
        self._num_failures = 0
        if self.state == "half_open":
            self._opens_again_at, self._closed_at = None, self._clock()

    def fail(self) -> bool:
        """An answer has failed; returns whether the engine should be ejected for it."""
        self._num_failures += 1
        return self.state == "half_open" or self._num_failures >= FAILURES_TO_OPEN

    def open(self) -> None:
        if self.state == "closed" and self._clock() - self._closed_at > LONGEST_EJECTION_S:
            self._num_openings = 0
        self._num_openings += 1
        self._num_failures = 0
        self._opens_again_at = self._clock() + min(EJECTION_S * self._num_openings, LONGEST_EJECTION_S)

    def half_open(self) -> None:
        self._num_failures = 0
        self._opens_again_at = self._clock()


@dataclass(frozen=True)
class StepWindow:
    """Some steps of an engine, one after the other. median_s: of how long they took; began_at: the first."""

    began_at: float
    median_s: float


@dataclass
class Pace:
    """The steps of an engine, in windows. `last`: the last whole window, None before there is one."""

    began_at: float = 0.0
    steps: list[float] = field(default_factory=list)
    last: StepWindow | None = None

    def add(self, step_s: float, now: float) -> StepWindow | None:
        """The window that is whole with this step, if one is."""
        if not self.steps:
            self.began_at = now - step_s
        self.steps.append(step_s)
        if len(self.steps) < STEPS_OF_WINDOW:
            return None
        self.last = StepWindow(self.began_at, statistics.median(self.steps))
        self.steps.clear()
        return self.last


class EngineHealth:
    """The health of all engines of a pool, by their numbers. on_ejection: is told of every ejection."""

    def __init__(
        self, numbers: Iterable[int], on_ejection: Callable[[int, EjectionReason], None], clock: Clock = time.monotonic
    ) -> None:
        self._clock = clock
        self._on_ejection = on_ejection
        self._breakers = {number: Breaker(clock) for number in numbers}
        self._paces = {number: Pace() for number in self._breakers}

    def state(self, number: int) -> BreakerState:
        return self._breakers[number].state

    def candidates(self, loads: Mapping[int, int]) -> list[int]:
        """Those of the running engines that may get a request. loads: their outstanding tokens. If none may, all of
        them: a doubtful engine is better than none.
        """
        states = {number: self.state(number) for number in loads}
        allowed = [n for n, state in states.items() if state == "closed" or (state == "half_open" and not loads[n])]
        return allowed or list(loads)

    def answered(self, number: int, *, is_good: bool) -> None:
        """An engine has finished an answer, or has failed at it."""
        if is_good:
            self._breakers[number].succeed()
        elif self._breakers[number].fail():
            self._eject(number, "failures")

    def stepped(self, number: int, step_s: float, full_step_s: float) -> None:
        """An engine has computed for a step. full_step_s: see `SLOW_FACTOR`.

        It is compared with what others did in the same time: while an engine that is slow fills a window, others that
        are busy fill several. If the whole machine becomes slow, none does.
        """
        window = self._paces[number].add(step_s, self._clock())
        if window is None:
            return
        lasts = [pace.last for other, pace in self._paces.items() if other != number]
        others = [last.median_s for last in lasts if last is not None and last.began_at > window.began_at]
        if others and window.median_s > SLOW_FACTOR * max(full_step_s, statistics.median(others)):
            self._eject(number, "slow")

    def lost(self, number: int) -> None:
        """Another process takes an engine's place; it has to prove itself with one answer."""
        self._breakers[number].half_open()
        self._paces[number] = Pace()

    def _eject(self, number: int, reason: EjectionReason) -> None:
        breaker = self._breakers[number]
        num_out = 1 + sum(self.state(other) != "closed" for other in self._breakers if other != number)
        is_allowed = breaker.state == "half_open" or num_out <= MOST_EJECTED * len(self._breakers)
        if breaker.state != "open" and is_allowed:
            breaker.open()
            self._on_ejection(number, reason)


RETRY_SHARE = 0.1
"""Retries per request, as in the budgets of Finagle and Envoy: more would turn a fault into an overload."""

MAX_SAVED_RETRIES = 100.0


def cache_salt(job: Job) -> str:
    """Jobs that differ in it share no cached prompts."""
    return f"{job.cache_salt} {job.adapter}"


def prompt_key(prompt_ids: Sequence[int], salt: str, prefill_chunk: int) -> bytes:
    """Equal for prompts that can share the beginning of the prefix cache; salt: differs for those that cannot."""
    return salt.encode() + array("q", prompt_ids[:prefill_chunk]).tobytes()


def choose_engine(loads: Mapping[int, int], key: bytes, tie_tokens: int, draw: random.Random) -> int:
    """One of the engines in `loads`, which has the outstanding tokens of each: the less loaded of two that are drawn
    (power of two choices, Mitzenmacher 2001). When they differ by at most `tie_tokens`, the one to which the key
    belongs by rendezvous hashing, because it may have the prompt in its cache.
    """
    pair = draw.sample(sorted(loads), min(2, len(loads)))
    lightest, heaviest = min(pair, key=loads.__getitem__), max(pair, key=loads.__getitem__)
    if loads[heaviest] - loads[lightest] > tie_tokens:
        return lightest
    return max(pair, key=lambda number: hashlib.sha256(key + b"%d" % number).digest())


class Router:
    """Gives each request an engine that may take it. prefill_chunk: tokens in whose multiples prompts are cached."""

    def __init__(self, health: EngineHealth, prefill_chunk: int) -> None:
        self._health = health
        self._chunk = prefill_chunk
        self._draw = random.Random(0)

    def choose(self, loads: Mapping[int, int], job: Job) -> int:
        """The number of an engine. loads: outstanding tokens of those that run, at least one."""
        if len(loads) == 1:
            return next(iter(loads))
        allowed = {number: loads[number] for number in self._health.candidates(loads)}
        tie_tokens = self._chunk if len(job.prompt_ids) > self._chunk else 0
        return choose_engine(allowed, prompt_key(job.prompt_ids, cache_salt(job), self._chunk), tie_tokens, self._draw)


class RetryBudget:
    """Allows one retry at first, and `RETRY_SHARE` of a retry more with every request."""

    def __init__(self) -> None:
        self._balance = 1.0

    def note_request(self) -> None:
        self._balance = min(MAX_SAVED_RETRIES, self._balance + RETRY_SHARE)

    def take(self) -> bool:
        """Whether one more retry is allowed; it counts then."""
        is_allowed = self._balance >= 1
        self._balance -= is_allowed
        return is_allowed
