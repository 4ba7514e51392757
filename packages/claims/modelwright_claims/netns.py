"""Several "hosts" on one Linux machine: network namespaces joined by veth links of chosen speed.

    python -m modelwright_claims.netns --clean     remove the remains of a crashed program

    with Network(star(4, mbit=100)) as net:
        net.run("h0", ["ping", "-c1", net.address("h1")])
        worker = net.popen("h1", [sys.executable, "worker.py"], env=net.torch_environment("h1", "h0", port))
        before = net.counters("h1")
        net.cut("h1", "switch"); net.restore("h1", "switch"); net.kill("h1")

Nodes that are named in `Topology.hosts` run commands; all other nodes are switches that forward. Every node has its
own namespace, every link a veth pair shaped at both ends by `tc tbf`, every route static along the fewest links;
nothing is added to the machine's own network. The kernel counts a segment of up to 64 KiB once, so that above about
500 Mbit/s the counters miss up to 4% of header bytes. A link with `delay_ms` is a pair of tun devices instead, whose
packets a small process of ours holds back (netem, the usual way, is missing from many kernels); that process costs
about 10 us of a core per packet, so give such links jumbo frames (`mtu`) when they are fast.

A network is taken down when its block is left, by a watcher process when the program dies, and by the next network's
start when the watcher died too. Needs root and iproute2: `missing()` says what is not there, `NetworkError` is raised.
"""

import argparse
import atexit
import collections
import contextlib
import ctypes
import fcntl
import os
import secrets
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIX = "mwnet"
QUEUE_MS = 50
"""Longest wait in the queue of a shaped link before packets are dropped, as in a small switch."""

# Own host name for each host, so that whatever asks for it (torchrun does) finds an address in the network.
ENTER = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'

COUNT = "cd /sys/class/net && grep . */statistics/[rt]x_bytes */statistics/[rt]x_packets"


class NetworkError(RuntimeError):
    """The machine refuses namespaces or a command of iproute2 failed; the text says which and why."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A single cable. mbit: 10^6 bits per second each way, headers included, 0 for as fast as it goes; delay_ms: one
    way.
    """

    ends: tuple[str, str]
    mbit: float = 0.0
    delay_ms: float = 0.0
    mtu: int = 1500


@dataclass(frozen=True, kw_only=True)
class Topology:
    """hosts run commands; nodes that only links name are switches."""

    hosts: tuple[str, ...]
    links: tuple[Link, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.hosts, *(end for link in self.links for end in link.ends))))


@dataclass(frozen=True, kw_only=True)
class Counters:
    """The traffic that an interface has sent and received so far, link headers included."""

    tx_bytes: int
    rx_bytes: int
    tx_packets: int
    rx_packets: int

    def __sub__(self, before: "Counters") -> "Counters":
        return Counters(**{name: getattr(self, name) - getattr(before, name) for name in vars(self)})


def host_names(num_hosts: int) -> tuple[str, ...]:
    return tuple(f"h{number}" for number in range(num_hosts))


def star(num_hosts: int, *, mbit: float = 0.0, delay_ms: float = 0.0, mtu: int = 1500) -> Topology:
    """Hosts h0, h1, ... each on its own cable to one switch; `delay_ms` passes twice between two hosts."""
    hosts = host_names(num_hosts)
    links = tuple(Link(ends=(host, "switch"), mbit=mbit, delay_ms=delay_ms, mtu=mtu) for host in hosts)
    return Topology(hosts=hosts, links=links)


def racks(
    sizes: Sequence[int], *, mbit: float = 0.0, across_mbit: float = 0.0, across_delay_ms: float = 0.0, mtu: int = 1500
) -> Topology:
    """Hosts in racks: fast cables to the rack's switch, one slower cable from each rack's switch to the core."""
    hosts = host_names(sum(sizes))
    links, first = [], 0
    for rack, size in enumerate(sizes):
        inside = hosts[first : first + size]
        links += [Link(ends=(host, f"rack{rack}"), mbit=mbit, mtu=mtu) for host in inside]
        links.append(Link(ends=(f"rack{rack}", "core"), mbit=across_mbit, delay_ms=across_delay_ms, mtu=mtu))
        first += size
    return Topology(hosts=hosts, links=tuple(links))


