"""Who makes which update of a run: all processes together, whole or each a part of it, or each process its own.

The loop hands over its step as a function of the update's number and goes through what comes back. Knows nothing about
what a step does.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from modelwright.parallel.mesh import Mesh

Done = TypeVar("Done")


class Turns(Protocol):
    """Shares the updates of a run among its processes."""

    @property
    def mesh(self) -> Mesh:
        """The processes that make one update together."""
        ...

    def begin(self, optimizer: Optimizer, step: int) -> Optimizer:
        """Once, when weights and optimizer are as they were after `step` updates, on all processes alike.

        Returns the one that makes this process's part of the updates.
        """
        ...

    def updates(
        self, one_step: Callable[[int], Done], first: int, last: int, interrupted: Callable[[], bool]
    ) -> Iterator[Done]:
        """Make this process's part of the updates `first`, `first + 1`, ... below `last`, or of fewer.

        `interrupted`: whether this process wants everybody to stop soon. Yields what `one_step` returned for all the
        updates that were made, whichever process made them, in their order; at the end all of them are in the weights
        and all processes have equal weights. At least one update is made.
        """
        ...

    @property
    def divides(self) -> bool:
        """Whether each process makes a part of every update."""
        ...

    def part(self, gradients: list[Tensor]) -> list[Tensor]:
        """What of the gradients, which the transport has summed, this process's updates work on."""
        ...

    def step(self, optimizer: Optimizer) -> None:
        """Let the optimizer change the weights, of which every process sees the whole afterwards."""
        ...

    def figures(self) -> Mapping[str, float]:
        """For the metrics of the step that is being made."""
        ...


@dataclass
class Together:
    """Every update is made by all processes; they may stop after each."""

    mesh: Mesh
    divides = False

    def begin(self, optimizer: Optimizer, step: int) -> Optimizer:
        return optimizer

    def part(self, gradients: list[Tensor]) -> list[Tensor]:
        return gradients

    def step(self, optimizer: Optimizer) -> None:
        optimizer.step()

    def updates(
        self, one_step: Callable[[int], Done], first: int, last: int, interrupted: Callable[[], bool]
    ) -> Iterator[Done]:
        yield one_step(first)

    def figures(self) -> Mapping[str, float]:
        return {}
