"""How a training stage uses its rows: what it is evaluated on, and how many updates a pass over them is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelwright.core.seeds import derive_seed
from modelwright.data.rows.batch import TokenBatch
from modelwright.data.rows.loader import PackedLoader, PackedRows
from modelwright.pipeline.config import RunConfig
from modelwright.train.evaluation import HeldoutBatches
from modelwright.train.objective import Objective
from modelwright.train.runtime import TechniqueBuilder


def heldout_sample(folder: Path, config: RunConfig, *, batch_rows: int) -> Sequence[TokenBatch]:
    """The held-out batches that training is evaluated on: about `config.validation_tokens`, always the same ones."""
    if not folder.is_dir():
        return ()
    packed = PackedRows(folder)
    group_tokens = packed.seq_len * packed.group_size
    requested = config.validation_tokens // group_tokens if config.validation_tokens else packed.num_groups
    if requested >= packed.num_groups:
        return HeldoutBatches(packed, batch_rows=batch_rows)
    loader = PackedLoader(packed, batch_rows=batch_rows, seed=derive_seed(config.seed, "heldout"))
    return [loader.batch(number) for number in range(max(1, requested // batch_rows))]


def once(training: Any) -> float:
    """`RowUse.updates_per_row` of a stage that learns from each row once per epoch."""
    return 1.0


def no_techniques(objective: Objective, heldout: Sequence[TokenBatch], folder: Path) -> Sequence[TechniqueBuilder]:
    """`RowUse.techniques` of a stage that needs none."""
    return ()


@dataclass(frozen=True, kw_only=True)
class RowUse:
    """What differs between stages that learn from the rows themselves and those that generate what they learn from."""

    heldout: Callable[..., Sequence[TokenBatch]] = heldout_sample
    """Called like `heldout_sample`."""
    updates_per_row: Callable[[Any], float] = once
    """Rows of updates that one row becomes in an epoch, from the settings of the stage."""
    learns_by_heart: bool = True
    """Whether a model that sees the rows too often learns them by heart."""
    compares_rows: bool = False
    """Whether the loss compares the rows of a batch with each other: held-out batches then have the size of those in
    training, whatever the number of processes."""
    techniques: Callable[[Objective, Sequence[TokenBatch], Path], Sequence[TechniqueBuilder]] = no_techniques
    """Further techniques, from the objective, the held-out batches and the folder of the stage."""
