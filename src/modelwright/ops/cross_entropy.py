"""Cross-entropy, log-probabilities and entropies of a linear head without materializing all logits.

A vocabulary of 12,000 makes the logits the largest tensor of a small model's step. Here they exist for one chunk of
tokens at a time. For the sum of the cross-entropy both gradients are computed while the chunk is in the cache, so
nothing is computed twice. Preference and policy-gradient losses need each token's value; the factor of its gradient is
known only in backward, which therefore computes each chunk of logits once more. Tokens whose label is ignored cost
nothing.

Legend: N flattened tokens, D model width, V vocabulary, U the rows of it on this rank, C tokens of one chunk, P rows of
one with padding (`padded_rows`), R ranks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modelwright.ops.matmul import padded_rows, product

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
            labels_C, hidden_PD = labels_N[kept_C], padded_rows(hidden_ND[kept_C], compute)
            count = len(labels_C)
            chunk_loss, grad = loss_of_logits(product(hidden_PD, weight.T)[:count].to(scores_in), labels_C)
            loss += chunk_loss
            grad = padded_rows(grad, compute)
            if grad_hidden_ND is not None:
                grad_hidden_ND[kept_C] = product(grad, weight)[:count].to(grad_hidden_ND.dtype)
            if grad_weight_VD is not None:
                add_product(grad_weight_VD, grad.T, hidden_PD)
            # Or the next chunk's logits would exist at the same time.
            del grad
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


@dataclass(frozen=True, kw_only=True)
class LinearHead:
    """The output projection, or this rank's rows of it."""

    weight_UD: Tensor
    soft_cap: float = 0.0
    """Logits z become soft_cap * tanh(z / soft_cap); 0 leaves them."""
    compute: torch.dtype | None = None
    """Format of the products; None for the wider one of the factors. The softmax is in FP32 at least."""
    first_row: int = 0
    """The token of the first row."""
    enter: Callable[[Tensor], Tensor] = lambda hidden_ND: hidden_ND
    """Returns hidden states unchanged; backward sums their gradients over the ranks that share the vocabulary."""
    gather: Callable[[Tensor], Tensor] = lambda statistics_SC: statistics_SC.unsqueeze(0)
    """Function that stacks the tensors of these ranks, [S, C] to [R, S, C]."""


def token_log_probs(
    hidden_ND: Tensor, head: LinearHead, labels_N: Tensor, *, chunk_tokens: int = CHUNK_TOKENS, ignore_index: int = -100
) -> Tensor:
    """log p(label) of every token in nats, [N], in FP32 at least; 0 where the label is `ignore_index`, which costs
    nothing.

    hidden_ND: floating point; labels_N: int64; chunk_tokens: number of tokens whose logits exist at a time.
    Differentiable once, in hidden states and weight. Peak memory above the gradients: a few times chunk_tokens * U
    elements.
    """
    function: Any = _TokenLogProbs
    settings = (head, labels_N, chunk_tokens, ignore_index, False)
    return function.apply(head.enter(hidden_ND), head.weight_UD, *settings)[0]


