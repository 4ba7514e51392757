"""Timing of short calls: repeats in turn, the clock that others disturb least, waiting for free cores, and rates."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from modelwright.core.config import ConfigError
from modelwright.core.resources import OtherProcesses, num_usable_cores
from modelwright.ops.microbenchmark import (
    Undisturbed,
    in_turn,
    int8_linear_rate,
    matmul_rate,
    own_clock,
    repeated,
    seconds_of,
    undisturbed,
)

CORES = num_usable_cores()


class Meter:
    """A machine on which other processes use so many cores, period after period; the last figure stays."""

    def __init__(self, other_cores: Sequence[float]) -> None:
        self.coming = list(other_cores)

    def begin(self) -> None: ...

    def seconds(self) -> float:
        return 0.5

    def other_cores(self) -> float:
        return self.coming.pop(0) if len(self.coming) > 1 else self.coming[0]


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_measures_take_turns_and_warm_up():
    calls, figures = [], iter(range(100))
    measures = {name: lambda name=name: calls.append(name) or float(next(figures)) for name in ("fp32", "bf16")}
    assert in_turn(measures, num_rounds=2, num_warmups=1) == {"fp32": [2.0, 4.0], "bf16": [3.0, 5.0]}
    assert calls == ["fp32", "bf16"] * 3
    assert repeated(lambda: float(next(figures)), num_rounds=3, num_warmups=2) == [8.0, 9.0, 10.0]


def test_seconds_are_those_of_the_clock_around_all_calls():
    now = [5.0]

    def call() -> None:
        now[0] += 1.5

    assert seconds_of(call, "cpu", calls=3, clock=lambda: now[0]) == 4.5


def test_waiting_counts_on_the_wall_clock_and_not_as_own_time():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert seconds_of(lambda: time.sleep(0.05), "cpu") >= 0.05
        assert seconds_of(lambda: time.sleep(0.05), "cpu", clock=own_clock("cpu")) < 0.025
        torch.set_num_threads(2)
        assert seconds_of(lambda: time.sleep(0.05), "cpu", clock=own_clock("cpu")) >= 0.05
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_threads_wait_for_a_moment_in_which_each_has_a_core():
    meter, pauses = Meter([CORES, CORES, CORES - 1.5, max(0, CORES - 2)]), []
    found = undisturbed(torch.get_num_threads, meter, patience_s=9.0, sleep=pauses.append)
    assert len(pauses) == 5, "as many periods as it took, and one of the measurement itself"
    if CORES >= 2:
        assert found == Undisturbed(value=2, num_threads=2, busy_cores=0.0)


@pytest.mark.usefixtures("two_threads")
def test_a_machine_that_stays_busy_is_measured_on_one_thread_after_a_bounded_time():
    meter, pauses = Meter([CORES, CORES - 0.5, CORES]), []
    found = undisturbed(torch.get_num_threads, meter, patience_s=3.0, sleep=pauses.append)
    assert found == Undisturbed(value=1, num_threads=1, busy_cores=CORES - 0.5)
    assert sum(pauses) == pytest.approx(3.0)
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_a_measurement_that_others_disturbed_is_repeated_on_one_thread():
    calls = []
    meter = Meter([0.0, CORES])
    found = undisturbed(lambda: calls.append(torch.get_num_threads()), meter, sleep=lambda seconds: None)
    if CORES >= 2:
        assert calls == [2, 1]
    assert (found.num_threads, found.busy_cores) == (1, CORES)


def test_busy_processes_are_noticed():
    with busy_processes(CORES + 1):
        found = undisturbed(lambda: matmul_rate(64, 64, 64, dtype=torch.float32, device="cpu"), OtherProcesses())
    assert found.busy_cores > CORES / 4


@pytest.mark.slow
@pytest.mark.skipif(torch.get_num_threads() > 1, reason="only one thread's own time is known")
def test_busy_processes_do_not_lower_the_rate_of_one_thread():
    """Products so long that other processes take the core away in between."""

    def rate() -> float:
        return matmul_rate(1024, 1024, 1024, dtype=torch.float32, device="cpu", repeats=2)

    quiet = rate()
    with busy_processes(2 * CORES):
        assert rate() > 0.5 * quiet


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matmul_rate(dtype):
    assert matmul_rate(16, 32, 24, dtype=dtype, device="cpu", repeats=2) > 0


@pytest.mark.parametrize("backend", ["fbgemm", "int_mm"])
def test_int8_linear_rate(backend):
    if backend == "fbgemm" and "fbgemm" not in torch.backends.quantized.supported_engines:
        with pytest.raises(ConfigError, match="use 'int_mm'"):
            int8_linear_rate(17, 32, 24, backend=backend, repeats=2)
    else:
        assert int8_linear_rate(17, 32, 24, backend=backend, repeats=2) > 0
