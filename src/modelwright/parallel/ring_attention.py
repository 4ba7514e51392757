"""Ring attention: keys and values travel from rank to rank while each rank's queries stay.

Every rank starts with its own keys and values and passes them on, so that after as many steps as there are ranks its
queries have seen all of them; the next block is in flight while the present one is computed. In backward the blocks
travel once more, each with its gradients, which return to their owner after the last step. No rank holds the keys of
whole rows, which the all-gather of `parallel/context_parallel.py` does; both send about the same bytes.

Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context".
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable imports TorchDynamo at once, which takes 0.5 s

from modelwright.ops.partial_attention import Visible, add_keys, empty_output, gradients_of_keys
from modelwright.parallel.mesh import World

_KEYS, _GRADIENTS = 0, 1
"""Tags of the two kinds of messages, which may be on their way between two ranks at once."""


@_disable_dynamo
def ring_attention(
    q_BSHd: Tensor, k_BSKd: Tensor, v_BSKd: Tensor, context: World, visible: Sequence[Visible]
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks of `context`, [B, S, H, d] in the dtype of `v_BSKd`.

    visible: for each rank of the axis, which of that rank's keys this rank's queries see; every query sees a key of its
    own rank. Every rank calls it with tensors of the same shape. Differentiable once.
    """
    return _RingAttention.apply(q_BSHd.to(v_BSKd.dtype), k_BSKd.to(v_BSKd.dtype), v_BSKd, context, visible)  # type: ignore


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BSHd, k_BSKd, v_BSKd, context: World, visible: Sequence[Visible]):
        both = torch.stack([k_BSKd, v_BSKd])
        out_BSHd, lse_BSH = empty_output(q_BSHd)
        for source, (k, v) in _visits(both, context):
            add_keys(out_BSHd, lse_BSH, q_BSHd, k, v, visible[source])
        out_BSHd = out_BSHd.to(v_BSKd.dtype)
        ctx.save_for_backward(q_BSHd, both, out_BSHd, lse_BSH)
        ctx.context, ctx.visible = context, visible
        return out_BSHd

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_BSHd):
        q_BSHd, both, out_BSHd, lse_BSH = ctx.saved_tensors
        grad_q_BSHd = torch.zeros_like(q_BSHd, dtype=lse_BSH.dtype)
        arriving: Callable[[], Tensor] | None = None
        for source, (k, v) in _visits(both, ctx.context):
            part_q, *parts = gradients_of_keys(grad_BSHd, out_BSHd, lse_BSH, q_BSHd, k, v, ctx.visible[source])
            grad_q_BSHd += part_q
            gradients = torch.stack(parts) if arriving is None else arriving() + torch.stack(parts)
            arriving = ctx.context.start_ring_shift(gradients, tag=_GRADIENTS)
        assert arriving is not None
        grad_k_BSKd, grad_v_BSKd = arriving().to(both.dtype)
        return grad_q_BSHd.to(q_BSHd.dtype), grad_k_BSKd, grad_v_BSKd, None, None


def _visits(both: Tensor, context: World) -> Iterator[tuple[int, Tensor]]:
    """`(rank, its keys and values)` for every rank of the axis, this rank first, then the one before it."""
    for step in range(context.size):
        is_last = step == context.size - 1
        arriving = None if is_last else context.start_ring_shift(both, tag=_KEYS)
        yield (context.rank - step) % context.size, both
        if arriving is not None:
            both = arriving()
