"""What changes the shares of the sources while a stage trains, by their held-out rows."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from modelwright.data.rows.batch import TokenBatch
from modelwright.data.rows.batching.loader import PlannedLoader
from modelwright.data.rows.loader import PackedRows
from modelwright.pipeline.config import RunConfig
from modelwright.train.config import TrainConfig
from modelwright.train.objective import BatchSource, Objective
from modelwright.train.runtime import TechniqueBuilder
from modelwright.train.techniques.heldout_mixture import heldout_mixture
from modelwright.train.techniques.score_mixture import score_mixture


def mixture_techniques(
    loader: BatchSource,
    objective: Objective,
    config: RunConfig,
    training: TrainConfig,
    rows: Path,
    *,
    batch_rows: int,
) -> list[TechniqueBuilder]:
    """The techniques that change the shares, if settings ask for them. rows: the folder that is trained on."""
    if not isinstance(loader, PlannedLoader) or not training.batching.mixture.is_measured:
        return []
    heldout = heldout_by_source(rows.parent / "heldout", config, batch_rows=batch_rows)
    return [
        partial(
            build,
            training.batching.mixture,
            mixture=loader.mixture,
            objective=objective,
            heldout=heldout,
            every=training.eval_every_steps,
        )
        for build in (heldout_mixture, score_mixture)
    ]


def heldout_by_source(folder: Path, config: RunConfig, *, batch_rows: int) -> dict[str, Sequence[TokenBatch]]:
    """Held-out batches of each source, for a mixture: the first of them on disk, equally many tokens of each, together
    about `config.validation_tokens`.
    """
    if not folder.is_dir():
        return {}
    packed = PackedRows(folder)
    group_tokens = packed.seq_len * packed.group_size
    tokens = config.validation_tokens or packed.num_groups * group_tokens
    most = max(1, tokens // group_tokens // len(packed.sources))
    chosen = {name: packed.source_groups(name)[:most] for name in packed.sources}
    return {
        name: [packed.gather(own[first : first + batch_rows]) for first in range(0, len(own), batch_rows)]
        for name, own in chosen.items()
    }
