"""The three-level compressor: select the largest entries, quantize their values, encode their positions.

1. Selection by importance: the largest magnitudes of every bucket, or of all by one sampled threshold; entries that
   are not sent join the next message (error feedback), with momentum correction if wanted (Lin et al. 2018).
2. Values in `min_bits` to `max_bits` bits, the width of every bucket chosen from the error seen in it; or as a sign
   and a level that decodes to its mean, with a smaller residual at one to three bits an entry.
3. Places as Rice-coded gaps, a bitmap, or its blocks in Huffman codes, whichever is smallest.

`ops/sparse_codec.py` has the format of the messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelwright.core.config import ConfigError, constant
from modelwright.ops import sparse_codec
from modelwright.ops.sparse_codec import Bytes
from modelwright.parallel.gradient_sync import Residual, flatten, shaped, write_back
from modelwright.parallel.mesh import World


def gather_bytes(world: World, message: Tensor) -> tuple[list[Tensor], int]:
    """Returns the messages [bytes, uint8, on the CPU] of all ranks in rank order, and the bytes that this rank sent."""
    messages = world.gather_bytes(message)
    # Two ranks swap messages. In a ring all-gather of more a rank forwards n - 1, each padded to the longest. Lengths
    # go before.
    return messages, (world.size - 1) * (8 + (len(message) if world.size == 2 else max(map(len, messages))))


NUM_SAMPLES = 65_536
"""Magnitudes looked at for a global threshold: the share above it is then within 4% of 1% (one standard deviation)."""


@dataclass(frozen=True, kw_only=True)
class TopKQuantizedConfig:
    """Top-k sparsification with error feedback, quantized values and entropy-coded positions (DGC, Lin et al. 2018)."""

    topk_fraction: float = 0.01
    """Fraction of the entries that is sent; 1 sends all of them, quantized."""
    max_error: float = constant(0.1)
    """Largest relative quantization error: each bucket takes the fewest bits that meet it."""
    momentum: float = constant(0.0)
    """Momentum correction, for optimizers without momentum; 0 for none."""
    selection: Literal["bucket", "global"] = constant("bucket")
    """`bucket`: that fraction of every bucket; `global`: of all entries, by a sampled threshold."""
    bucket_numel: int = constant(2**20)
    """Most entries in one bucket, which has one bit width and one range."""
    codebook: Literal["uniform", "means"] = constant("uniform")
    """`uniform`: levels evenly spaced in a bucket's range of magnitudes; `means`: levels are the means of entries."""
    min_bits: int = constant(4)
    """Fewest bits of a uniform code."""
    max_bits: int = constant(16)
    """Most bits of a uniform code."""
    residual_decay: float = constant(1.0)
    """Factor on the unsent residual at each message."""
    warmup_topk_fraction: float = constant(0.25)
    """Fraction sent at the first message of the warmup."""
    warmup_messages: int = constant(0)
    """Messages over which the fraction falls geometrically to `topk_fraction`."""

    def __post_init__(self) -> None:
        for name in ("topk_fraction", "warmup_topk_fraction", "residual_decay"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name}: must be above 0 and at most 1, got {getattr(self, name)}")
        if not 2 <= self.min_bits <= self.max_bits <= 16:
            raise ConfigError(f"min_bits: 2 <= min_bits <= max_bits <= 16, got {self.min_bits} and {self.max_bits}")
        if self.bucket_numel < 256:
            raise ConfigError(f"bucket_numel: must be at least 256, got {self.bucket_numel}; 1048576 is usual")
        if self.max_error <= 0:
            raise ConfigError(f"max_error: must be above 0, got {self.max_error}; 0.1 is usual")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum: must be in [0, 1), got {self.momentum}; 0 disables the correction")
        if self.warmup_messages < 0:
            raise ConfigError(f"warmup_messages: must not be negative, got {self.warmup_messages}; 0 disables warmup")

    def share(self, message: int) -> float:
        """Returns the share of entries in message number `message` (from 0)."""
        first, last = self.warmup_topk_fraction, self.topk_fraction
        if message >= self.warmup_messages or first <= last:
            return last
        return first * (last / first) ** (message / self.warmup_messages)


@dataclass(frozen=True)
class Sparse:
    """Entries of a flat vector: the content of a message."""

    indices_K: NDArray[np.int64]
    values_K: NDArray[np.float32]


