"""Detects silent data corruption: replicas that are no longer bit-identical."""

# PyTorch leaves the types of tolist, split and backward open.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from modelwright.core.config import ConfigError, ModelwrightError
from modelwright.parallel.control_plane import ControlPlane
from modelwright.train.checkpoint.files import key_from_json, piece_of
from modelwright.train.technique import Runtime, Technique

CHUNK = 1 << 22
"""Elements that are hashed at once: bounds the memory of the check."""


class ReplicaError(ModelwrightError):
    """Ranks that should hold the same values differ."""


class ReplicaCheck:
    """Compares, every `every` steps, hashes of tensors that several ranks hold, bit for bit.

    tensors: of this rank, by name. A difference raises `ReplicaError` on all ranks, before a later checkpoint can store
    it; a launcher then restarts from the previous checkpoint. Created on all ranks alike.
    """

    def __init__(self, channel: ControlPlane, tensors: Callable[[], Mapping[str, Tensor]], *, every: int) -> None:
        if every < 1:
            raise ConfigError(f"every: must be at least 1 step, got {every}")
        self.channel = channel
        self.tensors = tensors
        self.every = every

    def check(self, step: int) -> None:
        """Compare the replicas. Raises `ReplicaError` that names the tensor and the ranks outside the majority."""
        if self.channel.size == 1:
            return
        pieces = {name: piece_of(tensor) for name, tensor in self.tensors().items()}
        if not pieces:  # nothing is replicated
            return
        hashes = torch.stack([bits_hash(piece.values) for piece in pieces.values()]).tolist()
        keys = [piece.key(name) for name, piece in pieces.items()]
        result: dict[tuple[Any, ...], dict[int, int]] = {}
        of_all_ranks = self.channel.exchange(
            list(zip(keys, hashes, strict=True)), what=f"comparing replicas after {step}"
        )
        for rank, entries in enumerate(of_all_ranks):
            for key, value in entries:
                result.setdefault(key_from_json(key), {})[rank] = value
        problems: list[str] = []
        for (name, *_), by_rank in result.items():
            value, votes = Counter(by_rank.values()).most_common(1)[0]
            if 2 * votes <= len(by_rank):  # without a majority nobody knows which ranks are wrong
                problems.append(f"{name} on ranks {sorted(by_rank)}")
            elif votes < len(by_rank):
                outliers = ", ".join(str(rank) for rank, own in by_rank.items() if own != value)
                problems.append(f"{name} on rank {outliers}")
        if problems:
            raise ReplicaError(
                f"step {step}: replicas of {len(problems)} tensors differ: {'; '.join(problems[:3])}: memory or "
                "network corruption; restart the run to resume from the last checkpoint"
            )


def bits_hash(tensor: Tensor) -> Tensor:
    """A 64-bit hash of a tensor's bits, an int64 scalar on its device; the same on any device.

    Each element's bits are mixed with its position (the finalizer of SplitMix64, Steele et al. 2014) and added up, so
    one changed bit always changes the sum, and so do two swapped elements (except with probability 2^-64).
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


def replica_check(run: Runtime, *, every: int) -> Technique | None:
    """every: steps between comparisons; 0 for none."""
    if run.world.size == 1 or not every:
        return None
    check = ReplicaCheck(ControlPlane(run.world), lambda: run.strategy.replicated() or {}, every=every)
    return Technique(
        name="replica_check", on_step_end=lambda info: check.check(info.step), every=every, needs=frozenset()
    )
