"""Hosts in namespaces: links carry their rate, counters count, cuts cut, and nothing stays behind."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def netns():
    sys.path.insert(0, str(BENCHMARKS))
    import netns

    if reason := netns.missing():
        pytest.skip(reason)
    yield netns
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def measure(netns):
    import netns_check

    return netns_check


def test_a_link_carries_its_rate_and_both_ends_count_it(netns, measure):
    with netns.Network(netns.star(2, mbit=100)) as net:
        rate = measure.measured_mbit(net, "h0", "h1", seconds=1.2)
    assert 95 <= rate["wire"] <= 101
    assert 0.93 * rate["wire"] <= rate["payload"] <= rate["wire"]
    assert rate["received_bytes"] == pytest.approx(rate["sent_bytes"], rel=0.01)


def test_a_link_can_be_slowed_while_it_runs(netns, measure):
    with netns.Network(netns.star(2, mbit=100)) as net:
        net.shape("h0", "switch", 20)
        assert 18 <= measure.measured_mbit(net, "h0", "h1", seconds=1.2)["wire"] <= 20.5


def test_delay_is_that_of_the_links(netns, measure):
    with netns.Network(netns.star(2, delay_ms=4, mtu=9000)) as net:
        assert 16 <= measure.measured_round_trip_ms(net, "h0", "h1") <= 24


def test_a_cut_parts_only_what_it_joins(netns, measure):
    with netns.Network(netns.racks([2, 2])) as net:
        net.cut("rack1", "core")
        assert not measure.reaches(net, "h0", "h2")
        assert measure.reaches(net, "h0", "h1")
        assert measure.reaches(net, "h2", "h3")
        assert measure.reaches(net, "h2", "h2")
        net.restore("rack1", "core")
        assert measure.reaches(net, "h0", "h2")
        with pytest.raises(netns.NetworkError, match="no link between h0 and core"):
            net.cut("h0", "core")


def test_every_pair_of_a_full_mesh_has_a_cable_of_its_own(netns, measure):
    with netns.Network(netns.full_mesh([[0, 0, 10], [0, 0, 0], [10, 0, 0]])) as net:
        assert len(net.interfaces("h0")) == 2
        assert 9 <= measure.measured_mbit(net, "h0", "h2", seconds=0.8)["wire"] <= 10.5
        assert measure.measured_mbit(net, "h1", "h2", seconds=0.4)["wire"] > 50


def test_hosts_have_names_and_die_alone(netns):
    with netns.Network(netns.star(2)) as net:
        found = "import socket; print(socket.gethostname(), socket.gethostbyname('h0'))"
        assert net.run("h1", [sys.executable, "-c", found]).stdout.split() == ["h1", net.address("h0")]
        sleepers = [net.popen(host, ["sleep", "60"]) for host in net.hosts]
        time.sleep(0.2)
        assert net.kill("h0") == [sleepers[0].pid]
        assert sleepers[0].wait() == -signal.SIGKILL
        assert sleepers[1].poll() is None
    assert sleepers[1].wait() == -signal.SIGKILL


def test_a_killed_program_leaves_no_network(netns):
    program = f"""
import sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
import netns
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


def wait_for(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