@dataclass(eq=False)
class TopKQuantizedSync:
    """Every rank sends its own largest entries to all others; each adds up the messages in rank order.

    `bytes_sent`: a ring all-gather forwards every message n - 1 times, so a rank sends (n - 1) times its own message,
    of three ranks or more padded to the longest one, and (n - 1) x 8 bytes of lengths. A rank with non-finite values
    sends an empty message; all gradients are then nan on all ranks, and all state that is kept from step to step is
    unchanged.
    """

    world: World
    config: TopKQuantizedConfig
    residual: Residual = field(default_factory=Residual)
    velocity: Residual = field(default_factory=Residual)
    num_messages: int = 0
    bytes_sent: int = 0

    def reduce(self, gradients: Sequence[Tensor]) -> None:
        if self.world.size == 1:
            self.residual.drain(gradients)
            return
        waiting_N, velocity_N = flatten(gradients), None
        # Momentum is accumulated before selection, so that an entry that waits keeps its velocity (Lin et al. 2018).
        if self.config.momentum:
            before_N = self.velocity.flat(gradients)
            velocity_N = waiting_N if before_N is None else waiting_N + self.config.momentum * before_N
            waiting_N = velocity_N.clone()
        left_N = self.residual.flat(gradients)
        if left_N is not None:
            waiting_N.add_(left_N, alpha=self.config.residual_decay)
        bounds = bucket_bounds([gradient.numel() for gradient in gradients], self.config.bucket_numel)
        message = encode_flat(waiting_N, bounds, self.config, self.config.share(self.num_messages))
        messages, sent = gather_bytes(self.world, message)
        self.bytes_sent += sent
        if not all(len(message) for message in messages):
            write_back(torch.full_like(waiting_N, torch.nan), gradients)
            return
        total_N = torch.zeros_like(waiting_N)
        for rank, message in enumerate(messages):
            sparse = decode_flat(message, bounds, self.config.codebook)
            indices_K, values_K = (
                torch.from_numpy(one).to(waiting_N.device) for one in (sparse.indices_K, sparse.values_K)
            )
            total_N.index_add_(0, indices_K, values_K)
            if rank == self.world.rank:
                # Take out what was sent, as decoded, so that rounding errors stay; its velocity restarts (section 3.2).
                waiting_N.index_add_(0, indices_K, values_K, alpha=-1)
                if velocity_N is not None:
                    velocity_N[indices_K] = 0.0
        write_back(total_N, gradients)
        self.residual.tensors = shaped(waiting_N, gradients)
        if velocity_N is not None:
            self.velocity.tensors = shaped(velocity_N, gradients)
        self.num_messages += 1

    def state_dict(self) -> dict[str, Any]:
        residuals, velocities = list(self.residual.tensors), list(self.velocity.tensors)
        return {"residuals": residuals, "velocities": velocities, "shared": {"num_messages": self.num_messages}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.residual.tensors = [tensor.float() for tensor in state["residuals"]]
        self.velocity.tensors = [tensor.float() for tensor in state["velocities"]]
        self.num_messages = int(state["shared"]["num_messages"])


def bucket_bounds(numels: Sequence[int], bucket_numel: int) -> list[int]:
    """Returns the bounds of the buckets in the flat vector: a tensor is split into even parts of at most `bucket_numel`
    entries; a short one joins the previous bucket.
    """
    bounds, start = [0], 0
    for numel in numels:
        # Its own header would outweigh it.
        if numel < 4096 and len(bounds) > 1:
            bounds[-1] += numel
        else:
            parts = max(1, -(-numel // bucket_numel))
            bounds += [start + numel * part // parts for part in range(1, parts + 1)]
        start += numel
    return bounds


def encode_flat(flat_N: Tensor, bounds: Sequence[int], config: TopKQuantizedConfig, keep: float) -> Tensor:
    """Encodes the share `keep` of the vector as a message [bytes, uint8, on the CPU]; empty if it is not finite."""
    # The extremes are finite only if all values are, and PyTorch finds them in a tenth of the time of `isfinite`.
    if not bool(torch.stack(torch.aminmax(flat_N)).isfinite().all()):
        return torch.zeros(0, dtype=torch.uint8)
    if config.selection == "global" and keep < 1:
        indices = sparse_codec.above(flat_N, sparse_codec.sampled_threshold(flat_N, keep, NUM_SAMPLES))
    else:
        largest = [
            sparse_codec.top_k(flat_N[first:last], max(1, round(keep * (last - first)))) + first
            for first, last in pairwise(bounds)
        ]
        indices = torch.cat(largest)
    indices_K, values_K = indices.cpu().numpy(), flat_N.index_select(0, indices).cpu().numpy()
    if config.codebook == "means":
        return torch.from_numpy(sparse_codec.encode_levels(indices_K, values_K, bounds))
    parts: list[Bytes] = []
    for first, last in pairwise(bounds):
        inside = slice(*np.searchsorted(indices_K, (first, last)))
        quantized = sparse_codec.quantize_within(
            values_K[inside], min_bits=config.min_bits, max_bits=config.max_bits, max_error=config.max_error
        )
        parts.append(sparse_codec.encode(indices_K[inside] - first, quantized, last - first))
    return torch.from_numpy(np.concatenate(parts))


def decode_flat(message: Tensor, bounds: Sequence[int], coded: Literal["uniform", "means"] = "uniform") -> Sparse:
    """Decodes the message of `encode_flat`."""
    data, at = message.numpy(), 0
    if coded == "means":
        return Sparse(*sparse_codec.decode_levels(data, bounds))
    indices, values = [], []
    for first, last in pairwise(bounds):
        places, kept, used = sparse_codec.decode(data[at:], last - first)
        indices.append(places + first)
        values.append(kept)
        at += used
    return Sparse(np.concatenate(indices), np.concatenate(values))
