"""One copy of the weights for all processes of a host, changed while backward runs: no gradients but a few buckets.

What `one_copy` does after backward happens here for one bucket of parameters after the other, as soon as all processes
have their gradients, so that none of them needs those weights any more. Shared memory then holds weights and optimizer
states, and two buckets of each process.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from modelwright.parallel.mesh import Mesh
from modelwright.parallel.strategies.shared_memory import OneCopy, starts_of
from modelwright.parallel.gradient_sync import Buckets, cut_into_buckets

BUCKET_BYTES = 4 * 2**20
"""Processes meet once for each bucket, which costs some 0.1 ms: far less than the backward of so many weights."""


class OneCopyInBackward(OneCopy):
    """While one bucket is summed and used, the next is filled. Each process makes its part of every parameter, so that
    all have work at every bucket.

    parameters: all that are trained, in the model's order, of which backward is the reverse.
    """

    def __init__(self, mesh: Mesh, parameters: Sequence[Tensor], *, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__(mesh)
        self._in_order = list(parameters)
        self._buckets = Buckets(self._sum, bucket_bytes=bucket_bytes, of=lambda parameter: parameter)
        self._then: Callable[[Tensor, Tensor], None] = lambda parameter, held: None

    def __exit__(self, *error: object) -> None:
        self._buckets.close()
        super().__exit__(*error)

    def arm_updates(self, parameters: Sequence[Tensor], then: Callable[[Tensor, Tensor], None]) -> None:
        """Before the last backward of a step, on all processes alike; then: is called with a parameter and this
        process's part of it, whose gradient is the sum."""
        self._then = then
        self._buckets.arm(self._in_order)

    @torch.no_grad()
    def finish_updates(self) -> None:
        """After that backward, on all processes: what is left; afterwards all weights are changed."""
        self._buckets.finish(self._in_order)
        torch._foreach_add_(self._counts, 1)  # pyright: ignore
        self.world.barrier()

    def reduce(self, gradients: Sequence[Tensor]) -> None: ...

    def part(self, gradients: list[Tensor]) -> list[Tensor]:
        return []

    @torch.no_grad()
    def _sum(self, bucket: Sequence[Tensor]) -> None:
        for parameter in bucket:
            if parameter.grad is None:
                self._slots[parameter].zero_()
            else:
                self._slots[parameter].copy_(parameter.grad)
            parameter.grad = None
        self.world.barrier()
        for parameter in bucket:
            if piece := self._pieces.get(parameter):
                piece.weight.grad = own = piece.slots[self.world.rank]
                for rank, slot in enumerate(piece.slots):
                    if rank != self.world.rank:
                        own.add_(slot)
                self._then(parameter, piece.weight)

    def _gradient_room(self, starts: Sequence[int]) -> int:
        return room(self._in_order, bucket_bytes=self._buckets.bucket_bytes)

    def _gradient_places(self, room: Tensor, starts: Sequence[int]) -> list[Tensor]:
        halves, places = room.chunk(2), {}
        for number, bucket in enumerate(self._buckets.cut(self._in_order)):
            for parameter, start in zip(bucket, starts_of(bucket), strict=False):
                place = halves[number % 2][start : start + parameter.numel()]
                places[parameter] = place.view_as(parameter)
        return [places[parameter] for parameter in self._parameters]

    def _own_range(self, parameter: Tensor, start: int, total: int) -> tuple[int, int]:
        return self._share(parameter.numel())

    def _follow_backward(self) -> None:
        """The buckets do."""


def room(parameters: Sequence[Tensor], *, bucket_bytes: int = BUCKET_BYTES) -> int:
    """Elements of two of the largest buckets."""
    return 2 * max(starts_of(bucket)[-1] for bucket in cut_into_buckets(parameters, bucket_bytes))
