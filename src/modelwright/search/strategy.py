"""`Strategy`: how the next candidates are chosen. `strategies/` has one file for each, `strategy_list.py` the list."""

from collections.abc import Callable
from dataclasses import dataclass

from modelwright.search.workbench import Workbench


@dataclass(frozen=True, kw_only=True)
class Strategy:
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
    needs_shapes: bool = False
    """Whether it works on the shape of a model alone, not on hyperparameters."""
    is_baseline: bool = False
    """Whether the report compares other strategies with it."""
