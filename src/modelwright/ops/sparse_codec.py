"""Sparse vectors as compact bytes: selection of entries, their values in 2 to 16 bits, their positions in few bits.

Pure functions from tensors and arrays to tensors, arrays and bytes. Where a compiler built them, the processor's own
kernels (`kernels/sparse_codec.h`) code levels and moves, to the same bytes as the references here, so that hosts with
and without a compiler understand each other. A bucket with evenly spaced levels is coded as

    header   18 bytes: place code, value bits, count, bytes of the place code, lowest and highest magnitude
    places   nothing (every entry is kept), one bit an entry, Rice-coded gaps, or those bits in blocks of five, each by
             its Huffman code: whichever is smallest
    values   one sign bit and the level of the magnitude, `bits` in all, most significant first

and one whose levels decode to the means of their entries as

    header   the number of levels; how many values reach each, their mean, the place code
    places   of all values among the bucket's entries, then for each further level among the values of the one before
    signs    one bit a value

Of the latter, level l holds the magnitudes from (1 + l) to (2 + l) times the smallest one kept; the last level is
unbounded. Few levels and their means are near the best that a scalar code reaches at one to three bits per entry (Lloyd
1982; for gradients TernGrad, Wen et al. 2017, with one level), where evenly spaced levels up to the largest magnitude
spend their bits on outliers. The values that reach the next level are coded as positions among those that reached the
previous one, so that a rare level costs little. Moves, integers of which many are equal, are coded as

    header   their median, the number of lists, the Rice parameter; how many moves each list has, the place code
    places   of the moves that differ from the median, then, among each list's, of those that differ by one more
    signs    one bit for each move that differs
    values   Rice code of what the last list's differ by beyond that; with `_ALL` lists there is only that of all moves
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heappush
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
"""Values of `places`; below `_BLOCKS` it is `_RICE` plus the number of low bits of each gap."""
_BLOCKS, _BLOCK_BITS, _MOST_CODE_BITS = 128, 5, 12
_ONES = (8, 11, 13, 15, 17, 20, 21, 23, 25, 27, 29)
"""Densities of ones, in 64ths, for which there is a code of blocks; from `_BLOCKS` on the values of `places` stand for
them, and then for as many zeros. Of three to six bits, blocks of five take least at a density of 0.35: 0.4% more than
the entropy, where the Rice code takes 2.4%; together these codes take at most 1% more from 0.24 to 0.76.
"""
MAX_LEVELS = 8
_LIST = np.dtype([("count", "<u4"), ("kind", "u1")])
_MOVES = np.dtype([("middle", "<i4"), ("lists", "u1"), ("low", "u1")])
_LEVEL = np.dtype([("count", "<u4"), ("mean", "<f4"), ("kind", "u1")])


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


@cache
def _block_codes() -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
    """Canonical Huffman codes (Huffman 1952; Schwartz and Kallick 1964) of blocks, one row for each density: 16 times
    the code plus its length, by block; and what the next `_MOST_CODE_BITS` bits begin with: in the lower half of a
    number 32 times the block plus that length, in the upper half the same, plus 16, of two blocks where they fit.
    """
    codes, entries, windows = [], [], np.arange(1 << _MOST_CODE_BITS)
    for ones in (*_ONES, *(64 - ones for ones in _ONES)):
        counts = [block.bit_count() for block in range(1 << _BLOCK_BITS)]
        weights = [ones**count * (64 - ones) ** (_BLOCK_BITS - count) for count in counts]
        # Exact weights, and the older of two equal nodes first: all hosts must build the same code.
        nodes = [(weight, block, [block]) for block, weight in enumerate(weights)]
        heapify(nodes)
        lengths = np.zeros(len(weights), np.int64)
        for number in range(len(weights), 2 * len(weights) - 1):
            (left, _, some), (right, _, others) = heappop(nodes), heappop(nodes)
            lengths[some + others] += 1
            heappush(nodes, (left + right, number, some + others))
        # Codes ascend by length and block, so that filled up to equal lengths they are a running sum.
        order = np.lexsort((np.arange(len(weights)), lengths))
        shares = 1 << (_MOST_CODE_BITS - lengths[order])
        row = np.zeros(len(weights), np.uint16)
        row[order] = (np.cumsum(shares) - shares >> (_MOST_CODE_BITS - lengths[order])) << 4 | lengths[order]
        codes.append(row)
        first = np.repeat(order << 5 | lengths[order], shares)
        second = first[windows << (first & 15) & windows[-1]]
        both = (first & ~31) << _BLOCK_BITS | second & ~31 | 16 | (first & 15) + (second & 15)
        fit = (first & 15) + (second & 15) <= _MOST_CODE_BITS
        entries.append((np.where(fit, both, first) << 16 | first).astype(np.uint32))
    return np.stack(codes), np.stack(entries)


def encode_places(indices_K: NDArray[np.int64], numel: int) -> tuple[int, Bytes]:
    """Encodes ascending indices below `numel` as (kind, bytes): nothing for all, else the shortest of the codes."""
    if len(indices_K) == numel:
        return _ALL, np.zeros(0, np.uint8)
    if len(indices_K) == 0:
        return _RICE, np.zeros(0, np.uint8)
    gaps = np.diff(indices_K, prepend=-1) - 1
    low = rice_parameter(gaps)
    num_bits = min(_rice_bits(gaps, low), numel)
    kept = np.zeros(-(-numel // _BLOCK_BITS) * _BLOCK_BITS, np.uint8)
    kept[indices_K] = 1
    # Below a fifth no code of blocks is much shorter than the Rice code.
    if numel < 5 * len(indices_K):
        codes = _block_codes()[0]
        blocks = kept.reshape(-1, _BLOCK_BITS) @ (1 << np.arange(_BLOCK_BITS)[::-1])
        bits_of = (codes & 15).astype(np.int64) @ np.bincount(blocks, minlength=1 << _BLOCK_BITS)
        if bits_of.min() < num_bits:
            row, shifts = int(bits_of.argmin()), np.arange(_MOST_CODE_BITS)[::-1]
            coded = codes[row][blocks, None].astype(np.int64)
            return _BLOCKS + row, np.packbits((coded >> 4 + shifts & 1)[shifts < coded & 15].astype(np.uint8))
    if num_bits < numel:
        return _RICE + low, rice_encode(gaps, low)
    return _BITMAP, np.packbits(kept[:numel])


def decode_places(kind: int, data: Bytes, count: int, numel: int) -> tuple[NDArray[np.int64], int]:
    """Decodes the indices of `encode_places` at the start of `data`; also returns the bytes that they take."""
    if count > numel:  # before that many are allocated
        raise ValueError(f"not a message: {count} places among {numel}")
    if kind == _ALL:
        return np.arange(numel), 0
    if kind == _BITMAP:
        return np.flatnonzero(np.unpackbits(data, count=numel)), (numel + 7) // 8
    if _BLOCKS <= kind < _BLOCKS + 2 * len(_ONES):
        return _decode_blocks(_block_codes()[1][kind - _BLOCKS], data, count, numel)
    if not count:
        return np.zeros(0, np.int64), 0
    low = kind - _RICE
    gaps = rice_decode(data, count, low)
    return np.cumsum(gaps + 1) - 1, (count * low + 7) // 8 + (int((gaps >> low).sum()) + count + 7) // 8


def _decode_blocks(entries: NDArray[np.uint32], data: Bytes, count: int, numel: int) -> tuple[NDArray[np.int64], int]:
    num_blocks = -(-numel // _BLOCK_BITS)
    bits = np.unpackbits(data[: (num_blocks * _MOST_CODE_BITS + 7) // 8])
    # One place more than there are bits: there a code that is cut off ends, and all that would follow it.
    ends = len(bits) + 1
    windows = np.zeros(ends + 1, np.int64)
    for at in range(min(_MOST_CODE_BITS, len(bits))):
        windows[: len(bits) - at] |= bits[at:].astype(np.int64) << (_MOST_CODE_BITS - 1 - at)
    coded = entries[windows].astype(np.int64) & 0xFFFF
    # From the place after each place, those after 1, 2, 4, ... codes: no loop over the blocks.
    after, starts = np.minimum(np.arange(ends + 1) + (coded & 15), ends), np.zeros(1, np.int64)
    while len(starts) <= num_blocks:
        starts, after = np.concatenate([starts, after[starts]]), after[after]
    kept = coded[starts[:num_blocks], None] >> 5 + np.arange(_BLOCK_BITS)[::-1] & 1
    indices_K = np.flatnonzero(kept)
    if starts[num_blocks] == ends or not len(indices_K) == count < numel or (count and indices_K[-1] >= numel):
        raise ValueError(f"not a message: its blocks are not {count} places among {numel}")
    return indices_K, (int(starts[num_blocks]) + 7) // 8


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
    indices, _ = decode_places(kind, data[first:middle], count, numel)
    codes_K = unpack_bits(data[middle:last], count, bits).astype(np.uint16)
    return indices, Quantized(bits=bits, low=low, high=high, codes_K=codes_K).values(), last


def encode_levels(indices_K: NDArray[np.int64], values_K: NDArray[np.float32], bounds: Sequence[int]) -> Bytes:
    """Encodes entries of a vector, at ascending indices, by levels, bucket after bucket; `bounds` has a 0 and the ends
    of all buckets.
    """
    count, num_buckets = len(indices_K), len(bounds) - 1
    # Each list of places takes a bitmap at most; behind it the kernel keeps one more, whose blocks it codes.
    most = num_buckets * (2 + MAX_LEVELS * (_LEVEL.itemsize + 2)) + (2 * bounds[-1] + MAX_LEVELS * count) // 8 + 32
    to, alive_K = torch.empty(most, dtype=torch.uint8), torch.empty(count, dtype=torch.uint8)
    gaps_K = torch.empty(count, dtype=torch.int32)
    num_bytes = _compiled(
        "encode_levels",
        indices_K,
        values_K,
        count,
        np.array(bounds),
        num_buckets,
        _block_codes()[0],
        gaps_K,
        alive_K,
        to,
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
            table[level] = (len(places), sums[level] / max(1, counts[level]), kind)
            lists.append(data)
        signs = pack_bits(np.signbit(values).astype(np.uint16), 1)
        message += [np.array([num_levels], np.uint8), table.view(np.uint8), *lists, signs]
    return np.concatenate(message)


def decode_levels(data: Bytes, bounds: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Indices and values of the message of `encode_levels` at the start of `data`."""
    numel = bounds[-1]
    indices_N, values_N = torch.empty(numel, dtype=torch.int64), torch.empty(numel)
    scratch = torch.empty(2 * max(last - first for first, last in pairwise(bounds)), dtype=torch.int32)
    codes = _block_codes()[1]
    count = _compiled(
        "decode_levels", data, len(data), np.array(bounds), len(bounds) - 1, codes, indices_N, values_N, scratch
    )
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
        for level, (count, mean, kind) in enumerate(table.tolist()):
            places, used = decode_places(kind, data[at:], count, among)
            at += used
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
    to, scratch = torch.empty(6 * numel + 128, dtype=torch.uint8), torch.empty(4 * numel)
    num_bytes = _compiled("encode_moves", moves_N, numel, _block_codes()[0], scratch, to)
    return to.numpy()[:num_bytes] if num_bytes >= 0 else encode_moves_naive(moves_N)


