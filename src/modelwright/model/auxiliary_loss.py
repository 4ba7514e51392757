"""Terms of the training loss that a layer adds itself: a router's load balancing, a penalty on activations.

The term is not carried to the end of the model. Its gradient begins where the layer computes it (as in Megatron-Core's
`MoEAuxLossAutoScaler`), so it works in any pipeline stage and with recomputed activations. The training step sets its
scale (`train/techniques/auxiliary_losses.py`).
"""

from typing import Any

import torch
from torch import Tensor, nn


class AuxiliaryLoss(nn.Module):
    """`hidden = self.balance(hidden, loss)`: passes `hidden` on, and adds `weight` times the mean of the loss over the
    tokens of the global batch to what is minimized.

    name: of the metric; layers may share one, and their terms add up. The loss is a scalar: the sum over the tokens at
    hand, so that the parts of a batch add up to the whole. Evaluation leaves it out.
    """

    def __init__(self, name: str, weight: float) -> None:
        super().__init__()
        self.name = name
        self.weight = weight
        # no buffers: `to` would round them; not on the meta device with a model whose weights are read later
        self.scale = torch.zeros((), dtype=torch.float64, device="cpu")
        self.total = torch.zeros((), dtype=torch.float64, device="cpu")

    def begin_step(self, scale: float, device: torch.device) -> None:
        """scale: of the loss, divided by the number of tokens of the global batch."""
        self.scale, self.total = self.scale.to(device), self.total.to(device)
        self.scale.fill_(self.weight * scale)
        self.forget()

    def forget(self) -> None:
        """Restart the step."""
        self.total.zero_()

    def forward(self, hidden: Tensor, loss: Tensor) -> Tensor:
        function: Any = _AddTerm
        return function.apply(hidden, loss, self.scale, self.total)


class _AddTerm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor, scale: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        ctx.scale, ctx.total = scale, total
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (loss,) = ctx.saved_tensors
        ctx.total += loss.detach()  # once for each microbatch, however often forward ran
        return gradients[0], ctx.scale.to(loss.dtype).expand_as(loss), None, None


def auxiliary_losses(model: nn.Module) -> list[AuxiliaryLoss]:
    """The auxiliary losses of the layers in this process."""
    return [module for module in model.modules() if isinstance(module, AuxiliaryLoss)]
