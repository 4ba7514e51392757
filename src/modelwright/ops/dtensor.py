"""This rank's shard of a tensor that may be a DTensor."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, sharing memory; a plain tensor is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_dtensor_like(whole: Tensor, piece: Tensor) -> Tensor:
    """A DTensor placed like `whole` around this rank's shard, sharing its memory."""
    return DTensor(piece, whole._spec, requires_grad=False) if isinstance(whole, DTensor) else piece