def full_mesh(mbit: Sequence[Sequence[float]], delay_ms: Sequence[Sequence[float]] | None = None) -> Topology:
    """A cable between every two hosts, its speed (and delay) from the upper triangle of a matrix."""
    hosts = host_names(len(mbit))
    links = tuple(
        Link(ends=(hosts[a], hosts[b]), mbit=mbit[a][b], delay_ms=delay_ms[a][b] if delay_ms else 0.0)
        for a in range(len(hosts))
        for b in range(a + 1, len(hosts))
    )
    return Topology(hosts=hosts, links=links)


class Network:
    """A topology, running. Use as a context manager."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.hosts = topology.hosts
        self.tag = f"{PREFIX}-{os.getpid()}-{_start_time(os.getpid())}-{secrets.token_hex(2)}"
        self._addresses = {node: f"10.77.0.{number + 1}" for number, node in enumerate(topology.nodes)}
        self._interfaces: dict[tuple[str, str], str] = {}
        self._watcher: subprocess.Popen[bytes] | None = None
        self._delays: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Network":
        if reason := missing():
            raise NetworkError(reason)
        clean()
        atexit.register(self.close)
        self._watcher = subprocess.Popen(
            [sys.executable, __file__, "--watch", self.tag],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what runs in the hosts and remove them; calling it again does nothing."""
        take_down(self.tag)
        while self._delays:
            self._delays.pop().wait()
        if self._watcher is not None:
            assert self._watcher.stdin is not None
            self._watcher.stdin.close()
            self._watcher.wait()
            self._watcher = None
        atexit.unregister(self.close)

    def address(self, node: str) -> str:
        return self._addresses[node]

    def interfaces(self, host: str) -> list[str]:
        """Names of a host's interfaces, in the order of the topology's links."""
        return [name for (node, _), name in self._interfaces.items() if node == host]

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` inside a host, under the host's name."""
        inside = ["ip", "netns", "exec", self._space(host)]
        return [*inside, "unshare", "--uts", "sh", "-c", ENTER, host, *argv]

    def popen(self, host: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process inside a host; its pid is the command's own."""
        return subprocess.Popen(self.command(host, argv), **options)

    def run(self, host: str, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command inside a host to its end; standard output and error as text. Raises when it fails."""
        options = {"check": True, "timeout": 60, **options}
        return subprocess.run(self.command(host, argv), capture_output=True, text=True, **options)

    def torch_environment(self, host: str, first: str, port: int) -> dict[str, str]:
        """This process's environment with what torch.distributed needs to meet at `first` from `host`.

        RANK and WORLD_SIZE are the caller's. No proxy of the machine applies inside.
        """
        inherited = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
        interface = self.interfaces(host)[0]
        return {
            **inherited,
            "MASTER_ADDR": self.address(first),
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": interface,
            "TP_SOCKET_IFNAME": interface,
            "OMP_NUM_THREADS": "1",
        }

    def counters(self, node: str) -> dict[str, Counters]:
        """Return counters by interface, from /sys/class/net/*/statistics inside the node; the loopback is left out."""
        result: dict[str, dict[str, int]] = collections.defaultdict(dict)
        for line in _run("ip", "netns", "exec", self._space(node), "sh", "-c", COUNT).splitlines():
            path, value = line.split(":")
            interface, _, name = path.split("/")
            result[interface][name] = int(value)
        return {name: Counters(**result[name]) for name in self.interfaces(node)}

    def total(self, node: str) -> Counters:
        """The sum of a node's counters over its interfaces."""
        each = self.counters(node).values()
        names = ("tx_bytes", "rx_bytes", "tx_packets", "rx_packets")
        return Counters(**{name: sum(getattr(counters, name) for counters in each) for name in names})

    def cut(self, a: str, b: str) -> None:
        """Pull the cable between two nodes."""
        for node, other in self._link(a, b):
            self._ip(node, "link", "set", "dev", self._interfaces[node, other], "down")

    def restore(self, a: str, b: str) -> None:
        """Plug the cable in again."""
        for node, other in self._link(a, b):
            self._ip(node, "link", "set", "dev", self._interfaces[node, other], "up")
        for node in (a, b):
            self._add_routes(node)

    def shape(self, a: str, b: str, mbit: float) -> None:
        """Change a cable's speed while it runs; 0 removes the limit."""
        for node, other in self._link(a, b):
            self._shape_end(node, self._interfaces[node, other], mbit)

    def kill(self, host: str) -> list[int]:
        """SIGKILL to every process inside a host; returns their ids. The host itself stays."""
        pids = _pids_inside(self._space(host))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pids

    def _build(self) -> None:
        for node in self.topology.nodes:
            _run("ip", "netns", "add", self._space(node))
            self._ip(node, "link", "set", "dev", "lo", "up")
            # On the loopback too, so that a host whose only cable is cut still reaches itself.
            self._ip(node, "address", "add", f"{self.address(node)}/32", "dev", "lo")
            self._enter(node, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        for link in self.topology.links:
            self._connect(link)
        for node in self.topology.nodes:
            self._add_routes(node)
        # In both notations, and no name server beyond: c10d looks peers up by their IPv4-in-IPv6 address.
        names = "".join(f"{address} {node}\n::ffff:{address} {node}\n" for node, address in self._addresses.items())
        for host in self.hosts:
            folder = Path("/etc/netns") / self._space(host)
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")

    def _connect(self, link: Link) -> None:
        a, b = link.ends
        ends = [(a, b, f"eth{len(self.interfaces(a))}"), (b, a, f"eth{len(self.interfaces(b))}")]
        (_, _, name_a), (_, _, name_b) = ends
        if link.delay_ms:
            self._start_delay(link, name_a, name_b)
        else:
            peer = ("peer", "name", name_b, "netns", self._space(b), "mtu", str(link.mtu))
            self._ip(a, "link", "add", "name", name_a, "mtu", str(link.mtu), "type", "veth", *peer)
        for node, other, name in ends:
            self._interfaces[node, other] = name
            self._ip(node, "address", "add", f"{self.address(node)}/32", "dev", name)
            self._ip(node, "link", "set", "dev", name, "mtu", str(link.mtu), "up")
            self._shape_end(node, name, link.mbit)

    def _start_delay(self, link: Link, name_a: str, name_b: str) -> None:
        a, b = (self._space(end) for end in link.ends)
        process = subprocess.Popen(
            [sys.executable, __file__, "--delay", a, name_a, b, name_b, str(link.delay_ms)],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._delays.append(process)
        assert process.stdout is not None
        with process.stdout as ready:
            if ready.readline() != b"ready\n":
                raise NetworkError(f"the delay of the link {a}-{b} did not start")

    def _shape_end(self, node: str, interface: str, mbit: float) -> None:
        if not mbit:
            with contextlib.suppress(NetworkError):
                self._tc(node, "qdisc", "del", "dev", interface, "root")
            return
        # A burst of 1 ms: a short transfer still sees the rate, and with 0.3 ms a busy machine's timers lost 15%.
        burst = max(int(mbit * 1e6 / 8 * 0.001), 2 * 1514)
        rate = ("rate", f"{int(mbit * 1e6)}bit", "burst", str(burst), "latency", f"{QUEUE_MS}ms")
        self._tc(node, "qdisc", "replace", "dev", interface, "root", "tbf", *rate)

    def _add_routes(self, node: str) -> None:
        for target, hop in self._next_hops(node).items():
            interface = self._interfaces[node, hop]
            via = ("scope", "link") if hop == target else ("via", self.address(hop), "onlink")
            self._ip(node, "route", "replace", self.address(target), *via, "dev", interface)

    def _next_hops(self, start: str) -> dict[str, str]:
        """Return for every other node the neighbor through which it is reached over the fewest links."""
        hops: dict[str, str] = {}
        waiting = collections.deque((neighbor, neighbor) for node, neighbor in self._interfaces if node == start)
        while waiting:
            node, hop = waiting.popleft()
            if node == start or node in hops:
                continue
            hops[node] = hop
            waiting.extend((neighbor, hop) for end, neighbor in self._interfaces if end == node)
        return hops

    def _link(self, a: str, b: str) -> tuple[tuple[str, str], tuple[str, str]]:
        if (a, b) not in self._interfaces:
            raise NetworkError(f"{a} and {b} are not linked")
        return (a, b), (b, a)

    def _space(self, node: str) -> str:
        return f"{self.tag}-{node}"

    def _ip(self, node: str, *arguments: str) -> None:
        _run("ip", "-n", self._space(node), *arguments)

    def _tc(self, node: str, *arguments: str) -> None:
        _run("tc", "-n", self._space(node), *arguments)

    def _enter(self, node: str, *argv: str) -> None:
        _run("ip", "netns", "exec", self._space(node), *argv)


def missing() -> str:
    """Why this machine cannot build networks, or "" when it can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the program `{tool}` is missing; install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root; run as root or with sudo"
    name = f"{PREFIX}-{os.getpid()}-{_start_time(os.getpid())}-{secrets.token_hex(2)}-probe"
    try:
        _run("ip", "netns", "add", name)
        try:
            _run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
            shaping = ("root", "tbf", "rate", "1mbit", "burst", "4000", "latency", "50ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", *shaping)
        finally:
            _run("ip", "netns", "delete", name)
    except NetworkError as error:
        return f"the kernel refuses: {error}"
    return ""


def clean() -> list[str]:
    """Remove the networks whose program is no longer alive; returns their tags."""
    tags = {name.rsplit("-", 1)[0] for name in namespaces() if name.startswith(f"{PREFIX}-")}
    dead = [tag for tag in tags if not _is_alive(tag)]
    for tag in dead:
        take_down(tag)
    return dead


def take_down(tag: str) -> None:
    """Kill what runs in the namespaces of one network and remove them."""
    for space in [name for name in namespaces() if name.startswith(f"{tag}-")]:
        with contextlib.suppress(NetworkError):  # another process may be taking it down at this moment
            for pid in _pids_inside(space):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _run("ip", "netns", "delete", space)
        shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise NetworkError(f"`{' '.join(argv)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def namespaces() -> list[str]:
    """Names of all network namespaces of this machine."""
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line]


