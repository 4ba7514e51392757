"""Bytes that this process sends to the others, as counted by the kernel for its TCP connections.

Everything is counted, whoever sent it: gradients, FSDP's gathered parameters, a pipeline's activations, sums of a few
values, checkpoint and control messages. Only gloo sends all of it over TCP; for other backends nothing is reported.
"""

import os
import socket
import stat
import struct
import sys

from modelwright.parallel.mesh import World

SEGMENTS_OUT, BYTES_SENT = 136, 200
"""Offsets in `struct tcp_info` of <linux/tcp.h>: u32 `tcpi_segs_out`, u64 `tcpi_bytes_sent` (Linux 4.19)."""
TCP_INFO_BYTES = BYTES_SENT + 8
HEADER_BYTES = 14 + 20 + 20 + 12
"""Header bytes of one segment: Ethernet, IPv4, and TCP with its timestamps."""


class Traffic:
    """Counts the bytes that this process has sent since the counter was created."""

    def __init__(self, world: World) -> None:
        self._sends = world.size > 1
        self._counts = sys.platform == "linux" and world.device.type == "cpu"
        self._num_bytes = 0
        self._of_connection: dict[int, int] = {}
        # The first call records what the rendezvous has sent already, which does not count.
        self.bytes_sent()
        self._num_bytes = 0

    def bytes_sent(self) -> int | None:
        """Payload and headers of all segments so far; None if the kernel does not report it, 0 for a single process."""
        if not self._sends:
            return 0
        if not self._counts:
            return None
        now = connections_sent()
        self._counts = bool(now)
        # Differences per connection, because connections come and go.
        before, self._of_connection = self._of_connection, now
        self._num_bytes += sum(sent - before.get(connection, 0) for connection, sent in now.items())
        return self._num_bytes if self._counts else None


def connections_sent() -> dict[int, int]:
    """Bytes that each TCP connection of this process has sent, by inode; empty where Linux is too old to count."""
    result = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=int(name))
            try:
                info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
            finally:
                # The descriptor is its owner's: the garbage collector would close it with this object.
                borrowed.detach()
            (segments,) = struct.unpack_from("=I", info, SEGMENTS_OUT)
            (payload,) = struct.unpack_from("=Q", info, BYTES_SENT)
            result[status.st_ino] = payload + HEADER_BYTES * segments
        except (OSError, struct.error):  # closed meanwhile, not TCP, or an older kernel that reports less
            continue
    return result
