"""Sparse vectors as compact bytes: selection of entries, their values in 2 to 16 bits, their positions in few bits.

Pure functions from tensors and arrays to tensors, arrays and bytes. Where a compiler built them, the processor's own
kernels (`kernels/sparse_codec.h`) code levels and moves, to the same bytes as the references here, so that hosts with
and without a compiler understand each other. A bucket with evenly spaced levels is coded as

    header   18 bytes: place code, value bits, count, bytes of the place code, lowest and highest magnitude
    places   nothing (every entry is kept), one bit an entry, or Rice-coded gaps: whichever is smaller
    values   one sign bit and the level of the magnitude, `bits` in all, most significant first

and one whose levels decode to the means of their entries as

    header   the number of levels, how many values reach each, the bytes of each list of places, the levels' means
    places   of all values among the bucket's entries, then for each further level among the values of the one before
    signs    one bit a value

Of the latter, level l holds the magnitudes from (1 + l) to (2 + l) times the smallest one kept; the last level is
unbounded. Few levels and their means are near the best that a scalar code reaches at one to three bits per entry (Lloyd
1982; for gradients TernGrad, Wen et al. 2017, with one level), where evenly spaced levels up to the largest magnitude
spend their bits on outliers. The values that reach the next level are coded as positions among those that reached the
previous one, so that a rare level costs little. Moves, integers of which nearly all are the same, are coded as

    header   their median, how many others there are, the bytes of their places, the place code, the Rice parameter
    places   of the others
    values   Rice code of the others' differences from the median; with place code `_ALL` that of all moves
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelwright.ops import cpu_kernels

Bytes = NDArray[np.uint8]

_HEADER = np.dtype(
    [("places", "u1"), ("bits", "u1"), ("count", "<u4"), ("place_bytes", "<u4"), ("low", "<f4"), ("high", "<f4")]
)
_ALL, _BITMAP, _RICE = 255, 254, 0
"""Values of `places`; below `_BITMAP` it is `_RICE` plus the number of low bits of each gap."""
MAX_LEVELS = 8
_MOVES = np.dtype([("middle", "<i4"), ("count", "<u4"), ("place_bytes", "<u4"), ("kind", "u1"), ("low", "u1")])
_LEVEL = np.dtype([("count", "<u4"), ("place_bytes", "<u4"), ("mean", "<f4"), ("kind", "u1")])


def _compiled(name: str, *arguments: NDArray[Any] | Tensor | int | float) -> int:
    """Result of a function of `kernels/sparse_codec.h`; -1 without kernels, and where it leaves the case to the
    reference.
    """
    library = cpu_kernels.message_codec()
    if library is None:
        return -1
    function = getattr(library, name)
    function.restype = ctypes.c_int64
    converted: list[ctypes.c_void_p | ctypes.c_float | ctypes.c_int64] = []
    for one in arguments:
        if isinstance(one, np.ndarray):
            assert one.flags.c_contiguous
            converted.append(ctypes.c_void_p(one.ctypes.data))
        elif isinstance(one, Tensor):
            converted.append(ctypes.c_void_p(one.data_ptr()))
        else:
            converted.append(ctypes.c_float(one) if isinstance(one, float) else ctypes.c_int64(one))
    return function(*converted)


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
    sample = values_N[::stride].abs().cpu().numpy()
    # In half the time of `torch.topk`.
    place = len(sample) - max(1, round(keep * len(sample)))
    return float(np.partition(sample, place)[place])


def above(values_N: Tensor, threshold: float) -> Tensor:
    """Returns the indices of the magnitudes of at least `threshold` that are not zero, ascending."""
    if values_N.device.type == "cpu" and values_N.dtype == torch.float32:
        indices_N = torch.empty(values_N.numel(), dtype=torch.int64)
        count = _compiled("entries_above", values_N.contiguous(), values_N.numel(), threshold, indices_N)
        if count >= 0:
            return indices_N[:count]
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
    if not len(gaps_K):
        return 0
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


def encode_levels(indices_K: NDArray[np.int64], values_K: NDArray[np.float32], bounds: Sequence[int]) -> Bytes:
    """Encodes entries of a vector, at ascending indices, by levels, bucket after bucket; `bounds` has a 0 and the ends
    of all buckets.
    """
    count, num_buckets = len(indices_K), len(bounds) - 1
    # Each list of places takes a bitmap at most.
    most = num_buckets * (2 + MAX_LEVELS * (_LEVEL.itemsize + 2)) + (bounds[-1] + MAX_LEVELS * count) // 8 + 1
    to, alive_K = torch.empty(most, dtype=torch.uint8), torch.empty(count, dtype=torch.uint8)
    gaps_K = torch.empty(count, dtype=torch.int32)
    num_bytes = _compiled(
        "encode_levels", indices_K, values_K, count, np.array(bounds), num_buckets, gaps_K, alive_K, to
    )
    return to.numpy()[:num_bytes] if num_bytes >= 0 else encode_levels_naive(indices_K, values_K, bounds)


def encode_levels_naive(indices_K: NDArray[np.int64], values_K: NDArray[np.float32], bounds: Sequence[int]) -> Bytes:
    message: list[Bytes] = []
    for first, last in pairwise(bounds):
        inside = slice(*np.searchsorted(indices_K, (first, last)))
        places, values = indices_K[inside], values_K[inside]
        magnitudes, levels = np.abs(values), np.zeros(len(values), np.int64)
        if len(values) and (lowest := magnitudes.min()) > 0:
            levels = np.minimum(magnitudes / lowest, MAX_LEVELS).astype(np.int64) - 1
        num_levels = int(levels.max()) + 1 if len(levels) else 0
        # The kernel adds in this order, too: one value after the other, in FP64.
        sums, counts = np.bincount(levels, weights=magnitudes), np.bincount(levels)
        table, lists = np.zeros(num_levels, _LEVEL), []
        places, among, alive = places - first, last - first, levels
        for level in range(num_levels):
            if level:
                places, among = np.flatnonzero(alive >= level), len(alive)
                alive = alive[places]
            kind, data = encode_places(places, among)
            # A level can be empty below one that is not; its mean then decodes no value.
            table[level] = (len(places), len(data), sums[level] / max(1, counts[level]), kind)
            lists.append(data)
        signs = pack_bits(np.signbit(values).astype(np.uint16), 1)
        message += [np.array([num_levels], np.uint8), table.view(np.uint8), *lists, signs]
    return np.concatenate(message)


def decode_levels(data: Bytes, bounds: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Indices and values of the message of `encode_levels` at the start of `data`."""
    numel = bounds[-1]
    indices_N, values_N = torch.empty(numel, dtype=torch.int64), torch.empty(numel)
    scratch = torch.empty(2 * max(last - first for first, last in pairwise(bounds)), dtype=torch.int32)
    count = _compiled("decode_levels", data, len(data), np.array(bounds), len(bounds) - 1, indices_N, values_N, scratch)
    # The reference says what is wrong with a message that is none.
    return (indices_N.numpy()[:count], values_N.numpy()[:count]) if count >= 0 else decode_levels_naive(data, bounds)


