"""Sparse vectors as compact bytes: selection of entries, their values in 2 to 16 bits, their positions in few bits.

Pure functions from tensors and arrays to tensors, arrays and bytes. A coded bucket is

    header   18 bytes: place code, value bits, count, bytes of the place code, lowest and highest magnitude
    places   nothing (every entry is kept), one bit an entry, or Rice-coded gaps: whichever is smaller
    values   one sign bit and the level of the magnitude, `bits` in all, most significant first
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]

_HEADER = np.dtype(
    [("places", "u1"), ("bits", "u1"), ("count", "<u4"), ("place_bytes", "<u4"), ("low", "<f4"), ("high", "<f4")]
)
_ALL, _BITMAP, _RICE = 255, 254, 0
"""Values of `places`; below `_BITMAP` it is `_RICE` plus the number of low bits of each gap."""


def top_k(values_N: Tensor, k: int) -> Tensor:
    """Returns the indices of the `k` largest magnitudes, ascending."""
    if k >= values_N.numel():
        return torch.arange(values_N.numel(), device=values_N.device)
    return torch.topk(values_N.abs(), k, sorted=False).indices.sort().values


def sampled_threshold(values_N: Tensor, keep: float, num_samples: int) -> float:
    """Estimates the magnitude above which the share `keep` of the values lies, from `num_samples` evenly spaced ones
    (Deep Gradient Compression, Lin et al. 2018, section 3).
    """
    # An odd stride does not align with rows of even width.
    stride = max(1, values_N.numel() // num_samples) | 1
    sample = values_N[::stride].abs()
    k = max(1, round(keep * sample.numel()))
    return float(torch.topk(sample, k, sorted=False).values.min())


def above(values_N: Tensor, threshold: float) -> Tensor:
    """Returns the indices of the magnitudes of at least `threshold` that are not zero, ascending."""
    magnitudes = values_N.abs()
    return torch.nonzero((magnitudes >= threshold) & (magnitudes > 0)).flatten()


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """Values as signs and levels: level c of a magnitude stands for low + c (high - low) / (2 ** (bits - 1) - 1)."""

    bits: int
    low: float
    high: float
    codes_K: NDArray[np.uint16]

    def values(self) -> NDArray[np.float32]:
        """The values of the codes [K]."""
        # In FP32 with the header's numbers: sender and receivers must get the same bits, or error feedback would drift.
        levels = (1 << (self.bits - 1)) - 1
        step = np.float32((self.high - self.low) / levels)
        magnitudes = np.float32(self.low) + (self.codes_K & levels).astype(np.float32) * step
        return np.where(self.codes_K >> (self.bits - 1), -magnitudes, magnitudes)


def quantize(values_K: NDArray[np.float32], bits: int) -> Quantized:
    """Rounds to signs and evenly spaced magnitudes between the lowest and the highest one."""
    assert 2 <= bits <= 16
    magnitudes = np.abs(values_K)
    low, high = (float(magnitudes.min()), float(magnitudes.max())) if len(values_K) else (0.0, 0.0)
    levels = (1 << (bits - 1)) - 1
    # A range of denormals overflows the scale; all codes are then the lowest level.
    scale = levels / (high - low) if high > low else 0.0
    codes = np.rint((magnitudes - np.float32(low)).astype(np.float64) * (scale if math.isfinite(scale) else 0.0))
    signs = np.signbit(values_K).astype(np.uint16) << np.uint16(bits - 1)
    return Quantized(bits=bits, low=low, high=high, codes_K=np.bitwise_or(codes.astype(np.uint16), signs))


def relative_error(values_K: NDArray[np.float32], quantized: Quantized) -> float:
    """Norm of the quantization error over the norm of the values; 0 for zeros."""
    norm = float(np.linalg.norm(values_K))
    return float(np.linalg.norm(values_K - quantized.values())) / norm if norm > 0 else 0.0


def quantize_within(values_K: NDArray[np.float32], *, min_bits: int, max_bits: int, max_error: float) -> Quantized:
    """Quantizes to the narrowest width whose observed relative error is at most `max_error`, or to `max_bits`."""
    bits = min_bits
    while True:
        quantized = quantize(values_K, bits)
        error = relative_error(values_K, quantized)
        if error <= max_error or bits >= max_bits:
            return quantized
        # Each bit halves the error. One bit fewer than that suggests: the rule is rough at few levels, and the search
        # never goes back to a narrower width.
        missing = math.ceil(math.log2(error / max_error)) if max_error > 0 else max_bits
        bits = min(max_bits, bits + max(1, missing - 1))


def pack_bits(codes_K: NDArray[np.uint16] | NDArray[np.uint64], bits: int) -> Bytes:
    """Packs the low `bits` of each code, most significant first, without gaps."""
    if bits == 0 or len(codes_K) == 0:
        return np.zeros(0, np.uint8)
    shifts = np.arange(bits - 1, -1, -1, dtype=codes_K.dtype)
    return np.packbits(((codes_K[:, None] >> shifts) & 1).astype(np.uint8).ravel())


def unpack_bits(data: Bytes, count: int, bits: int) -> NDArray[np.int64]:
    """Unpacks the codes of `pack_bits`."""
    if bits == 0:
        return np.zeros(count, np.int64)
    table = np.unpackbits(data, count=count * bits).reshape(count, bits)
    codes = np.zeros(count, np.int64)
    for column in table.T:
        codes = (codes << 1) | column
    return codes


def rice_parameter(gaps_K: NDArray[np.int64]) -> int:
    """Returns the number of low bits that minimizes the length of the gaps' Rice code."""
    # For geometrically distributed gaps the best one is next to log2 of their mean.
    guess = int(math.log2(max(1.0, float(gaps_K.mean()))))
    return min(range(max(0, guess - 1), guess + 2), key=lambda low: _rice_bits(gaps_K, low))


