"""Tests share the machine with each other: waiting for a moment in which every core is free would be in vain."""

from collections.abc import Callable

from modelwright.core.resources import LoadMeter
from modelwright.ops import microbenchmark

_wait_for_free_cores = microbenchmark._wait_for_free_cores


def look_once() -> None:
    """Have this process look once whether cores are free, where it would by default wait for seconds."""
    microbenchmark._wait_for_free_cores = _looked_once


def _looked_once(others: LoadMeter, num_threads: int, patience_s: float, sleep: Callable[[float], None]) -> float:
    patience_s = 0.0 if patience_s == microbenchmark.PATIENCE_S else patience_s
    return _wait_for_free_cores(others, num_threads, patience_s, sleep)
