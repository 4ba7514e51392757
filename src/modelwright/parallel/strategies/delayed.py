"""Gradients a fixed number of steps late, so that the network works while the next steps are computed.

The sum begun in step t is delivered in step t + delay, on all ranks alike: no rank can apply updates more than `delay`
steps ahead of the slowest, replicas stay equal to the bit, and a run can be repeated and resumed (Ho et al. 2013 bound
the staleness in the same way but let every rank read whatever has arrived, which gives up all three). The first `delay`
steps deliver zeros, and the gradients of the last `delay` steps are never applied.

Wraps any gradient sync. It costs `delay` more copies of the gradients, and of the weights with a compensation.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelwright.parallel.gradient_sync import GradientSync
from modelwright.parallel.strategy import Compensate


@dataclass(frozen=True)
class _InFlight:
    """Gradients of one step in flight, and the weights at which they were computed (empty if not needed). sent: returns
    the `bytes_sent` once they have arrived.
    """

    sums: list[Tensor]
    weights: list[Tensor]
    sent: "Future[int]"


class DelayedSync:
    """`inner`, delivering `delay` steps late (at least one) from a thread.

    inner: works among ranks of a group that nothing else uses (`duplicate_group`), because its collectives run
    concurrently with the trainer's. weights: the tensors that are updated, in the order of the gradients; needed for
    `compensate` only. Call `close` before the process group is destroyed.
    """

    def __init__(
        self, inner: GradientSync, *, delay: int, weights: Sequence[Tensor] = (), compensate: Compensate | None = None
    ) -> None:
        assert delay >= 1
        self.inner = inner
        self.delay = delay
        self.weights = list(weights)
        self.compensate = compensate
        self.bytes_sent = 0
        self._in_flight: deque[_InFlight] = deque()
        self._thread = ThreadPoolExecutor(1, "gradients", torch.set_num_threads, (torch.get_num_threads(),))

    def close(self) -> None:
        """Waits for sums in flight; all ranks have started the same sums, so they complete."""
        self._thread.shutdown()

    def reduce(self, gradients: Sequence[Tensor]) -> None:
        """Starts the sum of these gradients, and replaces them by that of `delay` steps ago; zeros at the beginning."""
        # Copies, because the next step changes gradients and weights while the sum is in flight.
        sums = [gradient.detach().clone() for gradient in gradients]
        weights = [weight.detach().clone() for weight in self.weights] if self.compensate is not None else []

        def send() -> int:
            self.inner.reduce(sums)
            return self.inner.bytes_sent

        self._in_flight.append(_InFlight(sums, weights, self._thread.submit(send)))
        if len(self._in_flight) <= self.delay:
            torch._foreach_zero_(list(gradients))  # pyright: ignore
            return
        arrived = self._in_flight.popleft()
        self.bytes_sent = arrived.sent.result()
        torch._foreach_copy_(list(gradients), arrived.sums)  # pyright: ignore
        if self.compensate is not None:
            self.compensate(gradients, [weight.detach() for weight in self.weights], arrived.weights)

    def state_dict(self) -> dict[str, Any]:
        """The sums in flight, waited for; a sum is the same on all ranks."""
        for step in self._in_flight:
            step.sent.result()
        in_flight = [{"sums": step.sums, "weights": step.weights} for step in self._in_flight]
        return {"inner": self.inner.state_dict(), "shared": in_flight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues with the sums that were in flight; with a shorter delay, starts with zeros again."""
        self.inner.load_state_dict(state["inner"])
        self._in_flight.clear()
        if len(state["shared"]) > self.delay:
            return
        for step in state["shared"]:
            arrived: Future[int] = Future()
            arrived.set_result(0)
            self._in_flight.append(_InFlight(list(step["sums"]), list(step["weights"]), arrived))
