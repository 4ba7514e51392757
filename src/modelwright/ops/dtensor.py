"""This rank's piece of a tensor that may be laid out over several."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's piece, sharing memory; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_dtensor_like(whole: Tensor, piece: Tensor) -> Tensor:
    """A piece of this rank as a tensor that is laid out like `whole`, sharing the piece's memory."""
    return DTensor(piece, whole._spec, requires_grad=False) if isinstance(whole, DTensor) else piece
