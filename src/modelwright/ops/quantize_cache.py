"""Codes of one input for all layers that read it: quantized once, and saved once between forward and backward.

Several projections read the same tensor one after the other (queries, keys and values; gate and up).
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from modelwright.ops.quantize import Grid, quantize

Codes = tuple[Tensor, Tensor]
"""Codes and scales."""


class SharedCodes:
    """Codes of the tensor that was quantized last, valid while its memory lives and is not written to. Tensor wrappers
    (DTensor), inference tensors and tensors under tracing are quantized every time.
    """

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Any], tuple[Any, ...], Codes] | None = None

    def __call__(self, x_NI: Tensor, grid: Grid, dtype: torch.dtype) -> Codes:
        """The result of `quantize`."""
        if torch.compiler.is_compiling() or type(x_NI) not in (Tensor, FakeTensor) or x_NI.is_inference():
            return quantize(x_NI, grid, dtype)
        storage, last = x_NI.untyped_storage(), self._last
        key = (x_NI._version, x_NI.storage_offset(), x_NI.shape, x_NI.stride(), x_NI.dtype, grid, dtype)
        if last is not None and last[0]() is storage and last[1] == key:
            return last[2]
        made = quantize(x_NI, grid, dtype)
        self._last = weakref.ref(storage, self._forget), key, made
        return made

    def _forget(self, gone: weakref.ref[Any]) -> None:
        if self._last is not None and self._last[0] is gone:
            self._last = None
