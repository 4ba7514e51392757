"""How a step's allocations find their planned places: by the definition, the twin of `arena_allocator.cpp`.

Steps need not be alike. An allocation takes the nearest planned block of exactly its size, so what comes in between in
one step and not in another (attention tiles of packed rows, say) moves nothing else; and it gets that block's place
only while nothing alive overlaps it. All else comes from the usual allocator. Knows no tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

OUTLIVES = -1
"""The offset of a block that was still alive when its step ended: it comes from the usual allocator."""
WINDOW = 256
"""How many allocations before and after the one that is due a block of equal size is looked for."""


@dataclass
class ReplayNaive:
    """One step after the other by one plan: `(bytes, offset)` of each allocation in its order."""

    planned: Sequence[tuple[int, int]]
    living: dict[int, int] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    due: int = 0
    num_served: int = 0
    num_missed: int = 0
    num_outliving: int = 0

    def begin(self) -> None:
        """A new step; what earlier ones have left in the arena keeps its place."""
        self.taken = set()
        self.due = self.num_served = self.num_missed = self.num_outliving = 0

    def allocate(self, num_bytes: int) -> int | None:
        """An offset in the arena, or None for the usual allocator."""
        number = self._matching(num_bytes)
        if number is None:
            self.num_missed += 1
            return None
        self.taken.add(number)
        self.due = number + 1
        offset = self.planned[number][1]
        if offset == OUTLIVES:
            self.num_outliving += 1
            return None
        if any(start < offset + num_bytes and offset < end for start, end in self.living.items()):
            self.num_missed += 1
            return None
        self.living[offset] = offset + num_bytes
        self.num_served += 1
        return offset

    def free(self, offset: int) -> None:
        del self.living[offset]

    def _matching(self, num_bytes: int) -> int | None:
        """Of two equally near the later one."""
        near = [
            (abs(number - self.due), -number)
            for number, (size, _) in enumerate(self.planned)
            if size == num_bytes and number not in self.taken and abs(number - self.due) <= WINDOW
        ]
        return -min(near)[1] if near else None
