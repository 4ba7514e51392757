"""`PlanAhead`: what the plan of a loader says of the batches to come."""

from collections.abc import Callable
from typing import Generic, TypeVar

from modelwright.data.batching.augmented import PlannedRows
from modelwright.data.loader import RowShare

Planned = TypeVar("Planned")
Look = Callable[[PlannedRows, int, int, int], Planned]
"""What a loader's plan says of a batch, from the loader, the number of the batch, the rank and the number of ranks."""


def share_of(loader: PlannedRows, index: int, rank: int, world_size: int) -> RowShare:
    """A `Look`: a rank's rows."""
    return loader.share(index, rank=rank, world_size=world_size)


class PlanAhead(Generic[Planned]):
    """What `look` finds in the plan of `loader` for a batch and the `num_ahead` batches after it.

    A fork of the loader is asked, and a new one whenever the plan may have changed.
    """

    def __init__(self, loader: PlannedRows, look: Look[Planned], *, num_ahead: int) -> None:
        self._loader = loader
        self._look = look
        self._num_ahead = num_ahead
        self._fork = loader.fork()
        self._plan = (loader.plan_version, 0, 1)
        self._known: dict[int, Planned] = {}

    def of(self, index: int, rank: int, world_size: int) -> dict[int, Planned]:
        """By the number of the batch, in order. While the plan stays, a batch has the same object in every answer."""
        plan = (self._loader.plan_version, rank, world_size)
        if plan != self._plan:
            self._fork, self._plan, self._known = self._loader.fork(), plan, {}
        planned = dict[int, Planned]()
        for number in range(index, index + 1 + self._num_ahead):
            known = self._known.get(number)
            planned[number] = self._look(self._fork, number, rank, world_size) if known is None else known
        self._known = planned
        return planned
