"""Gradients summed over the ranks while backward runs, bucket by bucket, each parameter handed on as soon as its sum is
there: what updates in backward need where every rank holds whole copies, or pieces that other ranks hold too.

The same buckets as `ExactTransport`'s, and the same sums. Knows no optimizer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from modelwright.ops.pieces import laid_out_as, local
from modelwright.parallel.grad_norm import like_parameter
from modelwright.parallel.mesh import World
from modelwright.parallel.gradient_sync import BUCKET_BYTES, MANY_BUCKETS, Buckets, ring_bytes

MOST_IN_FLIGHT = 2
"""Buckets that wait for their sums: more hide more of a link's latency, and hold more gradients."""


class SumsInBackward:
    """A `GradientTransport` that has nothing left for `reduce`. A gradient's own memory goes when its bucket begins.

    `bytes_sent`: see `ring_bytes`.
    """

    def __init__(self, world: World, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.world = world
        self.bytes_sent = 0
        self._parameters: list[Tensor] = []
        self._then: Callable[[Tensor, Tensor], None] = lambda parameter, held: None
        self._buckets = Buckets(
            self._begin, bucket_bytes=bucket_bytes, many=MANY_BUCKETS, of=lambda parameter: parameter
        )
        self._in_flight: list[tuple[Sequence[Tensor], Tensor, Callable[[], object]]] = []

    def arm_updates(self, parameters: Sequence[Tensor], then: Callable[[Tensor, Tensor], None]) -> None:
        """Before the last backward of a step, on all ranks alike; then: is called for each parameter, which it is given
        twice, when its gradient is the sum."""
        self._parameters, self._then = list(parameters), then
        self._buckets.arm(parameters)

    def finish_updates(self) -> None:
        """After that backward, on all ranks: what is left; where nothing flowed a rank adds nothing."""
        self._buckets.finish(self._parameters)
        self._land(most_left=0)

    def close(self) -> None:
        """At the end of a run."""
        self._buckets.close()

    def reduce(self, gradients: Sequence[Tensor]) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    @torch.no_grad()
    def _begin(self, parameters: Sequence[Tensor]) -> None:
        self._land(most_left=MOST_IN_FLIGHT - 1)
        pieces = [local(_final(parameter)).reshape(-1) for parameter in parameters]
        flat = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        for parameter in parameters:
            parameter.grad = None
        self._in_flight.append((parameters, flat, self.world.start_sum(flat)))

    @torch.no_grad()
    def _land(self, *, most_left: int) -> None:
        """Wait for the sums that began first, and hand their parameters over."""
        while len(self._in_flight) > most_left:
            parameters, flat, wait = self._in_flight.pop(0)
            wait()
            self.bytes_sent += ring_bytes(flat.numel() * flat.element_size(), self.world.size)
            parts = flat.split([local(parameter).numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = laid_out_as(parameter, part.view_as(local(parameter)))
                self._then(parameter, parameter)


def _final(parameter: Tensor) -> Tensor:
    """The gradient on this rank, zeros where nothing flowed, with sums over tensor parallelism finished."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return like_parameter(gradient, parameter)
