"""`SearchStrategy`: how the next candidates are chosen. `strategy_list.py` has the list of those in `strategies/`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelwright.search.trial import Trial
from modelwright.search.workbench import Workbench


@dataclass(frozen=True, kw_only=True)
class SearchFinding:
    """What a strategy adds to the report. name: its key in the JSON; figures: plain data; text: one line."""

    name: str
    figures: Mapping[str, Any]
    text: str


Conclude = Callable[[Workbench, Sequence[Trial]], SearchFinding]
"""Called when all strategies have ended, with the strategy's workbench and the trials of all of them."""


@dataclass(frozen=True, kw_only=True)
class SearchStrategy:
    """One way to search.

    A package adds one as an entry point of the group `modelwright.search_strategies` that is such a value.
    """

    name: str
    """On the command line and in the report."""
    summary: str
    """One line of the report and of the help."""
    run: Callable[[Workbench], None]
    """Tries candidates until the budget is spent. It must be a deterministic function of `Workbench.seed` and of what
    its trials return: a search that was killed runs it again from the start, with the results that the journal has."""
    conclude: Conclude | None = None
    """What it finds out about the whole search, if anything."""
    needs_shapes: bool = False
    """Whether it works on the shape of a model alone, not on hyperparameters."""
    is_baseline: bool = False
    """Whether the report compares other strategies with it."""
