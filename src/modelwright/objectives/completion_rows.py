"""Conversion of completions to rows of tokens, packed as documents are, and of values of tokens back to completions.

Legend: C completions, T places of a completion (place t predicts token t + 1, so that a sequence of n tokens has n - 1
places), B rows, R tokens of a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.data.rows.pack import best_fit


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """Location of each of C completions: in `rows` [C], from `starts` [C] on, over `lengths` [C] tokens."""

    rows: list[int]
    starts: list[int]
    lengths: list[int]
    num_rows: int
    row_len: int

    @classmethod
    def of(cls, lengths_C: Tensor, row_len: int) -> "RowPlan":
        """Packs completions into rows of `row_len` tokens by best fit, longest first; none is longer than a row."""
        lengths = np.array(lengths_C.tolist(), dtype=np.int64)
        rows = best_fit(lengths, row_len) if len(lengths) else lengths
        num_rows = int(rows.max()) + 1 if len(rows) else 0
        used, starts = [0] * num_rows, list[int]()
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            starts.append(used[row])
            used[row] += length
        return cls(rows=rows.tolist(), starts=starts, lengths=lengths.tolist(), num_rows=num_rows, row_len=row_len)

    def placed(self, values_CT: Tensor, empty: int | float = 0) -> Tensor:
        """Scatters the values of completions to their rows [B, R]; `empty` elsewhere."""
        values_BR = torch.full((self.num_rows, self.row_len), empty, dtype=values_CT.dtype)
        for values_T, row, start, length in zip(values_CT, self.rows, self.starts, self.lengths, strict=True):
            values_BR[row, start : start + length] = values_T[:length]
        return values_BR

    def taken(self, values_BR: Tensor, num_places: int) -> Tensor:
        """Gathers the values of completions from rows [C, T], T = `num_places`; 0 past the end of a completion."""
        values_CT = values_BR.new_zeros(len(self.rows), num_places)
        for number, (row, start, length) in enumerate(zip(self.rows, self.starts, self.lengths, strict=True)):
            values_CT[number, :length] = values_BR[row, start : start + length]
        return values_CT


def completion_batch(
    ids_CL: Tensor, mask_CT: Tensor, plan: RowPlan, extras_CT: Mapping[str, Tensor] | None = None
) -> TokenBatch:
    """Builds the rows for a forward pass over completions.

    ids_CL: int64, prompts with completions, L = T + 1; mask_CT: bool, the places that predict a token of the
    completion, which get labels; extras_CT: further values of places, by their names without the shape: `advantages`
    becomes the extra `advantages_BT`.
    """
    places_CT = torch.arange(mask_CT.shape[1]).expand_as(mask_CT)
    # Completions are numbered within their row, in the order of the plan
    counts, numbers = [0] * plan.num_rows, list[int]()
    for row in plan.rows:
        numbers.append(counts[row])
        counts[row] += 1
    segments = torch.tensor(numbers, dtype=torch.int32)
    return TokenBatch(
        input_ids_BT=plan.placed(ids_CL[:, :-1]),
        labels_BT=plan.placed(ids_CL[:, 1:].where(mask_CT, IGNORED), IGNORED),
        positions_BT=plan.placed(places_CT),
        segments_BT=plan.placed(segments[:, None].expand_as(mask_CT), -1),
        extras={f"{name}_BT": plan.placed(values) for name, values in (extras_CT or {}).items()},
    )
