"""Heartbeats between the processes of a run: each exits when another falls silent, so that a launcher can restart all.

A host that loses its network closes no connection, so a process that waits for it in a collective, or at a barrier
while data is prepared, would wait indefinitely. Here a thread of each process increments a counter in the store through
which the processes found each other, and reads the others' counters. It needs neither the main thread nor a collective.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Self, TypeVar

from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import Store

from modelwright.parallel.mesh import World

Answer = TypeVar("Answer")
LOST = 3
"""Exit status of a process that ends because another is lost."""
_GONE = 1 << 32
"""Added to the counter of a process that leaves on purpose."""
_KEY = "heartbeat/"


class Heartbeat:
    """Context for all processes of a world alike; does nothing in a world of one. lost_after_s: a process is considered
    lost if its counter did not change for this long, and this process exits with status `LOST` after a line on stderr;
    0 disables it.
    """

    def __init__(self, world: World, *, lost_after_s: float) -> None:
        self.world = world
        self.lost_after_s = lost_after_s
        self._leaving = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self.world.size > 1 and self.lost_after_s:
            # A separate connection: on a shared one, waiting for a key would block the counting.
            store = TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=max(1.0, self.lost_after_s / 2)),
            )
            self._thread = threading.Thread(target=self._beat, args=(store,), name="heartbeat", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._leaving.set()
        if self._thread is not None:
            self._thread.join(self.lost_after_s)

    def _beat(self, store: Store) -> None:
        others = [rank for rank in range(self.world.size) if rank != self.world.rank]
        counts, heard = dict.fromkeys(others, -1), dict.fromkeys(others, time.monotonic())
        while True:
            started = time.monotonic()
            if self._leaving.wait(self.lost_after_s / 8):
                break
            # If this process itself was stopped for long (Ctrl-Z, a paused machine), the others may have been too, so
            # everyone gets the full time again.
            if time.monotonic() - started > self.lost_after_s / 2:
                heard = dict.fromkeys(others, time.monotonic())
            result = _ask(lambda: {rank: store.add(f"{_KEY}{rank}", 0) for rank in others if counts[rank] < _GONE})
            _ask(lambda: store.add(f"{_KEY}{self.world.rank}", 1))
            now = time.monotonic()
            for rank, count in (result or {}).items():
                if count != counts[rank]:
                    counts[rank], heard[rank] = count, now
            silent = [rank for rank in others if counts[rank] < _GONE and now - heard[rank] > self.lost_after_s]
            if silent:
                named = ", ".join(map(str, silent))
                print(
                    f"process {self.world.rank}: nothing was heard of process {named} for {self.lost_after_s:g} s; "
                    "ending, so that the run can be started again and goes on from its last checkpoint",
                    file=sys.stderr,
                    flush=True,
                )
                # `sys.exit` would end this thread only, while the main thread waits in a collective.
                os._exit(LOST)
        _ask(lambda: store.add(f"{_KEY}{self.world.rank}", _GONE))


def _ask(question: Callable[[], Answer]) -> Answer | None:
    """Returns the store's answer, None if it does not answer: its host may be the lost one."""
    try:
        return question()
    except RuntimeError:
        return None
