"""Keeps one second moment for ranks that train by themselves, for a small part of the bytes.

A rank that trains on its own share of a batch estimates Adam's second moment from that share alone. A gradient that
only this rank saw then inflates its own denominator and shrinks its own step: the mean of the ranks' steps is no longer
the step of their mean gradient. By measurement this costs local steps more than what sparsification leaves out. With
one denominator on all ranks the mean of the steps is linear in the gradients again, which is what makes error feedback
sound (1-bit Adam, Tang et al. 2021, freezes the moment for that; 0/1 Adam, Lu et al. 2022, refreshes it seldom).

Moments change slowly and span many magnitudes, so a rank sends by how many steps of `octaves` each has changed, in
log2, since the last agreement: small integers, Rice-coded.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from modelwright.ops.sparse_codec import rice_decode, rice_encode, rice_parameter
from modelwright.parallel.codecs.allgather_bytes import gather_bytes
from modelwright.parallel.codecs.error_feedback import flatten, shaped, write_back
from modelwright.parallel.mesh import World

FLOOR = 1e-16
"""Moments below this count as this: their roots are at most Adam's usual epsilon."""


class SharedMoment:
    """The mean of the ranks' second moments, to within half a step of each other rank's part; the own part is exact.

    `bytes_sent` is counted as in `TopKQuantizedSync`. Non-finite moments on any rank leave all of them unchanged.
    agreed: log2 of the values known to all ranks, empty before the first synchronization; part of a checkpoint.
    """

    def __init__(self, world: World, *, octaves: float = 1.0) -> None:
        self.world = world
        self.octaves = octaves
        self.agreed: list[Tensor] = []
        self.bytes_sent = 0

    def share(self, moments: Sequence[Tensor]) -> None:
        """Replace the moments, in one order on all ranks, by their mean; empty until a step has created any."""
        if self.world.size == 1 or not moments:
            return
        own_N = flatten(moments).clamp_min_(FLOOR)
        agreed_N = (flatten(self.agreed) if self.agreed else torch.zeros_like(own_N)).to(own_N.device)
        finite = bool(own_N.isfinite().all())
        message = encode_moves(((own_N.log2() - agreed_N) / self.octaves).round()) if finite else _NOTHING
        messages, sent = gather_bytes(self.world, message)
        self.bytes_sent += sent
        if not all(len(message) for message in messages):
            return
        total_N, known_N = torch.zeros_like(own_N), own_N
        for rank, message in enumerate(messages):
            moves_N = decode_moves(message, len(own_N)).to(own_N.device)
            part_N = torch.exp2(agreed_N + moves_N * self.octaves)
            total_N += part_N
            known_N = part_N if rank == self.world.rank else known_N
        write_back((total_N - known_N + own_N) / self.world.size, moments)
        self.agreed = shaped((total_N / self.world.size).log2(), moments)


_NOTHING = torch.zeros(0, dtype=torch.uint8)


def encode_moves(moves_N: Tensor) -> Tensor:
    """Integers as bytes [uint8, on the CPU]: the middle one, the Rice parameter, and the differences, 0 first."""
    moves = moves_N.cpu().numpy().astype(np.int64)
    middle = int(np.median(moves))
    left = moves - middle
    folded = np.where(left > 0, 2 * left - 1, -2 * left)
    low = rice_parameter(folded)
    header = np.array([(middle, low)], dtype=_HEADER)
    return torch.from_numpy(np.concatenate([header.view(np.uint8), rice_encode(folded, low)]))


def decode_moves(message: Tensor, numel: int) -> Tensor:
    """Decode `encode_moves`, FP32 [numel]."""
    data = message.numpy()
    middle, low = data[: _HEADER.itemsize].copy().view(_HEADER)[0].tolist()
    folded = rice_decode(data[_HEADER.itemsize :], numel, low)
    left = np.where(folded % 2, (folded + 1) // 2, -folded // 2)
    return torch.from_numpy((left + middle).astype(np.float32))


_HEADER = np.dtype([("middle", "<i4"), ("low", "u1")])
