"""Second process of the network probes: `python -P peer.py loopback|gloo PORT`.

It answers every message of the first process, and ends when the connection does. It runs as a file, without the
package, and imports PyTorch for gloo only, so that it starts fast.
"""

import datetime
import socket
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

HOST = "127.0.0.1"
MESSAGE_BYTES = 16 * 2**20
NUM_WARMUPS = 5
TIMEOUT = datetime.timedelta(seconds=20)


def ping(connection: socket.socket, message: bytes) -> None:
    """Sends a message with its length, and waits for one byte. Raises `OSError` if the other end has closed."""
    connection.sendall(len(message).to_bytes(8, "big"))
    connection.sendall(message)
    if not connection.recv(1):
        raise OSError("the second process has closed the connection")


@dataclass(frozen=True)
class GlooSession:
    """The process group of two ranks, and the tensors that both reduce."""

    group: Any
    small: "torch.Tensor"
    large: "torch.Tensor"

    def seconds(self, tensor: "torch.Tensor") -> float:
        """Times an all-reduce, in seconds."""
        start = time.perf_counter()
        self.group.allreduce([tensor]).wait()
        return time.perf_counter() - start


def start_gloo(store: "Store", rank: int) -> GlooSession:
    """Connects both ranks over loopback, whatever the host's name resolves to."""
    import torch
    import torch.distributed as dist

    # PyTorch has no public way to name the interface of a single group.
    options: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]  # pyright: ignore
    options._timeout = TIMEOUT
    group = dist.ProcessGroupGloo(store, rank, 2, options)
    return GlooSession(group, torch.zeros(1), torch.zeros(MESSAGE_BYTES // 4))


def _serve_loopback(port: int) -> None:
    """Answers every message with a byte until the other end closes."""
    with socket.create_connection((HOST, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = bytearray(2**20)
        # A length of 8 bytes comes first; none if the other end has closed.
        while len(length := connection.recv(8, socket.MSG_WAITALL)) == 8:
            left = int.from_bytes(length, "big")
            while left > 0:
                received = connection.recv_into(buffer, min(left, len(buffer)))
                if not received:
                    return
                left -= received
            connection.sendall(b"y")


def _serve_gloo(port: int) -> None:
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore(HOST, port, world_size=2, is_master=False, timeout=TIMEOUT)
    store.set("ready", "1")
    session = start_gloo(store, 1)
    for number, tensor in enumerate((session.small, session.large)):
        for _ in range(NUM_WARMUPS):
            session.seconds(tensor)
        for _ in range(int(store.get(f"num_{number}"))):
            session.seconds(tensor)


if __name__ == "__main__":
    kind, port = sys.argv[1:]
    {"loopback": _serve_loopback, "gloo": _serve_gloo}[kind](int(port))
