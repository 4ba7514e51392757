"""Processes that end when one of them has fallen silent, and do not when one has left."""

import signal
import time
from pathlib import Path

from modelwright.parallel.heartbeat import LOST, Heartbeat
from modelwright.parallel.mesh import single
from rank_processes import run_ranks, start_ranks, wait_for

LOST_AFTER_S = 3.0
"""As in the script."""
SCRIPT = Path(__file__).with_name("heartbeat_ranks.py")


def test_a_silent_process_ends_those_that_wait_for_it_and_is_named():
    first, second, silent = started = start_ranks(SCRIPT, "silent", size=3)
    limit = time.monotonic() + 120
    while (first.is_alive or second.is_alive) and time.monotonic() < limit:
        time.sleep(0.1)
    silent.send_signal(signal.SIGKILL)
    (status, output, errors), (other_status, _, _), (last, _, _) = wait_for(started)
    assert (status, other_status, last) == (LOST, LOST, -signal.SIGKILL)
    assert "nothing was heard of process 2 for 3 s" in errors
    assert "ended well" not in output


def test_a_process_that_leaves_is_not_lost():
    assert run_ranks(SCRIPT, "leaves", size=2) == ["ended well\n"] * 2


def test_processes_that_were_paused_together_do_not_take_each_other_for_lost():
    started = start_ranks(SCRIPT, "paused", size=2)
    limit = time.monotonic() + 120
    while not all("beating" in rank.output for rank in started) and time.monotonic() < limit:
        time.sleep(0.1)
    for number, wait_s in ((signal.SIGSTOP, 2 * LOST_AFTER_S), (signal.SIGCONT, 0.0)):
        for rank in started:
            rank.send_signal(number)
        time.sleep(wait_s)
    assert [status for status, _, _ in wait_for(started)] == [0, 0]


def test_one_process_alone_has_nobody_to_hear_of():
    with Heartbeat(single(), lost_after_s=0.01):
        time.sleep(0.05)
