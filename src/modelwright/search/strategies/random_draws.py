"""Random search (Bergstra and Bengio 2012; for architectures Li and Talwalkar 2019): a baseline."""

import random

from modelwright.search.strategy import SearchStrategy
from modelwright.search.workbench import Workbench


def search_at_random(bench: Workbench) -> None:
    """Candidates drawn evenly on each axis, each trained for the full length."""
    generator = random.Random(bench.seed)
    while bench.try_out(bench.space.draw(generator)) is not None:
        pass


RANDOM = SearchStrategy(name="random", summary="candidates drawn evenly", run=search_at_random, is_baseline=True)
