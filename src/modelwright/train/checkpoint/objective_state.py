"""The state of an objective, under any number of data ranks.

Entries under the key `rows` belong to the batches of the ranks: tensors whose first dimension is the rows of this data
rank, such as a rollout that several steps learn from. In a checkpoint they cover the global batch. Everything else is
equal on all ranks.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from modelwright.core.errors import ConfigError
from modelwright.parallel.mesh import World

ROWS = "rows"


def gather_rows(state: Mapping[str, Any], data: World) -> dict[str, Any]:
    """The state with the rows of all data ranks, in order. Collective; each rank passes the same number of rows."""
    rows = state.get(ROWS, {})
    whole = {name: data.all_gather(values.to(data.device)).flatten(0, 1).cpu() for name, values in rows.items()}
    return {**state, ROWS: whole} if rows else dict(state)


def own_rows(state: Mapping[str, Any], data: World) -> dict[str, Any]:
    """The state with this rank's rows. Raises `ConfigError` if the ranks cannot divide them equally."""
    rows = state.get(ROWS, {})
    return {**state, ROWS: {name: _own(name, values, data) for name, values in rows.items()}} if rows else dict(state)


def _own(name: str, values: Tensor, data: World) -> Tensor:
    share, rest = divmod(len(values), data.size)
    if rest:
        raise ConfigError(
            f"parallel: the checkpoint has {len(values)} rows of {name}, which {data.size} data ranks cannot "
            "divide equally; resume with another number of processes"
        )
    return values[data.rank * share : (data.rank + 1) * share].clone()