def encode_moves_naive(moves_N: NDArray[np.float32]) -> Bytes:
    moves = moves_N.astype(np.int64)
    middle = int(np.median(moves))
    left = moves - middle
    # 0, 1, -1, 2, -2, ... become 0, 1, 2, 3, 4, ...: a Rice code takes no signs.
    folded = np.where(left > 0, 2 * left - 1, -2 * left)
    alive, table, lists = np.abs(left), list[tuple[int, int]](), list[Bytes]()
    for level in range(1, min(int(alive.max()), MAX_LEVELS) + 1):
        places, among = np.flatnonzero(alive >= level), len(alive)
        alive = alive[places]
        kind, data = encode_places(places, among)
        table.append((len(places), kind))
        lists.append(data)
    values = (alive if table else alive[:0]) - len(table)
    parts = [np.array(table, _LIST).view(np.uint8), *lists, np.packbits(left[left != 0] < 0)]
    low, low_of_all, num_lists = rice_parameter(values), rice_parameter(folded), len(table)
    # The first moves, from nothing, differ so much that places cost more than they save.
    if _rice_bits(folded, low_of_all) <= 8 * sum(map(len, parts)) + _rice_bits(values, low):
        parts, values, low, num_lists = [], folded, low_of_all, _ALL
    header = np.array([(middle, num_lists, low)], dtype=_MOVES)
    return np.concatenate([header.view(np.uint8), *parts, rice_encode(values, low)])


