"""Cross-entropy of a linear head without materializing all logits.

A vocabulary of 12,000 makes the logits the largest tensor of a small model's step. Here they exist for one chunk of
tokens at a time, and both gradients are computed while the chunk is in the cache, so nothing is computed twice.
Tokens whose label is ignored cost nothing. The log-probability of each token is in `token_log_probs.py`.

Legend: N flattened tokens, D model width, V vocabulary, C tokens of one chunk.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from modelwright.ops.lowp_emulation import product

CHUNK_TOKENS = 512

LossOfLogits = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""`(logits_CV, labels_C) -> (summed loss, its gradient in the logits)`, in the format of the logits."""


def softmax_loss(logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    """Summed loss and its gradient softmax - one_hot; the logits are overwritten."""
    largest_C1 = logits_CV.amax(dim=-1, keepdim=True)
    chosen_C1 = logits_CV.gather(1, labels_C[:, None])
    exponentials_CV = logits_CV.sub_(largest_C1).exp_()
    denominator_C1 = exponentials_CV.sum(dim=-1, keepdim=True)
    loss = (largest_C1 + denominator_C1.log() - chosen_C1).sum()
    grad_CV = exponentials_CV.div_(denominator_C1)
    grad_CV.scatter_add_(1, labels_C[:, None], -torch.ones_like(chosen_C1))
    return loss, grad_CV


def soft_cap_logits(products: Tensor, cap: float) -> Tensor:
    """cap * tanh(products / cap): the final soft cap of Gemma 2."""
    return cap * (products / cap).tanh()


def soft_capped(loss_of_logits: LossOfLogits, cap: float) -> LossOfLogits:
    """Wraps `loss_of_logits` to take soft-capped products, with the gradient in the products."""

    def loss_of_products(products_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
        share_CV = (products_CV / cap).tanh()
        loss, grad_CV = loss_of_logits(cap * share_CV, labels_C)
        return loss, grad_CV * (1 - share_CV.square())

    return loss_of_products


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    ignore_index: int = -100,
    loss_of_logits: LossOfLogits = softmax_loss,
    compute: torch.dtype | None = None,
    in_fp32: bool = True,
) -> Tensor:
    """Sum over tokens of -log softmax(hidden @ weight.T)[label], a scalar in FP32 (nats).

    hidden_ND, weight_VD: floating point; labels_N: int64, `ignore_index` for tokens that do not count. The products run
    in `compute`, by default the wider format of the two; the softmax in FP32, without `in_fp32` in the products'
    format; all sums over chunks in FP32. Differentiable once, in hidden and weight. Peak memory above the gradients: a
    few times chunk_tokens * V elements. loss_of_logits: another softmax, such as one over a vocabulary of which this
    rank holds only some rows.
    """
    compute = compute or torch.promote_types(hidden_ND.dtype, weight_VD.dtype)
    return _LinearCrossEntropy.apply(  # type: ignore[return-value]
        hidden_ND, weight_VD, labels_N, chunk_tokens, ignore_index, compute, in_fp32, loss_of_logits
    )


def linear_cross_entropy_naive(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, *, ignore_index: int = -100
) -> Tensor:
    """The definition, with all logits: the reference for `linear_cross_entropy`."""
    logits_NV = F.linear(hidden_ND, weight_VD).float()
    return F.cross_entropy(logits_NV, labels_N, ignore_index=ignore_index, reduction="sum")


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients together with the sum; backward only scales them."""

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, chunk_tokens, ignore_index, compute, in_fp32, loss_of_logits):
        # The gradients are made here; backward only multiplies them with the incoming gradient.
        weight = weight_VD.to(compute)
        grad_hidden_ND = torch.zeros_like(hidden_ND) if ctx.needs_input_grad[0] else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        scores_in = torch.float32 if in_fp32 else compute
        for kept_C in kept_chunks(labels_N, ignore_index, chunk_tokens):
            hidden_CD = hidden_ND[kept_C].to(compute)
            chunk_loss, grad_logits_CV = loss_of_logits(product(hidden_CD, weight.T).to(scores_in), labels_N[kept_C])
            loss += chunk_loss
            grad_logits_CV = grad_logits_CV.to(compute)
            if grad_hidden_ND is not None:
                grad_hidden_ND[kept_C] = product(grad_logits_CV, weight).to(grad_hidden_ND.dtype)
            if grad_weight_VD is not None:
                add_product(grad_weight_VD, grad_logits_CV.T, hidden_CD)
            # Or the next chunk's logits would exist at the same time.
            del grad_logits_CV
        ctx.save_for_backward(grad_hidden_ND, grad_weight_VD)
        ctx.weight_dtype, ctx.chunk_tokens = weight_VD.dtype, chunk_tokens
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss):
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        if grad_hidden_ND is not None:
            if grad_hidden_ND.dtype in (torch.float32, torch.float64):
                grad_hidden_ND = grad_hidden_ND * grad_loss
            else:
                # In FP32, rounded once: a factor rounded to a narrow format would bias all elements alike.
                parts, grad_hidden_ND = grad_hidden_ND.split(ctx.chunk_tokens), torch.empty_like(grad_hidden_ND)
                for scaled, part in zip(grad_hidden_ND.split(ctx.chunk_tokens), parts, strict=True):
                    scaled.copy_(part.float() * grad_loss)
        if grad_weight_VD is not None:
            grad_weight_VD = (grad_weight_VD * grad_loss).to(ctx.weight_dtype)
        return grad_hidden_ND, grad_weight_VD, None, None, None, None, None, None


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to `total`, which is in FP32 for factors of any format."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += product(left, right)


def kept_chunks(labels_N: Tensor, ignore_index: int, chunk_tokens: int) -> Iterator[slice | Tensor]:
    """Yields the indices of the tokens that count, `chunk_tokens` at a time; slices (no copy) if all of them do."""
    kept = labels_N != ignore_index
    if bool(kept.all()):
        for start in range(0, labels_N.numel(), chunk_tokens):
            yield slice(start, start + chunk_tokens)
    else:
        yield from kept.nonzero()[:, 0].split(chunk_tokens)
