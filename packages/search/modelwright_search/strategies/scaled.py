"""The run's own shape, scaled as a whole: the baseline without a search."""

from modelwright_search.space import Choices, Value
from modelwright_search.workbench import SearchStrategy, Workbench

NUM_SCALES = 40
LARGEST = 2.0
"""Largest factor. Factors are tried downwards in equal steps: the first one within the limits is the largest."""
MULTIPLE = 16
"""Number of which widths are multiples."""


def search_along_scales(bench: Workbench) -> None:
    """Scales depth, width, heads and feed-forward width by one factor, with the run's attention and gate: tries the
    largest shape within the limits, and smaller ones while the budget lasts, each once.
    """
    for step in range(NUM_SCALES):
        choices = scaled_choices(bench.space.standard_choices, LARGEST * (1.0 - step / NUM_SCALES))
        if bench.find(choices, 1.0) is None:
            bench.try_out(choices)  # None where it costs more than is left: a smaller one may not


def scaled_choices(standard: Choices, factor: float) -> dict[str, Value]:
    """Scales numbers by the factor, to at least 1, widths to multiples of 16; copies strings unchanged."""
    scaled: dict[str, Value] = {}
    for name, value in standard.items():
        if isinstance(value, str):
            scaled[name] = value
            continue
        multiple = MULTIPLE if name in ("width", "ffn") else 1
        scaled[name] = max(multiple, round(value * factor / multiple) * multiple)
    return scaled


SCALED = SearchStrategy(name="scaled", run=search_along_scales, needs_shapes=True)
