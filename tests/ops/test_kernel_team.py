"""The threads of a decode step: they end, sleep, are made anew in a copy of the process, and keep callers apart."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from modelwright.ops import cpu_kernels
from modelwright.ops.decode_step import RowProduct, Weight


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    if not cpu_kernels.instruction_set():
        pytest.skip("there are no kernels here")
    monkeypatch.setenv(cpu_kernels.SWITCH, "decode_step")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


def made(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    return made(257, 130)


def native_threads() -> int:
    """How many this process has, once those of ended callers are gone: their threads end after Python's."""
    counts: list[int] = []
    while len(counts) < 10 or len(set(counts[-10:])) > 1:
        counts.append(len(list(Path("/proc/self/task").iterdir())))
        time.sleep(0.01)
    return counts[-1]


def test_many_steps_in_a_row_and_after_a_pause(weight: torch.Tensor) -> None:
    product, inputs = RowProduct(Weight(weight)), [made(5, 130, seed=number) for number in range(200)]
    expected = [x @ weight.T for x in inputs]
    for pause in (0.0, 0.002):  # shorter and longer than a thread waits actively
        for x, wanted in zip(inputs, expected, strict=True):
            torch.testing.assert_close(product(x), wanted, rtol=1e-5, atol=1e-4)
            time.sleep(pause)


def test_callers_at_the_same_time_get_their_own_results(weight: torch.Tensor) -> None:
    product = RowProduct(Weight(weight))
    inputs = [made(3, 130, seed=number) for number in range(60)]
    expected = [product(x) for x in inputs]
    with ThreadPoolExecutor(4) as callers:
        found = list(callers.map(product, inputs * 5))
    assert all(torch.equal(one, other) for one, other in zip(found, expected * 5, strict=True))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_the_threads_end_with_their_caller(weight: torch.Tensor) -> None:
    product, before, seen = RowProduct(Weight(weight)), native_threads(), list[int]()

    def call() -> None:
        product(made(2, 130))
        seen.append(native_threads())

    caller = threading.Thread(target=call)
    caller.start()
    caller.join()
    assert seen == [before + 3]
    deadline = time.monotonic() + 10
    while native_threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert native_threads() == before


def test_another_number_of_threads(weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    product, x = RowProduct(Weight(weight)), made(4, 130)
    whole = product(x)
    for count in (2, 1, 4, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda number=count: number)
        assert torch.equal(product(x), whole)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_copy_of_the_process_has_threads_of_its_own(weight: torch.Tensor) -> None:
    product, x = RowProduct(Weight(weight)), made(4, 130)
    whole = product(x)
    child = os.fork()
    if not child:
        try:
            os._exit(0 if torch.equal(product(x), whole) else 1)
        finally:
            os._exit(2)
    deadline = time.monotonic() + 30
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    if not ended[0]:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended[0], "the copy waits for threads that it does not have"
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    assert torch.equal(product(x), whole)


SPREAD = """
import os, sys
import modelwright, torch
from modelwright.ops import cpu_kernels

every, one = os.sched_getaffinity(0), {min(os.sched_getaffinity(0))}
torch.set_num_threads(2)
before = set(os.listdir("/proc/self/task"))
cpu_kernels.spread_threads()  # makes the second thread
apart = 0
for _ in range(20):
    threads = [os.getpid(), *map(int, set(os.listdir("/proc/self/task")) - before)]
    for mask in (one, every):  # as after a pause of which both woke on one core
        for thread in threads:
            os.sched_setaffinity(thread, mask)
    apart += cpu_kernels.spread_threads() == 2
    assert len(threads) == 2 and all(os.sched_getaffinity(thread) == every for thread in threads), "they are bound"
sys.exit(apart < 10)  # other work moves some; by themselves a few of 20 part
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_threads_that_wake_on_one_core_part() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    subprocess.run([sys.executable, "-c", SPREAD], timeout=60, check=True)


PROGRAM = """
import os, sys, time, torch
from modelwright.ops.decode_step import RowProduct, Weight

torch.get_num_threads = lambda: 3  # set_num_threads makes a pool of PyTorch's, which copies of a process cannot destroy
RowProduct(Weight(torch.ones(64, 64)))(torch.ones(2, 64))
time.sleep(0.1)  # the threads sleep
"""


@pytest.mark.slow
@pytest.mark.parametrize("rest", ["", "child = os.fork()\nsys.exit(child and os.WEXITSTATUS(os.waitpid(child, 0)[1]))"])
def test_a_program_and_a_copy_of_it_end_with_threads_that_sleep(rest: str) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM + rest], timeout=60, check=True)