def token_log_probs_and_entropies(
    hidden_ND: Tensor, head: LinearHead, labels_N: Tensor, *, chunk_tokens: int = CHUNK_TOKENS, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """`token_log_probs` and the entropy at every token in nats, [N] each, 0 where ignored; both differentiable."""
    function: Any = _TokenLogProbs
    settings = (head, labels_N, chunk_tokens, ignore_index, True)
    return function.apply(head.enter(hidden_ND), head.weight_UD, *settings)


def token_log_probs_naive(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, *, ignore_index: int = -100, soft_cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The definition, with all logits: the reference for `token_log_probs_and_entropies`."""
    logits_NV = F.linear(hidden_ND, weight_VD)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    all_NV = (soft_cap_logits(logits_NV, soft_cap) if soft_cap else logits_NV).log_softmax(dim=-1)
    counts_N = labels_N != ignore_index
    log_probs_N = all_NV.gather(1, (labels_N * counts_N)[:, None])[:, 0]
    return log_probs_N * counts_N, -(all_NV.exp() * all_NV).sum(dim=-1) * counts_N


class _TokenLogProbs(torch.autograd.Function):
    """Returns log-probabilities and entropies; the latter are zeros unless asked for."""

    @staticmethod
    def forward(ctx, hidden_ND, weight_UD, head, labels_N, chunk_tokens, ignore_index, with_entropies):
        ctx.compute = head.compute or torch.promote_types(hidden_ND.dtype, weight_UD.dtype)
        ctx.scores_in = torch.promote_types(ctx.compute, torch.float32)
        weight = weight_UD.to(ctx.compute)
        log_probs_N, normalizers_N, entropies_N = (
            torch.zeros(labels_N.shape, dtype=ctx.scores_in, device=hidden_ND.device) for _ in range(3)
        )
        for kept_C in kept_chunks(labels_N, ignore_index, chunk_tokens):
            labels_C, hidden_PD = labels_N[kept_C], padded_rows(hidden_ND[kept_C], ctx.compute)
            logits_CU = logits_of(hidden_PD, weight, len(labels_C), head.soft_cap, ctx.scores_in)
            statistics = _statistics(logits_CU, labels_C, head, with_entropies=with_entropies)
            log_probs_N[kept_C], normalizers_N[kept_C], entropies_N[kept_C] = statistics
            # Or the next chunk's logits would exist at the same time.
            del logits_CU
        ctx.save_for_backward(hidden_ND, weight_UD, labels_N, normalizers_N, entropies_N)
        ctx.soft_cap, ctx.first_row, ctx.with_entropies = head.soft_cap, head.first_row, with_entropies
        ctx.chunk_tokens, ctx.ignore_index = chunk_tokens, ignore_index
        return log_probs_N, entropies_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_N, grad_entropies_N):
        hidden_ND, weight_UD, labels_N, normalizers_N, entropies_N = ctx.saved_tensors
        weight = weight_UD.to(ctx.compute)
        grad_hidden_ND = torch.zeros_like(hidden_ND) if ctx.needs_input_grad[0] else None
        sums_in = torch.promote_types(weight_UD.dtype, torch.float32)
        grad_weight_UD = torch.zeros_like(weight_UD, dtype=sums_in) if ctx.needs_input_grad[1] else None
        for kept_C in kept_chunks(labels_N, ctx.ignore_index, ctx.chunk_tokens):
            labels_C, hidden_PD = labels_N[kept_C], padded_rows(hidden_ND[kept_C], ctx.compute)
            count = len(labels_C)
            logits_CU = logits_of(hidden_PD, weight, count, ctx.soft_cap, ctx.scores_in)
            slopes_CU = 1 - (logits_CU / ctx.soft_cap).square() if ctx.soft_cap else None
            places_C1, here_C1 = _places(labels_C, ctx.first_row, logits_CU.shape[1])
            # g (one_hot - p) for log-probabilities, -g p (log p + H) for entropies H.
            grad_C1 = grad_N[kept_C][:, None]
            log_probs_CU = logits_CU.sub_(normalizers_N[kept_C][:, None])
            grad_CU = log_probs_CU.exp()
            if ctx.with_entropies:
                surprise_CU = log_probs_CU.add_(entropies_N[kept_C][:, None]).mul_(grad_entropies_N[kept_C][:, None])
                grad_CU.mul_(-(surprise_CU.add_(grad_C1)))
                del surprise_CU
            else:
                grad_CU.mul_(-grad_C1)
            grad_CU.scatter_add_(1, places_C1, here_C1 * grad_C1)
            # All of these are the logits' memory.
            del logits_CU, log_probs_CU
            grad_PU = padded_rows(grad_CU if slopes_CU is None else grad_CU.mul_(slopes_CU), ctx.compute)
            del grad_CU
            if grad_hidden_ND is not None:
                grad_hidden_ND[kept_C] = product(grad_PU, weight)[:count].to(grad_hidden_ND.dtype)
            if grad_weight_UD is not None:
                add_product(grad_weight_UD, grad_PU.T, hidden_PD)
        if grad_weight_UD is not None:
            grad_weight_UD = grad_weight_UD.to(weight_UD.dtype)
        return grad_hidden_ND, grad_weight_UD, None, None, None, None, None


def logits_of(hidden_PD: Tensor, weight_UD: Tensor, num_tokens: int, soft_cap: float, scores_in: torch.dtype) -> Tensor:
    """The logits of a chunk's tokens without its padding, [C, U] in the format `scores_in`."""
    products_CU = product(hidden_PD, weight_UD.T)[:num_tokens].to(scores_in)
    return soft_cap_logits(products_CU, soft_cap) if soft_cap else products_CU


def _places(labels_C: Tensor, first_row: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """The row of each label on this rank [C, 1], 0 if it is on another; and whether it is here [C, 1]."""
    places_C1 = labels_C[:, None] - first_row
    here_C1 = (places_C1 >= 0) & (places_C1 < num_rows)
    return places_C1 * here_C1, here_C1


def _statistics(
    logits_CU: Tensor, labels_C: Tensor, head: LinearHead, *, with_entropies: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """log p(label), the logarithm of the softmax's denominator, and the entropy (or zeros), [C] each."""
    places_C1, here_C1 = _places(labels_C, head.first_row, logits_CU.shape[1])
    chosen_C = (logits_CU.gather(1, places_C1) * here_C1)[:, 0]
    largest_C = logits_CU.amax(dim=-1)
    shifted_CU = logits_CU - largest_C[:, None]
    exponentials_CU = shifted_CU.exp()
    sums_C, weighted_C = exponentials_CU.sum(dim=-1), torch.zeros_like(chosen_C)
    if with_entropies:
        weighted_C = exponentials_CU.mul_(shifted_CU).sum(dim=-1)
    # Every rank merges the parts of all ranks in the same order, so that all get the same bits.
    parts_R4C = head.gather(torch.stack([largest_C, sums_C, chosen_C, weighted_C]))
    largest_RC, sums_RC, chosen_RC, weighted_RC = parts_R4C.unbind(1)
    # Everything is relative to the largest logit, or the entropy of a peaked distribution would be lost to rounding.
    most_C = largest_RC.amax(dim=0)
    below_RC = largest_RC - most_C
    log_sum_C = (below_RC + sums_RC.log()).logsumexp(dim=0)
    log_probs_C, normalizer_C = chosen_RC.sum(dim=0) - most_C - log_sum_C, most_C + log_sum_C
    if not with_entropies:
        return log_probs_C, normalizer_C, torch.zeros_like(log_probs_C)
    mean_C = ((weighted_RC + below_RC * sums_RC) * (below_RC - log_sum_C).exp()).sum(dim=0)
    return log_probs_C, normalizer_C, log_sum_C - mean_C
