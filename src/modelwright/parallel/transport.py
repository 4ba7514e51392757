"""The gradient-transport seam: how gradients cross the network, and how many bytes that took.

Gradients come in as each rank's share of one sum (already divided by the global normaliser) and leave as the sum.
Knows nothing about losses or optimizers. `transports/` holds those that send fewer bytes.

A transport's state differs from rank to rank, and a checkpoint keeps it for each rank. What stands under a key
`shared` is equal on all ranks; of all other tensors only the sum over the ranks matters, so that under another number
of ranks each gets that sum divided by the new number. A list of tensors with the gradients' shapes, in their order,
follows the parameters into another layout.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from modelwright.parallel.mesh import World

BUCKET_BYTES = 25 * 2**20
"""Size of one message; large enough to hide latency, small enough to overlap (the default of PyTorch's DDP)."""


class GradientTransport(Protocol):
    """Sums gradients over the ranks."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has put on the network so far."""
        ...

    def reduce(self, gradients: Sequence[Tensor]) -> None:
        """Replace every gradient by its sum over the ranks, in place; same tensors in the same order everywhere."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ExactTransport:
    """Sums in the gradients' own format: flat buckets, one all-reduce each, all in flight together.

    `bytes_sent` counts 2 (n - 1) / n of the payload, what a ring all-reduce over n ranks sends.
    """

    def __init__(self, world: World, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.world = world
        self.bucket_bytes = bucket_bytes
        self.bytes_sent = 0

    def reduce(self, gradients: Sequence[Tensor]) -> None:
        if self.world.size == 1:
            return
        in_flight = []
        for bucket in self._buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            in_flight.append((bucket, flat, self.world.start_sum(flat)))
        for bucket, flat, wait in in_flight:
            wait()
            parts = flat.split([gradient.numel() for gradient in bucket])
            shaped = [part.view_as(gradient) for part, gradient in zip(parts, bucket, strict=True)]
            torch._foreach_copy_(bucket, shaped)  # pyright: ignore
            payload = flat.numel() * flat.element_size()
            self.bytes_sent += 2 * payload * (self.world.size - 1) // self.world.size

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def _buckets(self, gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        bucket: list[Tensor] = []
        size = 0
        for gradient in gradients:
            num_bytes = gradient.numel() * gradient.element_size()
            if bucket and (size + num_bytes > self.bucket_bytes or gradient.dtype != bucket[0].dtype):
                yield bucket
                bucket, size = [], 0
            bucket.append(gradient)
            size += num_bytes
        if bucket:
            yield bucket