def _pids_inside(space: str) -> list[int]:
    return [int(pid) for pid in _run("ip", "netns", "pids", space).split()]


def _is_alive(tag: str) -> bool:
    _, pid, started, _ = tag.split("-")
    return _start_time(int(pid)) == int(started)


def _start_time(pid: int) -> int:
    """Return the start of a process, in ticks since boot; tells a process from a later one with its id. 0: no such
    process.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except OSError:
        return 0


def watch(tag: str) -> None:
    """Wait until the program at the other end of standard input is gone, then take its network down."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()
    take_down(tag)


def delay(space_a: str, name_a: str, space_b: str, name_b: str, delay_ms: float) -> None:
    """Carry packets between two tun devices, each `delay_ms` later than it came."""
    a, b = _open_tun(space_a, name_a), _open_tun(space_b, name_b)
    other = {a: b, b: a}
    held: collections.deque[tuple[float, int, bytes]] = collections.deque()
    print("ready", flush=True)
    while True:
        wait = max(0.0, held[0][0] - time.monotonic()) if held else None
        for device in select.select([a, b], [], [], wait)[0]:
            due = time.monotonic() + delay_ms / 1e3
            held.extend((due, other[device], packet) for packet in _packets(device))
        while held and held[0][0] <= time.monotonic():
            _, target, packet = held.popleft()
            with contextlib.suppress(OSError):  # a cut cable or a full queue loses packets
                os.write(target, packet)


