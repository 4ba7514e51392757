"""The rows of a global batch, put together from the shares of its ranks."""

from collections.abc import Sequence
from typing import Any

from modelwright.data.rows.batch import TokenBatch


def rows_read(shares: Sequence[TokenBatch], *, by_tokens: bool) -> list[tuple[Any, ...]]:
    """The tokens, labels, positions and documents of the rows of a global batch, in its order. shares: by rank;
    by_tokens: of a loader with a token budget, whose ranks take rows in turn.
    """
    read: dict[Any, tuple[Any, ...]] = {}
    for rank, share in enumerate(shares):
        for place in range(share.num_rows):
            used = share.segments_BT[place] >= 0
            if used.any():
                parts = (share.input_ids_BT, share.labels_BT, share.positions_BT, share.segments_BT)
                key = (place, rank) if by_tokens else (rank, place)
                read[key] = tuple(tuple(part[place][used].tolist()) for part in parts)
    return [read[key] for key in sorted(read)]
