"""Who gets which arm: a salted hash decides, so that nobody is asked twice and nothing has to be remembered."""

import hashlib
from dataclasses import dataclass

CONTROL, TREATMENT = "A", "B"

_BITS = 53
"""Bits of the hash that are used: as many as a float holds exactly."""


@dataclass(frozen=True)
class Assignment:
    """The arm of one request. unit: the pseudonym of its user or session; share: of units that get B at that moment."""

    experiment: str
    unit: str
    arm: str
    share: float


def position(salt: str, unit: str) -> float:
    """A number in [0, 1) that belongs to a unit: uniform over units, and another one under another salt."""
    digest = hashlib.sha256(f"{salt}\0{unit}".encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8], "big") >> (64 - _BITS)) / 2**_BITS


def arm_of(salt: str, unit: str, share: float) -> str:
    """The arm of a unit when B has this share of them. As the share grows, units change from A to B and none back."""
    return TREATMENT if position(salt, unit) < share else CONTROL
