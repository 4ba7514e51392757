"""What a pipeline schedule allows: the order of work that ranks really took, replayed with other durations.

A rank does its spans one after the other, each as soon as what it needs from another stage is there; sending costs
nothing. With equal durations this gives the schedules' textbook figures, with measured ones the bound of that split.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from modelwright.parallel.pipeline.trace import Span

Key = tuple[str, int, int]
"""What was done, for which stage and which microbatch: forward, loss, gradient (of what entered the stage), weight."""
_DOES = {"forward": "forward", "loss": "loss", "backward": "gradient", "backward_input": "gradient"}


@dataclass(frozen=True, kw_only=True)
class Replay:
    """makespan: from the first span's start to the last one's end; busy: of each rank, in the unit of the durations."""

    makespan: float
    busy: tuple[float, ...]

    @property
    def share(self) -> float:
        """Busy time over all time, the mean of the ranks."""
        return sum(self.busy) / len(self.busy) / self.makespan


def measured_durations(spans: Sequence[Sequence[Span]]) -> list[list[float]]:
    return [[span.busy_s for span in rank] for rank in spans]


def equal_durations(spans: Sequence[Sequence[Span]]) -> list[list[float]]:
    """1 for a forward, an input or a weight pass of a stage, 2 for a whole backward pass, nothing for the loss."""
    return [[_equal_duration(key, keys) for key in keys] for keys in map(keys_of, spans)]


def keys_of(spans: Sequence[Span]) -> list[Key]:
    """What each span of one rank was: a stage's spans of one kind come in the order of microbatches."""
    seen: Counter[tuple[str, int]] = Counter()
    keys = []
    for span in spans:
        does = _DOES.get(span.kind, "weight")
        keys.append((does, span.stage, seen[does, span.stage]))
        seen[does, span.stage] += 1
    return keys


def replay(spans: Sequence[Sequence[Span]], durations: Sequence[Sequence[float]]) -> Replay:
    """Every rank's spans in their order, with `durations` (same shape) instead of their own.

    Weight passes follow the microbatches' order only within a stage, as PyTorch's schedules do.
    """
    order = [keys_of(rank) for rank in spans]
    num_stages = 1 + max(stage for keys in order for _, stage, _ in keys)
    done: dict[Key, float] = {}
    free, next_span = [0.0] * len(order), [0] * len(order)
    while any(next_span[rank] < len(keys) for rank, keys in enumerate(order)):
        moved = False
        for rank, keys in enumerate(order):
            while next_span[rank] < len(keys):
                key = keys[next_span[rank]]
                needed = _needs(key, num_stages)
                if needed is not None and needed not in done:
                    break
                start = max(free[rank], done[needed] if needed is not None else 0.0)
                free[rank] = done[key] = start + durations[rank][next_span[rank]]
                next_span[rank] += 1
                moved = True
        assert moved, "the ranks wait for each other"
    return Replay(makespan=max(free), busy=tuple(map(sum, durations)))


def _needs(key: Key, num_stages: int) -> Key | None:
    does, stage, microbatch = key
    if does == "forward":
        return ("forward", stage - 1, microbatch) if stage else None
    if does == "loss":
        return ("forward", stage, microbatch)
    if does == "weight":
        return ("gradient", stage, microbatch)
    is_last = stage == num_stages - 1
    return ("loss", stage, microbatch) if is_last else ("gradient", stage + 1, microbatch)


def _equal_duration(key: Key, keys: Sequence[Key]) -> float:
    does, stage, microbatch = key
    if does == "gradient":
        return 1.0 if ("weight", stage, microbatch) in keys else 2.0
    return 0.0 if does == "loss" else 1.0
