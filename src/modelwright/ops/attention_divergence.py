"""Divergence of a student's self-attention from a teacher's: of distributions or of relations of tokens.

Of distributions, head by head (Wang et al. 2020, MiniLM, arXiv 2002.10957, section 3.1): a head's distribution over the
tokens that a token sees is the softmax of its scaled and, where a model has a soft cap, capped scores. Student and
teacher need equal numbers of query heads and the same window; widths of heads and numbers of key/value heads may
differ.

Of relations (MiniLMv2, Wang et al. 2021, arXiv 2012.15828, section 3.1): queries, keys or values of all heads of a
layer are concatenated and cut anew into R relation heads. The relations of a token are the softmax of its scaled
products with the tokens that it sees, so that numbers and widths of heads may differ.

Only causally ordered pairs of tokens of one document count.

Legend: B rows, T tokens, H query heads, K key/value heads, d head width, L tokens of one document, h some of the heads;
C student's channels, E teacher's channels, R relation heads.
"""

from collections.abc import Iterator
from typing import NamedTuple

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
    num_tokens = segments_BT.shape[1]
    begins_BT = torch.ones_like(segments_BT, dtype=torch.bool)
    begins_BT[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    for row in range(segments_BT.shape[0]):
        starts = begins_BT[row].nonzero()[:, 0].tolist()
        for start, end in zip(starts, [*starts[1:], num_tokens], strict=True):
            if segments_BT[row, start] >= 0:
                yield row, start, end


class QueriesAndKeys(NamedTuple):
    """Factors of a layer's scores: queries [B, T, H, d] and keys [B, T, K, d] with their positions; query head h reads
    key head h // (H / K). soft_cap: scores s become soft_cap * tanh(s / soft_cap); 0 leaves them.
    """

    q_BTHd: Tensor
    k_BTKd: Tensor
    soft_cap: float = 0.0

    def document(self, row: int, start: int, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Queries and keys of each head [H, L, d] of one document."""
        q_HLd, k_KLd = (x[row, start:end].to(dtype).transpose(0, 1) for x in self[:2])
        return q_HLd, k_KLd.repeat_interleave(len(q_HLd) // len(k_KLd), dim=0)


def attention_divergence(
    student: QueriesAndKeys, teacher: QueriesAndKeys, segments_BT: Tensor, *, window: int = 0
) -> Tensor:
    """Sum over tokens and heads of KL(teacher's distribution || student's), a scalar in FP32 at least (nats).

    segments_BT: the document of each token, -1 for padding, which does not count. window: tokens that a token sees,
    itself included; 0 is all earlier ones of its document. Differentiable once, in the student's queries and keys.
    Distributions exist for one document at a time.
    """
    return _AttentionDivergence.apply(student.q_BTHd, student.k_BTKd, student.soft_cap, teacher, segments_BT, window)  # type: ignore[return-value]


def attention_divergence_naive(
    student: QueriesAndKeys, teacher: QueriesAndKeys, segments_BT: Tensor, *, window: int = 0
) -> Tensor:
    """The definition, over whole rows with a mask: the reference for `attention_divergence`."""
    places_T = torch.arange(segments_BT.shape[1], device=segments_BT.device)
    distance_TT = places_T[:, None] - places_T
    seen_TT = (distance_TT >= 0) & (distance_TT < (window or len(places_T)))
    seen_B1TT = ((segments_BT[:, :, None] == segments_BT[:, None, :]) & seen_TT)[:, None]

    def log_probs(of: QueriesAndKeys) -> Tensor:
        k_BTHd = of.k_BTKd.repeat_interleave(of.q_BTHd.shape[2] // of.k_BTKd.shape[2], dim=2)
        scores_BHTT = torch.einsum("bthd,bshd->bhts", of.q_BTHd, k_BTHd) / of.q_BTHd.shape[-1] ** 0.5
        if of.soft_cap:
            scores_BHTT = of.soft_cap * (scores_BHTT / of.soft_cap).tanh()
        return scores_BHTT.masked_fill(~seen_B1TT, -torch.inf).log_softmax(dim=-1)

    teacher_BHTT, student_BHTT = log_probs(teacher), log_probs(student)
    gap_BHTT = torch.where(seen_B1TT, teacher_BHTT, 0.0) - torch.where(seen_B1TT, student_BHTT, 0.0)
    kl_BHT = (teacher_BHTT.exp() * gap_BHTT).sum(dim=-1)
    return (kl_BHT * (segments_BT >= 0)[:, None]).sum()


class _AttentionDivergence(torch.autograd.Function):
    """Computes the gradients together with the sum; backward only scales them."""

    @staticmethod
    def forward(ctx, q_BTHd, k_BTKd, soft_cap, teacher, segments_BT, window):
        wide = torch.promote_types(torch.promote_types(q_BTHd.dtype, k_BTKd.dtype), torch.float32)
        student = QueriesAndKeys(q_BTHd, k_BTKd, soft_cap)
        total = torch.zeros((), dtype=wide, device=q_BTHd.device)
        grad_q_BTHd, grad_k_BTKd = (torch.zeros_like(x, dtype=wide) for x in (q_BTHd, k_BTKd))
        for row, start, end in documents(segments_BT):
            own, its = (of.document(row, start, end, wide) for of in (student, teacher))
            # Heads whose distributions fit into memory together.
            at_once = max(1, LARGEST // (end - start) ** 2)
            parts = []
            for q_hLd, k_hLd, its_q_hLd, its_k_hLd in zip(*(x.split(at_once) for x in (*own, *its)), strict=True):
                log_teacher_hLL, _ = _log_probs(its_q_hLd, its_k_hLd, teacher.soft_cap, window)
                loss, grads = _of_document(q_hLd, k_hLd, log_teacher_hLL, soft_cap, window)
                total += loss
                parts.append(grads)
            grad_q_HLd, grad_k_HLd = (torch.cat(of) for of in zip(*parts, strict=True))
            grad_q_BTHd[row, start:end] = grad_q_HLd.transpose(0, 1)
            # A key head gets the gradients of all query heads that read it.
            grad_k_KLd = grad_k_HLd.unflatten(0, (k_BTKd.shape[2], -1)).sum(dim=1)
            grad_k_BTKd[row, start:end] = grad_k_KLd.transpose(0, 1)
        ctx.save_for_backward(grad_q_BTHd, grad_k_BTKd)
        ctx.dtypes = q_BTHd.dtype, k_BTKd.dtype
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        grads = [(saved * grad).to(dtype) for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return (*grads, None, None, None, None)


def _of_document(
    q_hLd: Tensor, k_hLd: Tensor, log_teacher_hLL: Tensor, soft_cap: float, window: int
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The loss of some heads in one document, and its gradients. A function, so that its matrices are freed at once."""
    # With S = Q K' / sqrt(d) and dS = (P_student - P_teacher) times the slope of the cap, dQ = dS K / sqrt(d) and
    # dK = dS' Q / sqrt(d).
    log_student_hLL, slope_hLL = _log_probs(q_hLd, k_hLd, soft_cap, window)
    teacher_hLL = log_teacher_hLL.exp()
    # Both are minus infinity where nothing is seen, and the teacher's probability is zero there.
    loss = (teacher_hLL * (log_teacher_hLL - log_student_hLL).nan_to_num_(nan=0.0)).sum()
    grad_hLL = log_student_hLL.exp_().sub_(teacher_hLL)
    if slope_hLL is not None:
        grad_hLL.mul_(slope_hLL)
    grad_hLL.mul_(q_hLd.shape[-1] ** -0.5)
    return loss, (grad_hLL @ k_hLd, grad_hLL.transpose(1, 2) @ q_hLd)


def _log_probs(q_hLd: Tensor, k_hLd: Tensor, soft_cap: float, window: int) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [h, L, L], and the slope of the cap at each score; None without a cap."""
    length = q_hLd.shape[1]
    seen_LL = torch.ones(length, length, dtype=torch.bool, device=q_hLd.device).tril()
    if window:
        seen_LL = seen_LL.triu(1 - window)
    scores_hLL = q_hLd @ k_hLd.transpose(1, 2) * q_hLd.shape[-1] ** -0.5
    slope_hLL = None
    if soft_cap:
        bent_hLL = (scores_hLL / soft_cap).tanh()
        scores_hLL, slope_hLL = soft_cap * bent_hLL, 1 - bent_hLL.square()
    return scores_hLL.masked_fill_(~seen_LL, -torch.inf).log_softmax(dim=-1), slope_hLL
