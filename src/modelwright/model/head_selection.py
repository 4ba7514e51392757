"""Learned selection of heads: each token decides from its own input which heads of a layer attend for it, under a
budget. A closed head's scores, softmax and sum of values are not computed; its output is zero.

The unit is a token and a key/value head with all query heads that share it, because decoding is bound by reading keys
and values: those of a closed head are not read. Mixture-of-head attention (Jin et al. 2024, arXiv 2410.11842) chooses
for each token, too, but takes a fixed number of heads. Blocks of 64 queries would also suit a tiled kernel, but the
decision of a block would have to come from tokens before it, and decoding, cached prompts and verified guesses would
have to carry it along. A decision from the token's own input is causal by construction and has no state. Gathering
costs the kernel next to nothing, because it copies each block of queries anyway: it takes the next 64 open queries of a
head instead of the next 64 (`ops/kernels/attention.h`). All tokens' queries, keys and values are computed, and keys and
values are cached, as later tokens may open the head.

Training is straight-through (Bengio et al. 2013, arXiv 1308.3432): the factor of an output is 0 or 1, its gradient that
of the sigmoid. Closed heads give the task no gradient, because their outputs do not exist; for an open head it is
minus the first-order effect of removing it, the importance of Michel et al. 2019 (arXiv 1905.10650, section 4.1). What
opens closed heads again is the budget, an auxiliary loss whose gradient reaches every head.

Legend: B rows, T tokens, H heads.

Terms of the training loss that a layer adds itself: a router's load balancing, a penalty on activations.

The term is not carried to the end of the model. Its gradient begins where the layer computes it (as in Megatron-Core's
`MoEAuxLossAutoScaler`), so it works in any pipeline stage and with recomputed activations. The training step sets its
scale (`train/techniques/auxiliary_losses.py`).
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

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


BUDGET_WEIGHT = 1.0
"""Factor of the budget's term. With 8 heads a token one head above its budget pays 0.03 nats a head, as much as the
attention of a small model is worth per head."""
LOSS_NAME = "head_budget"


class HeadSelection(nn.Module):
    """Decides from the outputs of a layer's router, which are repeated for the query heads of a key/value head, so that
    these have one decision. It has no parameters of its own.
    """

    def __init__(self, num_heads: int, budget: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.budget = budget
        self.balance = AuxiliaryLoss(LOSS_NAME, BUDGET_WEIGHT)

    def forward(self, logits_BTH: Tensor) -> Tensor:
        """Which heads are open, boolean [B, T, H]."""
        return logits_BTH > 0

    def gated(self, out_BTHd: Tensor, logits_BTH: Tensor, open_BTH: Tensor) -> Tensor:
        """Attention's output with closed heads at zero, whether they were computed or not, and the terms of the loss
        that train the router.
        """
        if not torch.is_grad_enabled():
            return out_BTHd * open_BTH.to(out_BTHd.dtype)[..., None]
        decisions_BTH = straight_through(logits_BTH.to(torch.promote_types(logits_BTH.dtype, torch.float32)))
        factors_BTH = decisions_BTH * open_BTH
        out_BTHd = out_BTHd * factors_BTH.to(out_BTHd.dtype)[..., None]
        return self.balance(out_BTHd, self.budget_loss(decisions_BTH))

    def budget_loss(self, decisions_BTH: Tensor) -> Tensor:
        """The squared distance of each token's share of open heads from the budget, summed over tokens, padding
        included: parts of a batch add up to the whole, and no token is starved for another.
        """
        shares_BT = self.num_open(decisions_BTH.sum(dim=-1)) / self.num_heads
        return (shares_BT - self.budget).square().sum()

    def num_open(self, own_BT: Tensor) -> Tensor:
        """Open heads of each token, from those of this process; layouts that divide heads replace it."""
        return own_BT


def straight_through(logits: Tensor) -> Tensor:
    """1 where a logit is positive, else 0; the gradient is that of the sigmoid."""
    function: Any = _StraightThrough
    return function.apply(logits)


class _StraightThrough(torch.autograd.Function):
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
    """Within the block the decisions of every layer that selects heads, boolean [B, T, H], are shown to `see` with the
    layer's number.
    """

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
