"""The L2 norm of many tensors together, as accurate on the CPU as on an accelerator."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

_PIECE = 2**16
"""Elements that the CPU adds up in one go: over millions of them FP32's own norm is too small by up to 2e-4."""


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """A scalar, 0 for no tensors; not finite if any value is not."""
    pieces = [piece for one in tensors for piece in _pieces(one)]
    return get_total_norm(pieces, foreach=True) if pieces else torch.zeros(())


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    return tensor.reshape(-1).split(_PIECE) if tensor.device.type == "cpu" else [tensor]
