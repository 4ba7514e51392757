"""Lifetimes of the tensors of a step, the bytes alive over time, and the peak.

Time counts operators. A tensor is alive from its birth up to and including the moment before its death.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

Kind = Literal["weights", "optimizer", "gradients", "activations", "temporary"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""activations: born in forward and still there when backward begins; temporary: all else that comes and goes."""
Phase = Literal["forward", "backward", "update"]


@dataclass(frozen=True, kw_only=True)
class Lifetime:
    """Lifetime of a block of memory, which any number of tensors may view. birth: number of the operator that allocated
    it; death: that of the operator before which it was freed, or the end of the step; operator and place: name of the
    allocating operator, and its place in the model.
    """

    num_bytes: int
    birth: int
    death: int
    kind: Kind
    operator: str = ""
    place: str = ""

    def __post_init__(self) -> None:
        assert 0 <= self.birth < self.death
        assert self.num_bytes >= 0


@dataclass(frozen=True, kw_only=True)
class MemoryTimeline:
    """The lifetimes of one step, from operator 0 up to `length`; phases: (first operator, phase), in order."""

    lifetimes: tuple[Lifetime, ...]
    length: int
    phases: tuple[tuple[int, Phase], ...] = ()

    def live_bytes(self, kind: Kind | None = None) -> list[int]:
        """Bytes alive at each operator, of one kind or of all."""
        # Differences at births and deaths, whose running sum is the bytes alive: linear in blocks and operators.
        changes = [0] * (self.length + 1)
        for one in self.lifetimes:
            if kind is None or one.kind == kind:
                changes[one.birth] += one.num_bytes
                changes[min(one.death, self.length)] -= one.num_bytes
        return list(accumulate(changes[: self.length]))

    @property
    def peak_time(self) -> int:
        """The first operator at which the most bytes are alive."""
        live = self.live_bytes()
        return max(range(len(live)), key=lambda time: live[time]) if live else 0

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes(), default=0)

    def alive(self, time: int) -> list[Lifetime]:
        """The largest blocks alive, largest first."""
        result = [one for one in self.lifetimes if one.birth <= time < one.death]
        return sorted(result, key=lambda one: (-one.num_bytes, one.birth))

    def by_kind(self, time: int) -> Mapping[Kind, int]:
        """Returns the bytes alive of every kind."""
        alive = self.alive(time)
        return {kind: sum(one.num_bytes for one in alive if one.kind == kind) for kind in KINDS}

    def phase_at(self, time: int) -> Phase:
        result: Phase = "forward"
        for start, phase in self.phases:
            result = phase if start <= time else result
        return result

    @property
    def of_step(self) -> tuple[Lifetime, ...]:
        """Blocks allocated and freed within the step: all but weights and optimizer states."""
        return tuple(one for one in self.lifetimes if one.kind not in ("weights", "optimizer"))
