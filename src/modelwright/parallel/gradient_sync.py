"""Sums of gradients over the network, and the bytes that they take.

Gradients come in as each rank's share of one sum (already divided by the global normalizer) and leave as the sum.
`codecs/` holds implementations that send fewer bytes. The state differs from rank to rank, and a checkpoint stores it
per rank. Entries under a key `shared` are equal on all ranks; of all other tensors only the sum over the ranks matters,
so that under another number of ranks each gets that sum divided by the new number. A list of tensors with the
gradients' shapes, in their order, follows the parameters into another layout.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from modelwright.core.artifacts import ArtifactError
from modelwright.parallel.mesh import World

BUCKET_BYTES = 25 * 2**20
"""Most bytes of one message; large enough to hide latency, small enough to overlap (the default of PyTorch's DDP)."""
MANY_BUCKETS, SMALL_BUCKET_BYTES = 8, 2**18
"""Number of messages where every value crosses the network, even if all gradients would fit in one, which could begin
only after backward; and the size below which no message is divided for it."""


class GradientSync(Protocol):
    """Sums gradients over the ranks."""

    @property
    def bytes_sent(self) -> int:
        """Payload bytes of this rank's messages; the metric of this name counts all traffic (`Traffic`)."""
        ...

    def reduce(self, gradients: Sequence[Tensor]) -> None:
        """Replaces every gradient by its sum, in place; the same tensors in the same order on every rank."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Buckets:
    """Forms buckets of gradients, from the last to the first, and starts each: once armed, as soon as its last gradient
    is ready and the previous bucket has started, so that all ranks use the same order. begin: called with a bucket's
    gradients, or with `of` applied to its parameters; many: number of buckets for a small model (`cut_into_buckets`).
    """

    def __init__(
        self,
        begin: Callable[[Sequence[Tensor]], None],
        *,
        bucket_bytes: int,
        many: int = 1,
        of: Callable[[Tensor], Tensor] = attrgetter("grad"),
    ) -> None:
        self.begin = begin
        self.bucket_bytes = bucket_bytes
        self.many = many
        self.of = of
        self._hooked: list[Tensor] = []
        self._hooks: list[RemovableHandle] = []
        self._armed = False
        self._waiting: list[dict[int, Tensor]] = []
        self._buckets: list[list[Tensor]] = []
        self._num_begun = 0

    def arm(self, parameters: Sequence[Tensor]) -> None:
        """Called before the last backward pass of a step."""
        if list(map(id, self._hooked)) != list(map(id, parameters)):
            self.close()
            self._hooked = list(parameters)
            self._buckets = self.cut(parameters)
            self._hooks = [one.register_post_accumulate_grad_hook(self._finished) for one in parameters]
        self._waiting = [{id(parameter): parameter for parameter in bucket} for bucket in self._buckets]
        self._armed = True

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooked, self._hooks = [], []

    def finish(self, gradients: Sequence[Tensor]) -> list[list[Tensor]]:
        """Starts the remaining buckets, and returns all of them."""
        self._armed = False
        buckets = self.cut(gradients)
        for bucket in buckets[self._num_begun :]:
            self.begin(bucket)
        self._num_begun = 0
        return buckets

    def cut(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """See `cut_into_buckets`."""
        return cut_into_buckets(tensors, self.bucket_bytes, many=self.many)

    def _finished(self, parameter: Tensor) -> None:
        if not self._armed:
            return
        for waiting in self._waiting:
            waiting.pop(id(parameter), None)
        # A bucket that is complete waits for those before it: ranks may finish gradients in another order, but their
        # collectives must match.
        while self._num_begun < len(self._buckets) and not self._waiting[self._num_begun]:
            bucket = self._buckets[self._num_begun]
            self._num_begun += 1
            self.begin([self.of(parameter) for parameter in bucket])


def cut_into_buckets(tensors: Sequence[Tensor], bucket_bytes: int, *, many: int = 1) -> list[list[Tensor]]:
    """Cuts tensors into buckets of neighbors of one dtype, in order, the last bucket first. A bucket has at most
    `bucket_bytes` unless it holds one tensor, and about a `many`-th of all bytes, but not less than
    `SMALL_BUCKET_BYTES`.
    """
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    most = min(bucket_bytes, max(-(-sum(sizes) // many), SMALL_BUCKET_BYTES))
    buckets: list[list[Tensor]] = []
    size = 0
    for tensor, num_bytes in zip(reversed(tensors), reversed(sizes), strict=True):
        if not buckets or size + num_bytes > most or tensor.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].insert(0, tensor)
        size += num_bytes
    return buckets


def ring_bytes(num_bytes: int, num_ranks: int) -> int:
    """Bytes that each rank sends in a ring all-reduce of `num_bytes`: 2 (n - 1) / n of them."""
    return 2 * num_bytes * (num_ranks - 1) // num_ranks


class AllReduceSync:
    """Sums in the gradients' own dtype: flat buckets, one all-reduce each, all in flight together. `bytes_sent` counts
    the bytes of a ring all-reduce (`ring_bytes`).
    """

    def __init__(self, world: World, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.world = world
        self.bytes_sent = 0
        self._buckets = Buckets(self._start, bucket_bytes=bucket_bytes, many=MANY_BUCKETS)
        self._chosen: Sequence[Tensor | None] = []
        self._in_flight: list[tuple[Tensor, Sequence[Tensor | None], Callable[[], object]]] = []

    def send_rows(self, chosen: Sequence[Tensor | None]) -> None:
        """Sends only these rows of the gradients from the next step on (int64 [S]; None for all of them), in the order
        in which `reduce` sees them. The others must be zero, and the choice the same, on all ranks.
        """
        self._chosen = chosen

    def arm(self, parameters: Sequence[Tensor]) -> None:
        if self.world.size > 1:
            self._buckets.arm(parameters)

    def close(self) -> None:
        """Removes the hooks; called at the end of a run."""
        self._buckets.close()

    def reduce(self, gradients: Sequence[Tensor]) -> None:
        if self.world.size == 1:
            return
        buckets = self._buckets.finish(gradients)
        in_flight, self._in_flight = self._in_flight, []
        for bucket, (flat, chosen, wait) in zip(buckets, in_flight, strict=True):
            wait()
            shapes = [
                gradient.shape if rows is None else torch.Size([len(rows), *gradient.shape[1:]])
                for gradient, rows in zip(bucket, chosen, strict=True)
            ]
            parts = flat.split([shape.numel() for shape in shapes])
            sums = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
            if any(rows is not None for rows in chosen):
                for gradient, rows, part in zip(bucket, chosen, sums, strict=True):
                    gradient.copy_(part) if rows is None else gradient.index_copy_(0, rows, part)
            else:
                torch._foreach_copy_(bucket, sums)  # pyright: ignore
            self.bytes_sent += ring_bytes(flat.numel() * flat.element_size(), self.world.size)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def _start(self, gradients: Sequence[Tensor]) -> None:
        # Buckets start from the last gradient to the first, so this one's rows end before those in flight.
        end = len(self._chosen) - sum(len(chosen) for _, chosen, _ in self._in_flight)
        chosen = self._chosen[end - len(gradients) : end] if self._chosen else [None] * len(gradients)
        parts = [
            gradient if rows is None else gradient.index_select(0, rows)
            for gradient, rows in zip(gradients, chosen, strict=True)
        ]
        flat = torch.cat([part.reshape(-1) for part in parts])
        self._in_flight.append((flat, chosen, self.world.start_sum(flat)))


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """All values in order, FP32 [N]; a copy."""
    return torch.cat([tensor.reshape(-1).float() for tensor in tensors])


def write_back(flat_N: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copies the values into the tensors, in the order of `flatten`."""
    torch._foreach_copy_(list(tensors), shaped(flat_N, tensors))  # pyright: ignore


def shaped(flat_N: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of the flat vector with the shapes of `like`."""
    parts = flat_N.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


@dataclass(eq=False)
class Residual:
    """Values that have not been sent yet, one tensor per gradient (FP32), so that a checkpoint can redistribute them
    with the parameters; empty before the first message.

    Error feedback: the error of one message is added to the next (Seide et al. 2014; Karimireddy et al. 2019).
    """

    tensors: list[Tensor] = field(default_factory=list[Tensor])

    def flat(self, gradients: Sequence[Tensor]) -> Tensor | None:
        """The residual [N], None before the first message. Raises `ArtifactError` if it belongs to other gradients."""
        if not self.tensors:
            return None
        if [tensor.shape for tensor in self.tensors] != [gradient.shape for gradient in gradients]:
            raise ArtifactError(
                "checkpoint: the residuals of gradient compression belong to other parameters than this layout's; "
                "resume with the layout that wrote the checkpoint, or start afresh"
            )
        return flatten(self.tensors).to(gradients[0].device)

    def drain(self, gradients: Sequence[Tensor]) -> None:
        """Adds the residual to the gradients of a rank that is alone and sends no further message."""
        flat = self.flat(gradients)
        if flat is not None:
            left = [part.to(gradient.dtype) for part, gradient in zip(shaped(flat, gradients), gradients, strict=True)]
            torch._foreach_add_(list(gradients), left)  # pyright: ignore
            self.tensors = []
