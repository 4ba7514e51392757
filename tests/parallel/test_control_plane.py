"""Processes that end when one of them has fallen silent, and do not when one has left."""

import os
import signal
import time

import pytest

from distributed import run_distributed, start_distributed
from modelwright.parallel.control_plane import LOST, Heartbeat
from modelwright.parallel.mesh import World, single

LOST_AFTER_S = 3.0
"""Long enough for a busy machine to let every process beat."""


def fall_silent(world: World) -> None:
    """The last rank stops without a word, and the others wait for it."""
    with Heartbeat(world, lost_after_s=LOST_AFTER_S):
        world.barrier()
        if world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        world.barrier()


def leave(world: World) -> str:
    """The last rank leaves early and stays silent for longer than a lost one may."""
    last = world.rank == world.size - 1
    with Heartbeat(world, lost_after_s=LOST_AFTER_S):
        world.barrier()
        if not last:
            time.sleep(2 * LOST_AFTER_S)
    if last:
        time.sleep(2.5 * LOST_AFTER_S)
    return "ended well"


def be_paused(world: World) -> None:
    """Beat while the test stops all ranks and lets them go on."""
    with Heartbeat(world, lost_after_s=LOST_AFTER_S):
        world.barrier()
        print("beating", flush=True)
        time.sleep(3 * LOST_AFTER_S)


def test_a_silent_process_ends_those_that_wait_for_it_and_is_named():
    ranks = start_distributed(fall_silent, 3)
    limit = time.monotonic() + 120
    while (ranks.is_alive(0) or ranks.is_alive(1)) and time.monotonic() < limit:
        time.sleep(0.1)
    ranks.send_signal(2, signal.SIGKILL)
    first, second, silent = ranks.wait()
    assert (first.code, second.code, silent.code) == (LOST, LOST, -signal.SIGKILL)
    assert "nothing was heard of process 2 for 3 s" in first.output


@pytest.mark.slow
def test_a_process_that_leaves_is_not_lost():
    assert run_distributed(leave, 2) == ["ended well"] * 2


@pytest.mark.slow
def test_processes_that_were_paused_together_do_not_take_each_other_for_lost():
    ranks = start_distributed(be_paused, 2)
    limit = time.monotonic() + 120
    while not all("beating" in ranks.output(rank) for rank in range(2)) and time.monotonic() < limit:
        time.sleep(0.1)
    for number, wait_s in ((signal.SIGSTOP, 2 * LOST_AFTER_S), (signal.SIGCONT, 0.0)):
        for rank in range(2):
            ranks.send_signal(rank, number)
        time.sleep(wait_s)
    ranks.results()


def test_one_process_alone_has_nobody_to_hear_of():
    with Heartbeat(single(), lost_after_s=0.01):
        time.sleep(0.05)
