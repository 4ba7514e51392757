"""Runs any gradient sync bucket by bucket, starting while backward still runs.

Neighboring gradients make a bucket. Each bucket has its own sync object with its residuals; one thread runs them in the
same order on all ranks, from the last gradients to the first.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from modelwright.parallel.gradient_sync import BUCKET_BYTES, Buckets, GradientSync
from modelwright.parallel.mesh import World


class BucketedSync:
    """A gradient sync made of one sync object per bucket. make: creates such an object over `world`, a group that
    nothing else uses (`duplicate_group`).

    A sync object's state must consist of lists with one tensor per gradient, or empty ones, and under `shared` of lists
    and numbers. The concatenated lists of all buckets then follow the parameters into another layout. Shared lists are
    kept per bucket and start afresh under a layout with another number of buckets; shared numbers are kept. Call
    `close` before the process group is destroyed.
    """

    def __init__(
        self, world: World, make: Callable[[World], GradientSync], *, bucket_bytes: int = BUCKET_BYTES, many: int = 1
    ) -> None:
        self.world = world
        self._make = make
        self._transports: list[GradientSync] = []
        self._loaded: dict[str, Any] = {}
        self._in_flight: list[Future[None]] = []
        self._shapes: list[list[torch.Size]] = []
        self._buckets = Buckets(self._start, bucket_bytes=bucket_bytes, many=many)
        # A new thread would compute with PyTorch's default number of threads.
        self._thread = ThreadPoolExecutor(1, "gradients", torch.set_num_threads, (torch.get_num_threads(),))

    @property
    def bytes_sent(self) -> int:
        return sum(transport.bytes_sent for transport in self._transports)

    def arm(self, parameters: Sequence[Tensor]) -> None:
        if self.world.size == 1:
            return
        self._know(self._buckets.cut(parameters))
        self._buckets.arm(parameters)

    def reduce(self, gradients: Sequence[Tensor]) -> None:
        self._know(self._buckets.cut(gradients))
        self._buckets.finish(gradients)
        in_flight, self._in_flight = self._in_flight, []
        for one in in_flight:
            one.result()

    def close(self) -> None:
        """Waits for sums in flight; all ranks have begun the same buckets, so they complete."""
        self._buckets.close()
        self._thread.shutdown()

    def state_dict(self) -> dict[str, Any]:
        """Residuals in the order of the gradients, while buckets come last first; empty before the first message."""
        states = [transport.state_dict() for transport in reversed(self._transports)]
        if not states:
            return self._loaded
        lists: dict[str, list[Tensor]] = {}
        for name in (name for name in states[0] if name != "shared"):
            parts = [state[name] for state in states]
            # A bucket without residuals counts as zeros next to those that have some: one list covers all gradients.
            if any(parts):
                whole = zip(parts, reversed(self._shapes), strict=True)
                parts = [part or list(map(torch.zeros, shapes)) for part, shapes in whole]
            lists[name] = [tensor for part in parts for tensor in part]
        return {**lists, "shared": [state.get("shared", {}) for state in states]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keeps the state until the buckets are known, among which it is divided."""
        self._transports = []
        self._loaded = state

    def _start(self, gradients: Sequence[Tensor]) -> None:
        transport = self._transports[len(self._in_flight)]
        self._in_flight.append(self._thread.submit(transport.reduce, gradients))

    def _know(self, buckets: Sequence[Sequence[Tensor]]) -> None:
        """Creates a sync object for each bucket, with its part of the loaded state."""
        if self._transports:
            return
        self._transports = [self._make(self.world) for _ in buckets]
        self._shapes = [[tensor.shape for tensor in bucket] for bucket in buckets]
        state, self._loaded = self._loaded, {}
        if not state:
            return
        shared = state.get("shared") or [transport.state_dict().get("shared", {}) for transport in self._transports]
        if len(shared) != len(buckets):
            shared = [{k: [] if isinstance(v, list) else v for k, v in shared[0].items()}] * len(buckets)
        left = {name: list(value) for name, value in state.items() if name != "shared"}
        for transport, bucket, own in zip(reversed(self._transports), reversed(buckets), shared, strict=True):
            # The last one takes all that is left: a state of other gradients fails on its surplus.
            size = None if bucket is buckets[0] else len(bucket)
            lists = {name: value[:size] for name, value in left.items()}
            left = {name: value[len(bucket) :] for name, value in left.items()}
            transport.load_state_dict({**transport.state_dict(), **lists, "shared": own})
