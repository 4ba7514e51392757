"""Measures that the networks of `netns.py` do what they say: speed, delay, counters, cuts, tidiness."""

import os
import subprocess
import sys
import time

from modelwright_claims.netns import Network, missing, namespaces, racks, star

SINK = """
import socket, time
server = socket.create_server(("0.0.0.0", 0))
print(server.getsockname()[1], flush=True)
peer, _ = server.accept()
size = len(peer.recv(1 << 16))
first = time.monotonic()
while data := peer.recv(1 << 16):
    size += len(data)
print(size, time.monotonic() - first, flush=True)
"""
SOURCE = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))
end = time.monotonic() + float(sys.argv[3])
while time.monotonic() < end:
    peer.sendall(bytes(1 << 16))
peer.close()
"""
ECHO = """
import socket
server = socket.create_server(("0.0.0.0", 0))
print(server.getsockname()[1], flush=True)
peer, _ = server.accept()
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while data := peer.recv(64):
    peer.sendall(data)
"""
PING = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
times = []
for _ in range(20):
    start = time.perf_counter()
    peer.sendall(b"x")
    peer.recv(1)
    times.append(time.perf_counter() - start)
print(min(times))
"""
ATTEMPT = """
import errno, socket, sys
probe = socket.socket()
probe.settimeout(1)
sys.exit(probe.connect_ex((sys.argv[1], 9)) != errno.ECONNREFUSED)
"""
SYN_BYTES = 60
"""What a connection sends at the least: the stream has begun."""


def measured_mbit(net: Network, a: str, b: str, seconds: float = 2.0) -> dict[str, float]:
    """Stream from a to b for about that long.

    wire, payload: Mbit/s that a's counters saw in the middle of it and that b's program got. A busy machine makes them
    less than the link allows; `wire` is never more, since its time is that around the readings of the counters.
    sent_bytes, received_bytes, payload_bytes: of the whole stream, as a, b and b's program counted them.
    """
    with net.popen(b, [sys.executable, "-c", SINK], stdout=subprocess.PIPE, text=True) as sink:
        assert sink.stdout is not None
        port, before = sink.stdout.readline().strip(), net.total(a)
        source = net.popen(a, [sys.executable, "-c", SOURCE, net.address(b), port, str(seconds)])
        while (net.total(a) - before).tx_bytes < SYN_BYTES:
            time.sleep(0.01)
        time.sleep(seconds / 4)
        start, early = time.monotonic(), net.total(a)
        time.sleep(seconds / 2)
        late, end = net.total(a), time.monotonic()
        source.wait()
        payload_bytes, payload_s = map(float, sink.stdout.readline().split())
    sent, received = net.total(a) - before, net.total(b)
    return {
        "payload": payload_bytes * 8 / 1e6 / payload_s,
        "wire": (late - early).tx_bytes * 8 / 1e6 / (end - start),
        "payload_bytes": payload_bytes,
        "sent_bytes": sent.tx_bytes,
        "received_bytes": received.rx_bytes,
    }


def measured_round_trip_ms(net: Network, a: str, b: str) -> float:
    """Least time of twenty one-byte messages there and back: other work on the machine only adds to it."""
    with net.popen(b, [sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True) as echo:
        assert echo.stdout is not None
        port = echo.stdout.readline().strip()
        return 1e3 * float(net.run(a, [sys.executable, "-c", PING, net.address(b), port]).stdout)


def reaches(net: Network, a: str, b: str) -> bool:
    """Whether a packet gets from a to b and back: b's kernel refuses a connection to a port where nobody listens."""
    return net.run(a, [sys.executable, "-c", ATTEMPT, net.address(b)], check=False).returncode == 0


def check() -> bool:
    """Build networks and measure them; prints each figure beside what it should be."""
    results = []

    def expect(what: str, value: float, low: float, high: float) -> None:
        results.append(low <= value <= high)
        print(f"{'ok ' if results[-1] else 'BAD'} {what}: {value:.3f} (wanted {low:g} to {high:g})", flush=True)

    for mbit, low in ((100.0, 95.0), (1000.0, 900.0)):
        with Network(star(2, mbit=mbit)) as net:
            rate = measured_mbit(net, "h0", "h1")
            expect(f"{mbit:g} Mbit/s link, on the wire, Mbit/s", rate["wire"], low, 1.01 * mbit)
            expect(f"{mbit:g} Mbit/s link, payload, Mbit/s", rate["payload"], 0.90 * mbit, 0.97 * mbit)
            expect(
                "bytes counted by the receiver / by the sender", rate["received_bytes"] / rate["sent_bytes"], 0.99, 1.01
            )
    with Network(star(2, delay_ms=5, mtu=9000)) as net:
        expect("two links of 5 ms: round trip, ms", measured_round_trip_ms(net, "h0", "h1"), 20, 25)
    with Network(racks([2, 2], mbit=200, across_mbit=20)) as net:
        expect("200 Mbit/s inside a rack, Mbit/s", measured_mbit(net, "h0", "h1")["wire"], 185, 202)
        expect("20 Mbit/s across racks, Mbit/s", measured_mbit(net, "h0", "h3")["wire"], 19, 20.2)
        net.cut("rack0", "core")
        expect("reached over a cut link", reaches(net, "h0", "h3"), 0, 0)
        expect("reached beside the cut link", reaches(net, "h0", "h1"), 1, 1)
        net.restore("rack0", "core")
        expect("reached over the restored link", reaches(net, "h0", "h3"), 1, 1)
    expect("namespaces left behind", len([name for name in namespaces() if str(os.getpid()) in name]), 0, 0)
    return all(results)


def main() -> int:
    """Exit code 0 if every figure is as it should be, 1 if not, 2 if networks cannot be built here."""
    if reason := missing():
        print(f"cannot build networks: {reason}", file=sys.stderr)
        return 2
    return 0 if check() else 1


if __name__ == "__main__":
    sys.exit(main())
