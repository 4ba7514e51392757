"""Tests of what happens while an answer is not finished, on machines of any speed."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from modelwright.serve.server import ServerThread


@contextmanager
def held(server: ServerThread, *, after: int = 0) -> Iterator[None]:
    """The engine makes that many steps and no more until the block is left: however fast or busy the machine is, a
    longer answer stays unfinished."""
    engine, left = server.service.worker.client.engine, itertools.repeat(None, after)
    step = engine.step

    def step_or_wait():
        if next(left, "none") is None:
            return step()
        time.sleep(0.002)
        return []

    engine.step = step_or_wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine.step = step  # type: ignore[method-assign]


def wait_until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "took too long"
        time.sleep(0.01)
