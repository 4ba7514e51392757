"""Hosts in namespaces: links carry their rate, counters count, cuts cut, and nothing stays behind."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def netns():
    from modelwright_claims import netns

    if reason := netns.missing():
        pytest.skip(reason)
    return netns


@pytest.fixture(scope="module")
def measure(netns):
    import netns_check

    return netns_check


def measured_until(measure, net, a, b, wanted_mbit):
    """The last of up to eight measurements: the first that shows so much, which a busy machine may need several for."""
    for _ in range(8):
        found = measure.measured_mbit(net, a, b, seconds=0.6)
        if found["wire"] >= wanted_mbit:
            break
    return found


def test_a_link_carries_its_rate_and_both_ends_count_it(netns, measure):
    with netns.Network(netns.star(2, mbit=100)) as net:
        found = measure.measured_mbit(net, "h0", "h1", seconds=0.6)
        assert found["received_bytes"] == pytest.approx(found["sent_bytes"], rel=0.01)
        assert 0.9 * found["sent_bytes"] <= found["payload_bytes"] <= found["sent_bytes"]
        assert found["wire"] <= 101
        assert 75 <= measured_until(measure, net, "h0", "h1", 75)["wire"] <= 101


def test_a_link_can_be_slowed_while_it_runs(netns, measure):
    with netns.Network(netns.star(2, mbit=100)) as net:
        net.shape("h0", "switch", 20)
        assert 15 <= measured_until(measure, net, "h0", "h1", 15)["wire"] <= 20.5


def test_delay_is_that_of_the_links(netns, measure):
    with netns.Network(netns.star(2, delay_ms=4, mtu=9000)) as net:
        found = []
        while len(found) < 8 and min(found, default=99) > 24:
            found.append(measure.measured_round_trip_ms(net, "h0", "h1"))
    assert 16 <= min(found) <= 24


def test_a_cut_parts_only_what_it_joins(netns, measure):
    with netns.Network(netns.racks([2, 2])) as net:
        net.cut("rack1", "core")
        assert not measure.reaches(net, "h0", "h2")
        assert measure.reaches(net, "h0", "h1")
        assert measure.reaches(net, "h2", "h3")
        assert measure.reaches(net, "h2", "h2")
        net.restore("rack1", "core")
        assert measure.reaches(net, "h0", "h2")
        with pytest.raises(netns.NetworkError, match="h0 and core are not linked"):
            net.cut("h0", "core")


def test_every_pair_of_a_full_mesh_has_a_cable_of_its_own(netns, measure):
    with netns.Network(netns.full_mesh([[0, 0, 10], [0, 0, 0], [10, 0, 0]])) as net:
        assert len(net.interfaces("h0")) == 2
        slow = measured_until(measure, net, "h0", "h2", 7.5)["wire"]
        assert 7.5 <= slow <= 10.5
        assert measured_until(measure, net, "h1", "h2", 3 * slow)["wire"] > 3 * slow


def test_hosts_have_names_and_die_alone(netns):
    with netns.Network(netns.star(2)) as net:
        found = "import socket; print(socket.gethostname(), socket.gethostbyname('h0'))"
        assert net.run("h1", [sys.executable, "-c", found]).stdout.split() == ["h1", net.address("h0")]
        sleepers = [net.popen(host, ["sleep", "60"]) for host in net.hosts]
        for sleeper in sleepers:
            wait_for(lambda pid=sleeper.pid: command_line(pid) == "sleep 60")
        assert net.kill("h0") == [sleepers[0].pid]
        assert sleepers[0].wait() == -signal.SIGKILL
        assert sleepers[1].poll() is None
    assert sleepers[1].wait() == -signal.SIGKILL


def test_a_killed_program_leaves_no_network(netns):
    program = """
import sys, time
from modelwright_claims import netns
net = netns.Network(netns.star(2)).__enter__()
print(net.tag, net.popen("h0", ["sleep", "60"]).pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as killed:
        tag, sleeper = killed.stdout.readline().split()
        wait_for(lambda: command_line(sleeper) == "sleep 60")
        assert any(name.startswith(tag) for name in netns.namespaces())
        killed.kill()
    wait_for(lambda: not any(name.startswith(tag) for name in netns.namespaces()))
    wait_for(lambda: command_line(sleeper) == "")


def command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""


def wait_for(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
