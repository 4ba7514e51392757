"""When spot instances are there: periods of presence and absence, generated or read from a trace."""

import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from modelwright.core.errors import ConfigError, DataError


@dataclass(frozen=True)
class Presence:
    """Instances are there for `up_s` seconds, then missing for `down_s`. Of the former, the job knows for the last
    `notice_s` seconds that they end: it saves what it has and stops.
    """

    up_s: float
    down_s: float
    notice_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PoissonInterruptions:
    """Interruptions at a constant rate; each is followed by an absence of constant length."""

    mtbf_s: float
    """Mean seconds between interruptions."""
    down_s: float = 0.0

    def periods(self, seed: int) -> Iterator[Presence]:
        draw = random.Random(seed)
        while True:
            yield Presence(draw.expovariate(1 / self.mtbf_s), self.down_s)


@dataclass(frozen=True, kw_only=True)
class BurstyInterruptions:
    """A Markov-modulated Poisson process with two states (Fischer and Meier-Hellstern 1993): calm, and bursts in which
    interruptions come faster.
    """

    calm_mtbf_s: float
    burst_mtbf_s: float
    calm_s: float
    """Mean length of a calm state."""
    burst_s: float
    """Mean length of a burst."""
    down_s: float = 0.0

    @property
    def mtbf_s(self) -> float:
        """Mean seconds between interruptions over a long time."""
        rate = self.calm_s / self.calm_mtbf_s + self.burst_s / self.burst_mtbf_s
        return (self.calm_s + self.burst_s) / rate

    def periods(self, seed: int) -> Iterator[Presence]:
        draw = random.Random(seed)
        in_burst = draw.random() < self.burst_s / (self.calm_s + self.burst_s)
        up_s = 0.0
        while True:
            leaves_s = draw.expovariate(1 / (self.burst_s if in_burst else self.calm_s))
            while (gap_s := draw.expovariate(1 / (self.burst_mtbf_s if in_burst else self.calm_mtbf_s))) < leaves_s:
                yield Presence(up_s + gap_s, self.down_s)
                up_s, leaves_s = 0.0, leaves_s - gap_s
            up_s += leaves_s
            in_burst = not in_burst


@dataclass(frozen=True, kw_only=True)
class SpotTrace:
    """A trace in SkyPilot's format (Wu et al., NSDI 2024): how many instances were there at each tick."""

    gap_s: float
    """Seconds between ticks."""
    counts: Sequence[int]
    needed: int = 1
    """Instances that the job needs at once."""

    def __post_init__(self) -> None:
        if not any(count >= self.needed for count in self.counts):
            raise DataError(f"trace: {self.needed} instances were never there at once; use a trace of another place")

    @property
    def mtbf_s(self) -> float:
        """Mean seconds of presence before an interruption; infinite without any."""
        present = [count >= self.needed for count in self.counts]
        ends = sum(before and not now for before, now in itertools.pairwise([present[-1], *present]))
        return self.gap_s * sum(present) / ends if ends else math.inf

    def periods(self, seed: int) -> Iterator[Presence]:
        """From a random tick on; the trace begins anew at its end."""
        start = random.Random(seed).randrange(len(self.counts))
        runs = self._runs(start)
        if len(runs) == 1:
            yield Presence(math.inf, 0.0)
            return
        up_ticks = down_ticks = 0  # the last run of a round and the first of the next may be of one kind
        for is_up, length in itertools.cycle(runs):
            if is_up and down_ticks:
                yield Presence(up_ticks * self.gap_s, down_ticks * self.gap_s)
                up_ticks = down_ticks = 0
            if is_up:
                up_ticks += length
            else:
                down_ticks += length

    def _runs(self, start: int = 0) -> list[tuple[bool, int]]:
        """Lengths in ticks of presence and absence, from a tick on, once around."""
        present = [count >= self.needed for count in (*self.counts[start:], *self.counts[:start])]
        return [(is_up, len(list(group))) for is_up, group in itertools.groupby(present)]


@dataclass(frozen=True, kw_only=True)
class WithNotice:
    """Instances whose interruptions are announced; in a presence that is shorter than the notice, from its start on."""

    inner: PoissonInterruptions | BurstyInterruptions | SpotTrace
    notice_s: float

    @property
    def mtbf_s(self) -> float:
        return self.inner.mtbf_s

    def periods(self, seed: int) -> Iterator[Presence]:
        for period in self.inner.periods(seed):
            yield replace(period, notice_s=min(self.notice_s, period.up_s))


Availability = PoissonInterruptions | BurstyInterruptions | SpotTrace | WithNotice


def read_trace(path: Path, *, needed: int = 1) -> SpotTrace:
    """Read `{"metadata": {"gap_seconds": 300}, "data": [1, 1, 0, ...]}`. Raises `DataError` that names the file."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise DataError(f"{path}: is not valid JSON ({error})") from None
    try:
        gap_s, counts = float(content["metadata"]["gap_seconds"]), cast(list[Any], content["data"])
    except (KeyError, TypeError, ValueError):
        raise DataError(
            f'{path}: is no spot trace; it needs {{"metadata": {{"gap_seconds": N}}, "data": [..]}}'
        ) from None
    if not gap_s > 0:
        raise DataError(f"{path}: metadata.gap_seconds must be above 0, got {gap_s}")
    if not isinstance(counts, list) or not counts or not all(isinstance(n, int) and n >= 0 for n in counts):
        raise DataError(f"{path}: data must be a list of whole numbers of instances, not empty")
    try:
        return SpotTrace(gap_s=gap_s, counts=counts, needed=needed)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def check_rate(interruptions_per_hour: float) -> float:
    """Mean seconds between interruptions. Raises `ConfigError` for a rate that is not above 0."""
    if not 0 < interruptions_per_hour < math.inf:
        raise ConfigError(f"--interruptions-per-hour: must be above 0, got {interruptions_per_hour}")
    return 3600 / interruptions_per_hour
