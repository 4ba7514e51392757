"""`SearchConfig`: the options of `modelwright search`, apart from the run that is searched."""

import math
from dataclasses import dataclass, fields

from modelwright.core.config import ConfigError

SPACES = ("architecture", "hyperparameters")


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """Budgets of a search and limits on its winner."""

    budget: float = 8.0
    """Training cost that each strategy may spend; the unit is one training of the run's own model."""
    num_steps: int = 200
    """Optimizer steps of a training of full length, at the run's own batch size."""
    max_latency_ms: float = 0.0
    """Limit in milliseconds for a decoded token; 0 means the latency of the run's own model."""
    max_parameters: int = 0
    """Limit on parameters; 0 means the number of the run's own model."""
    num_streams: int = 1
    """Number of answers that are decoded at once while latency is measured."""
    space: str = SPACES[0]
    """Space to search: architecture, hyperparameters, or a YAML file with other values on the axes of one of them."""
    strategies: tuple[str, ...] = ("halving",)
    """Strategies that search, each with a separate budget; docs/search.md lists them."""
    num_repetitions: int = 1
    """Trainings with other seeds of each strategy's best candidate; the winner is chosen by the mean loss."""

    def __post_init__(self) -> None:
        # A budget below 1 could not pay for one training of the run's own model; a schedule needs two steps.
        least = {"budget": 1, "num_steps": 2, "num_streams": 1}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not least.get(field.name, 0) <= value < math.inf:
                raise ConfigError(
                    f"{option(field.name)}: must be finite and at least {least.get(field.name, 0)}, got {value:g}"
                )


def option(name: str) -> str:
    """Returns the command-line option of a field of `SearchConfig`: `--steps` for `num_steps`."""
    return f"--{name.removeprefix('num_').replace('_', '-')}"
