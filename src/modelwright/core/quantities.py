"""Numbers as people write them: `2M`, `1.5K`, `64Ki`, `180MiB`, `9e14`, `10TFLOP/s`.

The prefixes K, M, G and T are powers of 1,000, as in the SI, and Ki, Mi, Gi and Ti powers of 1,024. Case does not
matter.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_QUANTITY = re.compile(r"(\d+\.?\d*(?:e[+-]?\d{1,3})?) ?([kmgt]i?|)((?:b|flop)?(?:/s)?)", re.IGNORECASE)


@dataclass(frozen=True)
class Quantity:
    """`value` with its prefix applied, exactly; `unit`: "", "b", "flop", or one of them per second ("b/s", "/s");
    is_bare: whether it was a plain number, without prefix and unit.
    """

    value: Fraction
    unit: str
    is_bare: bool


def parse_quantity(text: str) -> Quantity | None:
    """Parse `text`; `None` if it is not such a number. Negative numbers are not accepted."""
    matched = _QUANTITY.fullmatch(text.strip())
    if matched is None:
        return None
    number, prefix, unit = (group.lower() for group in matched.groups())
    return Quantity(Fraction(number) * _PREFIXES[prefix], unit, not prefix and not unit)


def parse_count(text: str) -> int | None:
    """A whole number without a unit (`2M`, `65_536`, `65536`), `None` for anything else."""
    quantity = parse_quantity(text.replace("_", ""))
    if quantity is None or quantity.unit or quantity.value.denominator != 1:
        return None
    return int(quantity.value)
