"""Learned selection of heads: each token decides from its own input which heads of a layer attend for it, under a
budget. A closed head's scores, softmax and sum of values are not computed; its output is zero.

The unit is a token and a key/value head with all query heads that share it, because decoding is bound by reading keys
and values: those of a closed head are not read. Mixture-of-head attention (Jin et al. 2024, arXiv 2410.11842) also
chooses for each token, but takes a fixed number of heads. Blocks of 64 queries would also suit a tiled kernel, but the
decision of a block would have to come from tokens before it, and decoding, cached prompts and verified drafts would
have to carry it along. A decision from the token's own input is causal by construction and stateless. Gathering costs
the kernel next to nothing, because it copies each block of queries anyway: it takes the next 64 open queries of a head
instead of the next 64 (`ops/kernels/attention.h`). All tokens' queries, keys and values are computed, and keys and
values are cached, because later tokens may open the head.

Training is straight-through (Bengio et al. 2013, arXiv 1308.3432): the factor of an output is 0 or 1, its gradient that
of the sigmoid. The task's gradient skips closed heads, because their outputs do not exist; for an open head it is
minus the first-order effect of removing it, the importance of Michel et al. 2019 (arXiv 1905.10650, section 4.1). Only
the budget opens closed heads again, an auxiliary loss whose gradient reaches every head.

An auxiliary loss is a term of the training loss that a layer adds. Its gradient begins where the layer computes it (as
in Megatron-Core's `MoEAuxLossAutoScaler`), so it works in any pipeline stage and with recomputed activations. The
training step sets its scale (`train/techniques/auxiliary_losses.py`).

Legend: B rows, T tokens, H heads.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn


class AuxiliaryLoss(nn.Module):
    """`hidden = self.balance(hidden, loss)` returns `hidden` and adds `weight` times the mean of the loss over the
    tokens of the global batch to the training loss.

    name: metric; layers may share one, and their terms add up. The loss is a scalar: the sum over this microbatch's
    tokens, so that the parts of a batch add up to the whole. Evaluation leaves it out.
    """

    def __init__(self, name: str, weight: float) -> None:
        super().__init__()
        self.name = name
        self.weight = weight
        # no buffers: `to` would round them; not on the meta device with a model whose weights are read later
        self.scale = torch.zeros((), dtype=torch.float64, device="cpu")
        self.total = torch.zeros((), dtype=torch.float64, device="cpu")

    def begin_step(self, scale: float, device: torch.device) -> None:
        """Starts a step. scale: loss scale divided by the number of tokens of the global batch."""
        self.scale, self.total = self.scale.to(device), self.total.to(device)
        self.scale.fill_(self.weight * scale)
        self.forget()

    def forget(self) -> None:
        """Forget the sum, for a step that is tried again."""
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
        # Backward runs once for each microbatch; forward would count recomputed layers twice
        ctx.total += loss.detach()
        return gradients[0], ctx.scale.to(loss.dtype).expand_as(loss), None, None


def auxiliary_losses(model: nn.Module) -> list[AuxiliaryLoss]:
    """Auxiliary losses of the layers in this process."""
    return [module for module in model.modules() if isinstance(module, AuxiliaryLoss)]


BUDGET_WEIGHT = 1.0
"""Factor of the budget loss. With 8 heads, a token one head above its budget pays 0.03 nats per head, about the worth
of one attention head in a small model."""
LOSS_NAME = "head_budget"


class HeadSelection(nn.Module):
    """Opens heads by the sign of a layer's router logits, repeated for the query heads of a key/value head."""

    def __init__(self, num_heads: int, budget: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.budget = budget
        self.balance = AuxiliaryLoss(LOSS_NAME, BUDGET_WEIGHT)

    def forward(self, logits_BTH: Tensor) -> Tensor:
        """Returns the open heads, boolean [B, T, H]."""
        return logits_BTH > 0

    def gated(self, out_BTHd: Tensor, logits_BTH: Tensor, open_BTH: Tensor) -> Tensor:
        """Returns attention's output with closed heads at zero; training adds the budget loss, for the router."""
        if not torch.is_grad_enabled():
            return out_BTHd * open_BTH.to(out_BTHd.dtype)[..., None]
        straight_through: Any = _StraightThrough
        decisions_BTH = straight_through.apply(logits_BTH.to(torch.promote_types(logits_BTH.dtype, torch.float32)))
        factors_BTH = decisions_BTH * open_BTH
        out_BTHd = out_BTHd * factors_BTH.to(out_BTHd.dtype)[..., None]
        # Squared for each token, not for the mean of tokens, so that none is starved for another; summed with padding,
        # so that the parts of a batch add up to the whole
        shares_BT = self.num_open(decisions_BTH.sum(dim=-1)) / self.num_heads
        return self.balance(out_BTHd, (shares_BT - self.budget).square().sum())

    def num_open(self, own_BT: Tensor) -> Tensor:
        """Number of open heads of each token, from those of this process; layouts that divide heads replace it."""
        return own_BT


class _StraightThrough(torch.autograd.Function):
    """1 where a logit is positive, else 0; the gradient is that of the sigmoid."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return (logits > 0).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        soft = cast(Tensor, logits.sigmoid())
        return gradients[0] * soft * (1 - soft)


@contextmanager
def decisions_seen(model: nn.Module, see: Callable[[int, Tensor], None]) -> Generator[None]:
    """Within the block, `see` gets the number and the decisions, bool [B, T, H], of layers that select heads."""

    def show(layer: int, module: nn.Module, inputs: Any, open_BTH: Tensor) -> None:
        see(layer, open_BTH)

    hooks = [
        selection.register_forward_hook(partial(show, int(name)))
        for name, block in model.get_submodule("blocks").named_children()
        for selection in block.modules()
        if isinstance(selection, HeadSelection)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
