"""Rows of what a model could do before a training, drawn from those that are trained on."""

import random
from collections.abc import Sequence
from typing import overload

import numpy as np

from modelwright.core.errors import ConfigError
from modelwright.data.rows.batch import TokenBatch
from modelwright.data.rows.loader import PackedRows
from modelwright.train.techniques.ewc import EwcConfig


class OldRows(Sequence[TokenBatch]):
    """Groups of rows as batches, read when they are asked for."""

    def __init__(self, packed: PackedRows, groups: Sequence[int]) -> None:
        self.packed = packed
        self.groups = groups

    def __len__(self) -> int:
        return len(self.groups)

    @overload
    def __getitem__(self, index: int) -> TokenBatch: ...

    @overload
    def __getitem__(self, index: slice) -> list[TokenBatch]: ...

    def __getitem__(self, index: int | slice) -> TokenBatch | list[TokenBatch]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        return self.packed.gather(np.array([self.groups[index]]))


def old_rows(packed: PackedRows, config: EwcConfig, seed: int) -> Sequence[TokenBatch]:
    """What EWC estimates the importance of weights by; none if it is off. Raises `ConfigError` if no row is of its
    source.
    """
    if not config.strength:
        return ()
    names = [config.source] if config.source else list(packed.sources)
    if not any(packed.sources.get(name) for name in names):
        raise ConfigError(
            f"ewc.source: no row comes from {config.source!r}; name one of {', '.join(packed.sources)}, or replay old "
            "texts"
        )
    groups = np.concatenate([packed.source_groups(name) for name in names]).tolist()
    return OldRows(packed, random.Random(seed).sample(groups, min(config.num_rows, len(groups))))
