"""Shamir's secret sharing (CACM 1979): any `threshold` shares give the secret back, fewer say nothing about it."""

import secrets
from collections.abc import Mapping

from modelwright.core.errors import ModelwrightError

PRIME = 2**521 - 1
"""A Mersenne prime, above every secret of 64 bytes."""
SECRET_BYTES = 32


def split_secret(secret: bytes, *, threshold: int, places: list[int]) -> dict[int, int]:
    """A share for each place (numbers above 0): values of a random polynomial whose constant is the secret."""
    assert len(secret) == SECRET_BYTES
    assert 0 < threshold <= len(places) == len(set(places))
    assert min(places) > 0
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {place: _value(coefficients, place) for place in places}


def join_secret(shares: Mapping[int, int], *, threshold: int) -> bytes:
    """The secret, by Lagrange interpolation at 0. Raises `ModelwrightError` for too few shares, or for wrong ones that
    give no secret.
    """
    if len(shares) < threshold:
        raise ModelwrightError(f"secure sum: {len(shares)} shares of a secret, but {threshold} are needed")
    chosen = dict(sorted(shares.items())[:threshold])
    total = 0
    for place, share in chosen.items():
        numerator = denominator = 1
        for other in chosen:
            if other != place:
                numerator = numerator * -other % PRIME
                denominator = denominator * (place - other) % PRIME
        total += share * numerator * pow(denominator, -1, PRIME)
    try:
        return (total % PRIME).to_bytes(SECRET_BYTES, "big")
    except OverflowError:
        raise ModelwrightError("secure sum: the shares of a secret do not belong together") from None


def _value(coefficients: list[int], place: int) -> int:
    """Horner's rule."""
    result = 0
    for coefficient in reversed(coefficients):
        result = (result * place + coefficient) % PRIME
    return result
