"""Values as a sign and a level, where every level decodes to the mean of its values.

Level l holds the magnitudes from (1 + l) to (2 + l) times the smallest one kept; the last level is unbounded. Few
levels and their means are near the best that a scalar code reaches at one to three bits per entry (Lloyd 1982; for
gradients TernGrad, Wen et al. 2017, with one level), where evenly spaced levels up to the largest magnitude spend their
bits on outliers. The values that reach the next level are coded as positions among those that reached the previous one,
so that a rare level costs little. One coded bucket is

    header   the number of levels, how many values reach each, the bytes of each list of places, the levels' means
    places   of all values among the bucket's entries, then for each further level among the values of the one before
    signs    one bit a value

Pure functions; no state, no rank.
"""

import numpy as np
from numpy.typing import NDArray

from modelwright.ops.sparse_codec import Bytes, decode_places, encode_places, pack_bits, unpack_bits

MAX_LEVELS = 8
_LEVEL = np.dtype([("count", "<u4"), ("place_bytes", "<u4"), ("mean", "<f4"), ("kind", "u1")])


def levels_of(magnitudes_K: NDArray[np.float32]) -> NDArray[np.int64]:
    """The level of each magnitude [K], from 0."""
    lowest = float(magnitudes_K.min()) if len(magnitudes_K) else 0.0
    if lowest <= 0.0:
        return np.zeros(len(magnitudes_K), np.int64)
    return np.minimum(magnitudes_K / np.float32(lowest), MAX_LEVELS).astype(np.int64) - 1


def encode_levels(indices_K: NDArray[np.int64], values_K: NDArray[np.float32], numel: int) -> Bytes:
    """One bucket of `numel` entries, of which those at `indices_K` (ascending) have the values."""
    magnitudes_K = np.abs(values_K)
    levels_K = levels_of(magnitudes_K)
    num_levels = int(levels_K.max()) + 1 if len(levels_K) else 0
    table, lists, alive = np.zeros(num_levels, _LEVEL), [], levels_K
    for level in range(num_levels):
        places, among = (np.flatnonzero(alive >= level), len(alive)) if level else (indices_K, numel)
        alive = alive[places] if level else alive
        kind, data = encode_places(places, among)
        inside = levels_K == level
        mean = float(magnitudes_K[inside].mean(dtype=np.float64)) if inside.any() else 0.0
        table[level] = (len(places), len(data), mean, kind)
        lists.append(data)
    signs = pack_bits(np.signbit(values_K).astype(np.uint16), 1)
    return np.concatenate([np.array([num_levels], np.uint8), table.view(np.uint8), *lists, signs])


def decode_levels(data: Bytes, numel: int) -> tuple[NDArray[np.int64], NDArray[np.float32], int]:
    """Indices and values of the bucket at the start of `data`, and its length in bytes."""
    num_levels = int(data[0])
    at = 1 + num_levels * _LEVEL.itemsize
    table = data[1:at].view(_LEVEL)
    indices_K, reached, among = np.zeros(0, np.int64), np.zeros(0, np.int64), numel
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
    last = at + (len(indices_K) + 7) // 8
    signs_K = unpack_bits(data[at:last], len(indices_K), 1)
    return indices_K, np.where(signs_K, -values_K, values_K), last
