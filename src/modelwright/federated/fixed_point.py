"""Real numbers as integers modulo 2^64, whose sums are exact whatever their order, so that masks cancel to the bit."""

import numpy as np

from modelwright.core.errors import ConfigError


def encode(values: np.ndarray, *, fraction_bits: int, num_terms: int) -> np.ndarray:
    """Round to multiples of 2^-fraction_bits [N, uint64; negative numbers as two's complement].

    num_terms: numbers that are added up at most. Raises `ConfigError` if their sum could leave the range.
    """
    scaled = np.rint(np.asarray(values, dtype=np.float64) * 2.0**fraction_bits)
    largest = float(np.abs(scaled).max(initial=0.0))
    if not largest * num_terms < 2.0**63:  # also refuses NaN
        raise ConfigError(
            f"secure_sum.fraction_bits: the sum of {num_terms} numbers of {largest / 2.0**fraction_bits:.3g} exceeds "
            f"64 bits with {fraction_bits} of them after the point; choose fewer"
        )
    return scaled.astype(np.int64).view(np.uint64)


def decode(total: np.ndarray, *, fraction_bits: int) -> np.ndarray:
    """The real numbers [N, float64] of a sum modulo 2^64."""
    return total.view(np.int64).astype(np.float64) / 2.0**fraction_bits
