"""`modelwright` on a machine whose measurements are chance: no two of a shape's latency agree, so that a decision which
depended on a second one would seldom be the same.
"""

import random
import sys
from typing import Any

from modelwright.cli.main import main
from modelwright_search import candidates

FASTEST_MS, SLOWEST_MS, LIMIT_MS = 1.0, 4.0, 2.0


def chance_ms(*of_a_shape: Any) -> float:
    return random.SystemRandom().uniform(FASTEST_MS, SLOWEST_MS)


if __name__ == "__main__":
    candidates.decode_latency_ms = chance_ms
    sys.exit(main(sys.argv[1:]))