def _packets(device: int) -> Iterator[bytes]:
    for _ in range(64):
        try:
            yield os.read(device, 65536)
        except OSError:
            return


def _open_tun(space: str, name: str) -> int:
    """A new tun device of that name inside a namespace; this thread stays in the namespace."""
    inside = os.open(f"/run/netns/{space}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(inside, 0x40000000):  # CLONE_NEWNET
        raise NetworkError(f"cannot enter {space}: {os.strerror(ctypes.get_errno())}")
    os.close(inside)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    set_interface, tun, no_packet_info = 0x400454CA, 0x0001, 0x1000
    fcntl.ioctl(device, set_interface, struct.pack("16sH22x", name.encode(), tun | no_packet_info))
    return device


def free_port(net: Network, host: str) -> int:
    """A TCP port that was free inside a host a moment ago."""
    show = "import socket; print(socket.create_server(('0.0.0.0', 0)).getsockname()[1])"
    return int(net.run(host, [sys.executable, "-c", show]).stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description="Hosts on one machine, for tests and benchmarks of the network.")
    parser.add_argument("--clean", action="store_true", help="remove what crashed programs left behind")
    parser.add_argument("--watch", metavar="TAG", help=argparse.SUPPRESS)
    parser.add_argument("--delay", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.watch:
        watch(options.watch)
    elif options.delay:
        space_a, name_a, space_b, name_b, delay_ms = options.delay
        delay(space_a, name_a, space_b, name_b, float(delay_ms))
    elif reason := missing():
        print(f"cannot build networks: {reason}", file=sys.stderr)
        return 2
    elif options.clean:
        print("\n".join(clean()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
