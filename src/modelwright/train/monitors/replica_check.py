"""Guards against silent corruption: replicas that no longer agree, and batches whose gradient is out of all proportion.

Both join the loop at its seams: `ReplicaCheck` is a controller, `Quarantine` an update between the finite check and
clipping. Knows nothing about what the tensors mean.
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelwright.core.artifacts import write_atomic
from modelwright.core.errors import ConfigError, ModelwrightError
from modelwright.optim.update import Context
from modelwright.parallel.channel import Channel
from modelwright.train.objective import StepInfo
from modelwright.train.checkpoint.sharded_tensors import piece_of

CHUNK = 1 << 22
"""Elements that are hashed at once: bounds the memory of the check."""
MAX_KEPT = 1000


class ReplicaError(ModelwrightError):
    """Ranks that should hold the same values do not."""


class ReplicaCheck:
    """Controller that compares, every `every` steps, hashes of what several ranks hold: bit for bit.

    tensors: what this rank holds, by name. A difference raises `ReplicaError` on all ranks, before a later checkpoint
    can keep it; a launcher then starts from the checkpoint before. Made on all ranks alike.
    """

    def __init__(self, channel: Channel, tensors: Callable[[], Mapping[str, Tensor]], *, every: int) -> None:
        if every < 1:
            raise ConfigError(f"every: must be at least 1 step, got {every}")
        self.channel = channel
        self.tensors = tensors
        self.every = every

    def observe(self, info: StepInfo) -> None:
        self.check(info.step)

    def check(self, step: int) -> None:
        """Compare now. Raises `ReplicaError` that names the tensor and the ranks that are alone with their values."""
        if self.channel.size == 1:
            return
        pieces = {name: piece_of(tensor) for name, tensor in self.tensors().items()}
        hashes = torch.stack([bits_hash(piece.values) for piece in pieces.values()]).tolist()
        keys = [piece.key(name) for name, piece in pieces.items()]
        found: dict[tuple, dict[int, int]] = {}
        everyone = self.channel.exchange(list(zip(keys, hashes, strict=True)), what=f"comparing replicas after {step}")
        for rank, entries in enumerate(everyone):
            for key, value in entries:
                found.setdefault(key, {})[rank] = value
        problems = [_differing(key[0], by_rank) for key, by_rank in found.items() if len(set(by_rank.values())) > 1]
        if problems:
            raise ReplicaError(
                f"step {step}: copies of {len(problems)} tensors differ: {'; '.join(problems[:3])}: bits were changed "
                "in memory or on the way; the run goes on from the last checkpoint when it is started again"
            )

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def _differing(name: str, by_rank: Mapping[int, int]) -> str:
    value, votes = Counter(by_rank.values()).most_common(1)[0]
    if 2 * votes <= len(by_rank):
        return f"{name} on ranks {sorted(by_rank)}"
    return f"{name} on rank {', '.join(str(rank) for rank, own in by_rank.items() if own != value)}"


def bits_hash(tensor: Tensor) -> Tensor:
    """A 64-bit hash of a tensor's bits, an int64 scalar on its device; the same on any device.

    Each element's bits are mixed with its place (the finaliser of SplitMix64, Steele et al. 2014) and added up, so one
    changed bit always changes the sum, and so do two elements that change places (but for chance, 2^-64).
    """
    bits = tensor.detach().contiguous().reshape(-1)
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = bits.view(widths[min(8, bits.element_size())])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, chunk in enumerate(bits.split(CHUNK)):
        first = number * CHUNK
        place = torch.arange(first, first + chunk.numel(), dtype=torch.int64, device=tensor.device)
        mixed = chunk.to(torch.int64) ^ (place * _signed(0x9E3779B97F4A7C15))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ _shift(mixed, shift)) * _signed(factor)
        total += (mixed ^ _shift(mixed, 31)).sum()
    return total


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(values: Tensor, count: int) -> Tensor:
    """Logical right shift: PyTorch's keeps the sign."""
    return (values >> count) & ((1 << (64 - count)) - 1)


@dataclass(frozen=True, kw_only=True)
class QuarantineConfig:
    """When an update is left out because of its gradient.

    factor: norms above this many times the running median are outliers, 0 lets all pass; window: accepted norms that
    the median is taken over, nothing is judged before a third of them; max_in_a_row: so many outliers in a row are a
    new level, not outliers, and the next one passes.
    """

    factor: float = 0.0
    window: int = 100
    max_in_a_row: int = 3

    def __post_init__(self) -> None:
        if self.factor and self.factor <= 1:
            raise ConfigError(f"factor: must be above 1, got {self.factor}; 0 lets all pass")
        if self.window < 6:
            raise ConfigError(f"window: must be at least 6 steps, got {self.window}")
        if self.max_in_a_row < 1:
            raise ConfigError(f"max_in_a_row: must be at least 1, got {self.max_in_a_row}")


class Quarantine:
    """Update that records the batches whose loss or gradient was not finite or an outlier, and leaves outliers out.

    Comes after the finite check, which measures the norm. `agree`: the maximum of a float over all ranks. Each batch
    is a line in `path` (step of the batch from 0, kind, norm, median, loss); on other than the first rank `path` is
    left alone.
    """

    def __init__(
        self, config: QuarantineConfig, agree: Callable[[float], float], path: Path, *, is_first: bool
    ) -> None:
        self.config = config
        self.agree = agree
        self.path = path
        self.is_first = is_first
        self.batches: list[dict[str, Any]] = []
        self._norms: list[float] = []
        self._in_a_row = 0

    def apply(self, context: Context) -> None:
        if context.skip:
            self._record(context, "not finite", math.nan)
            return
        median = statistics.median(self._norms) if len(self._norms) >= self.config.window // 3 else math.inf
        outlier = self.config.factor > 0 and context.grad_norm > self.config.factor * median
        if self._agreed(outlier and self._in_a_row < self.config.max_in_a_row):
            self._in_a_row += 1
            context.skip = True
            context.scalars["quarantined"] = 1.0
            self._record(context, "outlier", median)
            return
        if self._in_a_row:
            self._norms = self._norms if not outlier else []
        self._in_a_row = 0
        self._norms = [*self._norms, context.grad_norm][-self.config.window :]

    def state_dict(self) -> dict[str, Any]:
        return {"batches": list(self.batches), "norms": list(self._norms), "in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state and write the list as it was at that checkpoint."""
        self.batches, self._norms = list(state["batches"]), list(state["norms"])
        self._in_a_row = state["in_a_row"]
        if self.batches or self.path.exists():
            self._write()

    def _agreed(self, leave_out: bool) -> bool:
        """Whether any rank wants to leave the batch out; nothing is sent when outliers may pass."""
        return self.config.factor > 0 and self.agree(float(leave_out)) > 0

    def _record(self, context: Context, kind: str, median: float) -> None:
        if len(self.batches) >= MAX_KEPT:
            return
        values = {"norm": context.grad_norm, "median": median, "loss": context.loss}
        batch = {"batch": context.step, "kind": kind, **{key: _plain(value) for key, value in values.items()}}
        self.batches.append(batch)
        self._write()

    def _write(self) -> None:
        """All of it, so that what a run that was cut off has left there goes."""
        if self.is_first:
            write_atomic(self.path, "".join(_line(batch) for batch in self.batches))


def _line(batch: Mapping[str, Any]) -> str:
    return json.dumps(batch) + "\n"


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
