"""Backward products of only the selected outputs of a layer: smaller dense products, not a mask.

Of dy [N, O] only the selected columns S are multiplied. Kind `columns` shrinks both backward products (the gradient of
the input is then an approximation); kind `rows` shrinks only the gradient of the weight, which is exact in the selected
rows and zero elsewhere. What is left out is never computed, so there is no remainder to keep; the selector makes up for
it (`optim.unit_selector`). Legend: N flattened rows, I inputs, O outputs, S selected outputs.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from modelwright.ops.linear_gemms import LinearGemms

Chosen = Callable[[], Tensor | None]
"""Numbers of the outputs that take part now, int64 [S] in rising order; None for all."""


def on_rows(inner: LinearGemms, chosen: Chosen) -> LinearGemms:
    """Like `inner`, but the weight's gradient is computed in its selected rows only."""

    def wgrad(dy_NO: Tensor, x_NI: Tensor) -> Tensor:
        rows_S = chosen()
        if rows_S is None:
            return inner.wgrad(dy_NO, x_NI)
        part_SI = inner.wgrad(dy_NO.index_select(1, rows_S), x_NI)
        return part_SI.new_zeros(dy_NO.shape[1], part_SI.shape[1]).index_copy_(0, rows_S, part_SI)

    return replace(inner, name=f"{inner.name}, chosen rows", wgrad=wgrad)


def on_columns(inner: LinearGemms, chosen: Chosen) -> LinearGemms:
    """Like `on_rows`, and the input's gradient uses the selected columns of dy only."""

    def dgrad(dy_NO: Tensor, weight_OI: Tensor) -> Tensor:
        columns_S = chosen()
        if columns_S is None:
            return inner.dgrad(dy_NO, weight_OI)
        return inner.dgrad(dy_NO.index_select(1, columns_S), weight_OI.index_select(0, columns_S))

    return replace(on_rows(inner, chosen), name=f"{inner.name}, chosen columns", dgrad=dgrad)


def masked_naive(inner: LinearGemms, chosen: Chosen, *, input_too: bool) -> LinearGemms:
    """The reference for both: whole products of a dy in which the other columns are zero. Saves nothing."""

    def masked(dy_NO: Tensor) -> Tensor:
        columns_S = chosen()
        if columns_S is None:
            return dy_NO
        return dy_NO * torch.zeros(dy_NO.shape[1], dtype=dy_NO.dtype).index_fill_(0, columns_S, 1.0)

    return replace(
        inner,
        name="masked",
        dgrad=lambda dy, weight: inner.dgrad(masked(dy) if input_too else dy, weight),
        wgrad=lambda dy, x: inner.wgrad(masked(dy), x),
    )