def decode_levels_naive(data: Bytes, bounds: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    indices, values = list[NDArray[np.int64]](), list[NDArray[np.float32]]()
    for first, last in pairwise(bounds):
        num_levels = int(data[0])
        at = 1 + num_levels * _LEVEL.itemsize
        table = data[1:at].view(_LEVEL)
        indices_K, reached, among = np.zeros(0, np.int64), np.zeros(0, np.int64), last - first
        values_K = np.zeros(0, np.float32)
        for level, (count, place_bytes, mean, kind) in enumerate(table.tolist()):
            places = decode_places(kind, data[at : at + place_bytes], count, among)
            at += place_bytes
            if level == 0:
                indices_K, reached, values_K = places, np.arange(count), np.zeros(count, np.float32)
            else:
                reached = reached[places]
            values_K[reached] = mean
            among = count
        end = at + (len(indices_K) + 7) // 8
        signs_K = unpack_bits(data[at:end], len(indices_K), 1)
        indices.append(indices_K + first)
        values.append(np.where(signs_K, -values_K, values_K))
        data = data[end:]
    return np.concatenate(indices), np.concatenate(values)


def encode_moves(moves_N: NDArray[np.float32]) -> Bytes:
    """Encodes integers, given in FP32."""
    numel = len(moves_N)
    # A Rice code takes at most 3 bits more than the logarithm of the mean.
    to, scratch = torch.empty(_MOVES.itemsize + 5 * numel + 16, dtype=torch.uint8), torch.empty(3 * numel)
    num_bytes = _compiled("encode_moves", moves_N, numel, scratch, to)
    return to.numpy()[:num_bytes] if num_bytes >= 0 else encode_moves_naive(moves_N)


def encode_moves_naive(moves_N: NDArray[np.float32]) -> Bytes:
    moves = moves_N.astype(np.int64)
    middle = int(np.median(moves))
    left = moves - middle
    # 0, 1, -1, 2, -2, ... become 0, 1, 2, 3, 4, ...: a Rice code takes no signs.
    folded = np.where(left > 0, 2 * left - 1, -2 * left)
    others = np.flatnonzero(folded)
    kind, places = encode_places(others, len(moves))
    values = folded[others] - 1
    low, low_of_all = rice_parameter(values), rice_parameter(folded)
    # The first moves, from nothing, differ so much that places cost more than they save.
    if kind == _ALL or _rice_bits(folded, low_of_all) <= 8 * len(places) + _rice_bits(values, low):
        kind, places, values, low = _ALL, places[:0], folded, low_of_all
    header = np.array([(middle, len(values), len(places), kind, low)], dtype=_MOVES)
    return np.concatenate([header.view(np.uint8), places, rice_encode(values, low)])


def decode_moves(data: Bytes, numel: int) -> NDArray[np.float32]:
    """Decodes `encode_moves`, FP32 [numel]."""
    moves_N, places = torch.empty(numel), torch.empty(2 * numel, dtype=torch.int32)
    is_done = _compiled("decode_moves", data, len(data), numel, places, moves_N) >= 0
    return moves_N.numpy() if is_done else decode_moves_naive(data, numel)


def decode_moves_naive(data: Bytes, numel: int) -> NDArray[np.float32]:
    middle, count, place_bytes, kind, low = data[: _MOVES.itemsize].view(_MOVES)[0].tolist()
    first = _MOVES.itemsize + place_bytes
    places = decode_places(kind, data[_MOVES.itemsize : first], count, numel)
    folded = rice_decode(data[first:], count, low) + (kind != _ALL)
    moves = np.full(numel, middle, np.int64)
    moves[places] += np.where(folded % 2, (folded + 1) // 2, -folded // 2)
    return moves.astype(np.float32)
