"""Independent random streams from one seed."""

import hashlib


def derive_seed(seed: int, *names: str | int) -> int:
    """Returns a 63-bit seed for the stream called `names`: stable across machines, processes and Python versions."""
    # `hash` differs between processes; 63 bits, because torch's and NumPy's seeds are signed 64-bit numbers.
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