def _rice_bits(gaps_K: NDArray[np.int64], low: int) -> int:
    return int((gaps_K >> low).sum()) + len(gaps_K) * (1 + low)


def rice_encode(gaps_K: NDArray[np.int64], low: int) -> Bytes:
    """Rice code (Rice and Plaunt 1971): the low bits of all gaps, then the rest of each in unary, ended by a one."""
    ends = np.cumsum((gaps_K >> low) + 1) - 1
    unary = np.zeros(int(ends[-1]) + 1 if len(ends) else 0, np.uint8)
    unary[ends] = 1
    return np.concatenate([pack_bits(gaps_K.astype(np.uint64), low), np.packbits(unary)])


def rice_decode(data: Bytes, count: int, low: int) -> NDArray[np.int64]:
    """Decodes the gaps of `rice_encode`."""
    split = (count * low + 7) // 8
    ends = np.flatnonzero(np.unpackbits(data[split:]))[:count]
    return (np.diff(ends, prepend=-1) - 1 << low) | unpack_bits(data[:split], count, low)


def encode_places(indices_K: NDArray[np.int64], numel: int) -> tuple[int, Bytes]:
    """Encodes ascending indices below `numel` as (kind, bytes): nothing for all, a bitmap or Rice-coded gaps."""
    if len(indices_K) == numel:
        return _ALL, np.zeros(0, np.uint8)
    if len(indices_K) == 0:
        return _RICE, np.zeros(0, np.uint8)
    gaps = np.diff(indices_K, prepend=-1) - 1
    low = rice_parameter(gaps)
    if _rice_bits(gaps, low) < numel:
        return _RICE + low, rice_encode(gaps, low)
    kept = np.zeros(numel, np.uint8)
    kept[indices_K] = 1
    return _BITMAP, np.packbits(kept)


def decode_places(kind: int, data: Bytes, count: int, numel: int) -> NDArray[np.int64]:
    """Decodes the indices of `encode_places`."""
    if kind == _ALL:
        return np.arange(numel)
    if kind == _BITMAP:
        return np.flatnonzero(np.unpackbits(data, count=numel))
    return np.cumsum(rice_decode(data, count, kind - _RICE) + 1) - 1 if count else np.zeros(0, np.int64)


def encode(indices_K: NDArray[np.int64], quantized: Quantized, numel: int) -> Bytes:
    """Encodes one bucket of `numel` entries, whose entries at `indices_K` (ascending) have the quantized values."""
    kind, places = encode_places(indices_K, numel)
    numbers = (kind, quantized.bits, len(indices_K), len(places), quantized.low, quantized.high)
    header = np.array([numbers], dtype=_HEADER)
    return np.concatenate([header.view(np.uint8), places, pack_bits(quantized.codes_K, quantized.bits)])


def decode(data: Bytes, numel: int) -> tuple[NDArray[np.int64], NDArray[np.float32], int]:
    """Indices and values of the bucket at the start of `data`, and its length in bytes."""
    first = _HEADER.itemsize
    kind, bits, count, place_bytes, low, high = data[:first].view(_HEADER)[0].tolist()
    middle = first + place_bytes
    last = middle + (count * bits + 7) // 8
    indices = decode_places(kind, data[first:middle], count, numel)
    codes_K = unpack_bits(data[middle:last], count, bits).astype(np.uint16)
    return indices, Quantized(bits=bits, low=low, high=high, codes_K=codes_K).values(), last
