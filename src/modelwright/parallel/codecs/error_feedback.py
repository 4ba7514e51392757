"""Error feedback: the error of one message is added to the next (Seide et al. 2014; Karimireddy et al. 2019).

Gradients travel as one flat FP32 vector; the residual is kept per gradient, so that a checkpoint can redistribute it
with the parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modelwright.core.errors import ArtifactError


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """All values in order, FP32 [N]; a copy."""
    return torch.cat([tensor.reshape(-1).float() for tensor in tensors])


def write_back(flat_N: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copies the values into the tensors, in the order of `flatten`."""
    torch._foreach_copy_(list(tensors), shaped(flat_N, tensors))  # pyright: ignore


def shaped(flat_N: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of the flat vector with the shapes of `like`."""
    parts = flat_N.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


@dataclass(eq=False)
class Residual:
    """Values that have not been sent yet, one tensor per gradient (FP32); empty before the first message."""

    tensors: list[Tensor] = field(default_factory=list[Tensor])

    def flat(self, gradients: Sequence[Tensor]) -> Tensor | None:
        """The residual [N], None before the first message. Raises `ArtifactError` if it belongs to other gradients."""
        if not self.tensors:
            return None
        if [tensor.shape for tensor in self.tensors] != [gradient.shape for gradient in gradients]:
            raise ArtifactError(
                "checkpoint: the residuals of gradient compression belong to other parameters than this layout's; "
                "resume with the layout that wrote the checkpoint, or start afresh"
            )
        return flatten(self.tensors).to(gradients[0].device)

    def keep(self, flat_N: Tensor, gradients: Sequence[Tensor]) -> None:
        self.tensors = shaped(flat_N, gradients)

    def drain(self, gradients: Sequence[Tensor]) -> None:
        """Adds the residual to the gradients of a rank that is alone and sends no further message."""
        flat = self.flat(gradients)
        if flat is not None:
            left = [part.to(gradient.dtype) for part, gradient in zip(shaped(flat, gradients), gradients, strict=True)]
            torch._foreach_add_(list(gradients), left)  # pyright: ignore
            self.tensors = []

    def load(self, state: Sequence[Tensor]) -> None:
        self.tensors = [tensor.float() for tensor in state]