def decode_moves(data: Bytes, numel: int) -> NDArray[np.float32]:
    """Decodes `encode_moves`, FP32 [numel]."""
    moves_N, places = torch.empty(numel), torch.empty(4 * numel, dtype=torch.int32)
    is_done = _compiled("decode_moves", data, len(data), numel, _block_codes()[1], places, moves_N) >= 0
    return moves_N.numpy() if is_done else decode_moves_naive(data, numel)


def decode_moves_naive(data: Bytes, numel: int) -> NDArray[np.float32]:
    middle, num_lists, low = data[: _MOVES.itemsize].view(_MOVES)[0].tolist()
    data = data[_MOVES.itemsize :]
    if num_lists == _ALL:
        folded = rice_decode(data, numel, low)
        return (middle + np.where(folded % 2, (folded + 1) // 2, -folded // 2)).astype(np.float32)
    at = num_lists * _LIST.itemsize
    left, reached = np.zeros(numel, np.int64), np.arange(numel)
    for count, kind in data[:at].view(_LIST).tolist():
        places, used = decode_places(kind, data[at:], count, len(reached))
        reached = reached[places]
        left[reached] += 1
        at += used
    others = np.flatnonzero(left)
    end = at + (len(others) + 7) // 8
    if num_lists:
        left[reached] += rice_decode(data[end:], len(reached), low)
    left[others] *= 1 - 2 * unpack_bits(data[at:end], len(others), 1)
    return (middle + left).astype(np.float32)
