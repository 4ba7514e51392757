"""Divergence of the relations of tokens in a student's self-attention from a teacher's.

Relations (MiniLMv2, Wang et al. 2021, arXiv 2012.15828, section 3.1): queries, keys or values of all heads of a layer
are concatenated and cut anew into R relation heads. The relations of a token are the softmax of its scaled products
with the tokens that it sees, so that numbers and widths of heads may differ.

Only causally ordered pairs of tokens of one document count.

Legend: B rows, T tokens, L tokens of one document; C student's channels, E teacher's channels, R relation heads.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

LARGEST = 2**24
"""Elements that the relations of one document have at a time, of all relation heads that are computed together."""


def relation_loss(student_BTC: Tensor, teacher_BTE: Tensor, segments_BT: Tensor, *, num_heads: int) -> Tensor:
    """Sum over tokens and relation heads of KL(teacher's relations || student's), a scalar in FP32 at least (nats).

    segments_BT: the document of each token, -1 for padding, which does not count. num_heads: of relations; divides C
    and E. Differentiable once, in the student's channels. Relations exist for one document at a time.
    """
    return _RelationLoss.apply(student_BTC, teacher_BTE, segments_BT, num_heads)  # type: ignore[return-value]


def relation_loss_naive(student_BTC: Tensor, teacher_BTE: Tensor, segments_BT: Tensor, *, num_heads: int) -> Tensor:
    """The definition, over whole rows with a mask: the reference for `relation_loss`."""
    num_tokens = segments_BT.shape[1]
    causal_TT = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=segments_BT.device).tril()
    visible_B1TT = ((segments_BT[:, :, None] == segments_BT[:, None, :]) & causal_TT)[:, None]

    def log_relations(x_BTC: Tensor) -> Tensor:
        x_BRTc = x_BTC.unflatten(-1, (num_heads, -1)).transpose(1, 2)
        scores_BRTT = x_BRTc @ x_BRTc.transpose(2, 3) / x_BRTc.shape[-1] ** 0.5
        return scores_BRTT.masked_fill(~visible_B1TT, -torch.inf).log_softmax(dim=-1)

    teacher_BRTT, student_BRTT = log_relations(teacher_BTE), log_relations(student_BTC)
    gap_BRTT = torch.where(visible_B1TT, teacher_BRTT, 0.0) - torch.where(visible_B1TT, student_BRTT, 0.0)
    kl_BRT = (teacher_BRTT.exp() * gap_BRTT).sum(dim=-1)
    return (kl_BRT * (segments_BT >= 0)[:, None]).sum()


class _RelationLoss(torch.autograd.Function):
    """Computes the gradient together with the sum; backward only scales it."""

    @staticmethod
    def forward(ctx, student_BTC, teacher_BTE, segments_BT, num_heads):
        wide = torch.promote_types(student_BTC.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=student_BTC.device)
        grad_BTC = torch.zeros_like(student_BTC, dtype=wide)
        for row, start, end in documents(segments_BT):
            student_RLc, teacher_RLe = (
                x[row, start:end].to(wide).unflatten(-1, (num_heads, -1)).transpose(0, 1)
                for x in (student_BTC, teacher_BTE)
            )
            at_once = max(1, LARGEST // (end - start) ** 2)
            parts = []
            for own_rLc, its_rLe in zip(student_RLc.split(at_once), teacher_RLe.split(at_once), strict=True):
                loss, grad_rLc = _loss_of_document(own_rLc, its_rLe)
                total += loss
                parts.append(grad_rLc)
            grad_BTC[row, start:end] = torch.cat(parts).transpose(0, 1).flatten(1)
        ctx.save_for_backward(grad_BTC)
        ctx.dtype = student_BTC.dtype
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (grad_BTC,) = ctx.saved_tensors
        return (grad_BTC * grad).to(ctx.dtype), None, None, None


def _loss_of_document(student_RLc: Tensor, teacher_RLe: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of one document, and its gradient [R, L, c]. A function, so that its matrices are freed at once."""
    # With S = A A' / sqrt(c) and dS = P_student - P_teacher, dA = (dS + dS') A / sqrt(c).
    log_teacher_RLL, log_student_RLL = _log_relations(teacher_RLe), _log_relations(student_RLc)
    teacher_RLL = log_teacher_RLL.exp()
    # Both are minus infinity above the diagonal, where the teacher's probability is zero.
    gap_RLL = (log_teacher_RLL - log_student_RLL).nan_to_num_(nan=0.0)
    loss = (teacher_RLL * gap_RLL).sum()
    grad_RLL = log_student_RLL.exp_().sub_(teacher_RLL)
    return loss, (grad_RLL + grad_RLL.transpose(1, 2)) @ student_RLc / student_RLc.shape[-1] ** 0.5


def _log_relations(x_RLc: Tensor) -> Tensor:
    length = x_RLc.shape[1]
    later_LL = torch.ones(length, length, dtype=torch.bool, device=x_RLc.device).triu(1)
    scores_RLL = x_RLc @ x_RLc.transpose(1, 2) / x_RLc.shape[-1] ** 0.5
    return scores_RLL.masked_fill_(later_LL, -torch.inf).log_softmax(dim=-1)


def documents(segments_BT: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yields `(row, start, end)` of each document piece of packed rows, without padding."""
    for row, segments_T in enumerate(segments_BT):
        segments, lengths = torch.unique_consecutive(segments_T, return_counts=True)
        ends = lengths.cumsum(0)
        for segment, start, end in zip(segments.tolist(), (ends - lengths).tolist(), ends.tolist(), strict=True):
            if segment >= 0:
                yield row, start, end
