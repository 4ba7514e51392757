"""Routing of requests to engines, and the budget of retries. Each engine has a circuit breaker, and one that is much
slower than the others is ejected.

Constants are those of Envoy's outlier detection where it has them. `handle` detects engines that have died or hang; a
restarted one begins half open, with one answer at a time.
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
"""Duration of an ejection, times the number of recent ejections of the engine (Envoy: base_ejection_time) ..."""
LONGEST_EJECTION_S = 300.0
"""... up to this maximum (Envoy: max_ejection_time). An engine that was closed for this time starts from one again."""
MOST_EJECTED = 0.5
"""Largest share of the engines that may be ejected at once. Envoy's 10% would be less than one of a few engines."""

STEPS_OF_WINDOW = 32
SLOW_FACTOR = 3.0
"""An engine is slow if the median of its steps exceeds this multiple of the others' median, and of its own full step,
which was measured at its start. The second bound allows for different work: one engine may decode while another reads
long prompts."""

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
"""Reasons for an ejection, as named in the log and the metric modelwright_engine_ejections."""


class Breaker:
    """The circuit breaker of one engine. Closed: it gets answers. Open: it gets none for a time. Half open: it gets one
    request at a time, until one of them has been answered.
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
        """Records a complete answer."""
        self._num_failures = 0
        if self.state == "half_open":  # while it is open, answers that began before prove nothing
            self._opens_again_at, self._closed_at = None, self._clock()

    def fail(self) -> bool:
        """Records a failed answer. Returns whether the engine should be ejected."""
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
    """Consecutive steps of an engine. median_s: median of their durations; began_at: start of the first."""

    began_at: float
    median_s: float


@dataclass
class Pace:
    """The steps of an engine, in windows. `last`: last complete window, None before the first."""

    began_at: float = 0.0
    steps: list[float] = field(default_factory=list)
    last: StepWindow | None = None


class EngineHealth:
    """The health of all engines of a pool, by their numbers. on_ejection: called for every ejection."""

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
        """Returns the running engines that may get a request. loads: their outstanding tokens."""
        states = {number: self.state(number) for number in loads}
        allowed = [n for n, state in states.items() if state == "closed" or (state == "half_open" and not loads[n])]
        return allowed or list(loads)  # a doubtful engine is better than none

    def answered(self, number: int, *, is_good: bool) -> None:
        """Records that an engine has finished an answer, or failed to."""
        if is_good:
            self._breakers[number].succeed()
        elif self._breakers[number].fail():
            self._eject(number, "failures")

    def stepped(self, number: int, step_s: float, full_step_s: float) -> None:
        """Records a step of an engine. full_step_s: see `SLOW_FACTOR`."""
        own = self._paces[number]
        if not own.steps:
            own.began_at = self._clock() - step_s
        own.steps.append(step_s)
        if len(own.steps) < STEPS_OF_WINDOW:
            return
        own.last = window = StepWindow(own.began_at, statistics.median(own.steps))
        own.steps.clear()
        # Compared with windows of others that began later: while a slow engine fills one, busy others fill several. If
        # the whole machine becomes slow, none does.
        lasts = [pace.last for other, pace in self._paces.items() if other != number]
        others = [last.median_s for last in lasts if last is not None and last.began_at > window.began_at]
        if others and window.median_s > SLOW_FACTOR * max(full_step_s, statistics.median(others)):
            self._eject(number, "slow")

    def lost(self, number: int) -> None:
        """Records that another process replaces an engine. It has to prove itself with one answer."""
        self._breakers[number].half_open()
        self._paces[number] = Pace()

    def _eject(self, number: int, reason: EjectionReason) -> None:
        breaker = self._breakers[number]
        # counted with this engine; one that is half open is out already, so opening it again takes no other away
        num_out = 1 + sum(self.state(other) != "closed" for other in self._breakers if other != number)
        is_allowed = breaker.state == "half_open" or num_out <= MOST_EJECTED * len(self._breakers)
        if breaker.state != "open" and is_allowed:
            breaker.open()
            self._on_ejection(number, reason)


RETRY_SHARE = 0.1
"""Retries per request, as in the budgets of Finagle and Envoy: more would turn a fault into an overload."""
MAX_SAVED_RETRIES = 100.0


def cache_salt(job: Job) -> str:
    """Returns the salt of the prefix cache. Jobs with different salts do not share cached prompts."""
    return f"{job.cache_salt} {job.adapter}"


def prompt_key(prompt_ids: Sequence[int], salt: str, prefill_chunk: int) -> bytes:
    """Returns a key that is equal for prompts which can share the first chunk in the prefix cache."""
    return salt.encode() + array("q", prompt_ids[:prefill_chunk]).tobytes()


def choose_engine(loads: Mapping[int, int], key: bytes, tie_tokens: int, draw: random.Random) -> int:
    """Returns the less loaded of two random engines (power of two choices, Mitzenmacher 2001). If their loads differ by
    at most `tie_tokens`, returns the one that rendezvous hashing assigns to the key, because it may have the prompt in
    its cache. loads: outstanding tokens by engine.
    """
    pair = draw.sample(sorted(loads), min(2, len(loads)))
    lightest, heaviest = min(pair, key=loads.__getitem__), max(pair, key=loads.__getitem__)
    if loads[heaviest] - loads[lightest] > tie_tokens:
        return lightest
    return max(pair, key=lambda number: hashlib.sha256(key + b"%d" % number).digest())


@dataclass
class Router:
    """Chooses an engine for each request. _chunk: prefill chunk, in multiples of which prompts are cached."""

    _health: EngineHealth
    _chunk: int
    _draw: random.Random = field(default_factory=lambda: random.Random(0))

    def choose(self, loads: Mapping[int, int], job: Job) -> int:
        """Returns the number of an engine. loads: outstanding tokens of all running engines, at least one."""
        if len(loads) == 1:
            return next(iter(loads))
        allowed = {number: loads[number] for number in self._health.candidates(loads)}
        # a prompt within one chunk is not cached, so its place does not matter
        tie_tokens = self._chunk if len(job.prompt_ids) > self._chunk else 0
        return choose_engine(allowed, prompt_key(job.prompt_ids, cache_salt(job), self._chunk), tie_tokens, self._draw)


@dataclass
class RetryBudget:
    """Allows one retry at first, and `RETRY_SHARE` of a retry more with every request."""

    _balance: float = 1.0

    def note_request(self) -> None:
        self._balance = min(MAX_SAVED_RETRIES, self._balance + RETRY_SHARE)

    def take(self) -> bool:
        """Returns whether another retry is allowed, and counts it."""
        is_allowed = self._balance >= 1
        self._balance -= is_allowed
        return is_allowed
