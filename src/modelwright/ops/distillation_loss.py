"""Divergence of a linear head's distribution from a teacher's, mixed with hard labels, without all logits in memory.

For each token, with temperature t and share a of the labels (Hinton et al. 2015, "Distilling the Knowledge in a Neural
Network"):

    (1 - a) * t^2 * KL(softmax(z_teacher / t) || softmax(z_student / t)) - a * log softmax(z_student)[label]

Logits of student and teacher exist for one chunk of tokens at a time, and the gradient is computed together with the
loss, as in `cross_entropy.py`. The teacher is a head over its hidden states, or the logarithms of its K largest
probabilities; the sum of all other probabilities is then one more outcome, so that the divergence stays a proper one:
it is a lower bound of the full divergence, and zero only where the student agrees on every stored probability.

Divergences of a student's distribution q from a teacher's p:

    forward_kl    KL(p || q) = sum p (log p - log q)
    reverse_kl    KL(q || p): the student drops modes that it cannot fit, where KL(p || q) makes it cover all of them
    jsd           b KL(p || m) + (1 - b) KL(q || m) with m = b p + (1 - b) q (Agarwal et al. 2024, "On-Policy
                  Distillation of Language Models", arXiv 2306.13649, equation 1)

With q the softmax of scores z, the gradient in z is q (g - sum q g) for g = dD/dq.

Legend: N flattened tokens, D student's width, E teacher's width, V vocabulary, U the rows of it on this rank, C tokens
of one chunk, P rows of one with padding (`padded_rows`), K stored tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from modelwright.ops.cross_entropy import CHUNK_TOKENS, LinearHead, add_product, kept_chunks, logits_of, soft_cap_logits
from modelwright.ops.matmul import padded_rows, product

Gather = Callable[[Tensor], Tensor]
"""Stacks the tensors of the ranks that share the vocabulary, [C] to [R, C]."""
DivergenceName = Literal["forward_kl", "reverse_kl", "jsd"]


class Divergence(NamedTuple):
    """The divergence of each token [C], and its gradient in the student's scores on this rank [C, U]."""

    values_C: Tensor
    grad_CU: Tensor


@dataclass(frozen=True, kw_only=True)
class DivergenceKind:
    """The divergence that is learned. beta: b of `jsd`, in (0, 1)."""

    name: DivergenceName = "forward_kl"
    beta: float = 0.5

    def of(self, log_teacher_CU: Tensor, log_student_CU: Tensor, gather: Gather) -> Divergence:
        """The divergence, from the parts of two distributions on this rank. Overwrites the student's."""
        match self.name:
            case "forward_kl":
                teacher_CU = log_teacher_CU.exp()
                own_C = (teacher_CU * (log_teacher_CU - log_student_CU)).sum(dim=-1)
                return Divergence(sum_over_ranks(own_C, gather), log_student_CU.exp_().sub_(teacher_CU))
            case "reverse_kl":
                # The gradient is q (log q - log p - D).
                gap_CU = log_student_CU - log_teacher_CU
                student_CU = log_student_CU.exp_()
                values_C = sum_over_ranks((student_CU * gap_CU).sum(dim=-1), gather)
                return Divergence(values_C, gap_CU.sub_(values_C[:, None]).mul_(student_CU))
            case "jsd":
                # The gradient is (1 - b) q (log(q / m) - KL(q || m)).
                beta = self.beta
                log_mixed_CU = torch.logaddexp(log_teacher_CU + math.log(beta), log_student_CU + math.log1p(-beta))
                of_teacher_C = (log_teacher_CU.exp() * (log_teacher_CU - log_mixed_CU)).sum(dim=-1)
                gap_CU = log_student_CU - log_mixed_CU
                student_CU = log_student_CU.exp_()
                of_student_C = sum_over_ranks((student_CU * gap_CU).sum(dim=-1), gather)
                values_C = beta * sum_over_ranks(of_teacher_C, gather) + (1 - beta) * of_student_C
                return Divergence(values_C, gap_CU.sub_(of_student_C[:, None]).mul_(student_CU).mul_(1 - beta))

    def naive(self, teacher_NV: Tensor, student_NV: Tensor) -> Tensor:
        """The definition, by probabilities of the whole vocabulary, [N]: the reference for `of`."""

        def kl(one_NV: Tensor, other_NV: Tensor) -> Tensor:
            return (one_NV * (one_NV.log() - other_NV.log())).sum(dim=-1)

        beta = self.beta
        match self.name:
            case "forward_kl":
                return kl(teacher_NV, student_NV)
            case "reverse_kl":
                return kl(student_NV, teacher_NV)
            case "jsd":
                mixed_NV = beta * teacher_NV + (1 - beta) * student_NV
                return beta * kl(teacher_NV, mixed_NV) + (1 - beta) * kl(student_NV, mixed_NV)


def sum_over_ranks(values_C: Tensor, gather: Gather) -> Tensor:
    return gather(values_C).sum(dim=0)


FORWARD = DivergenceKind()


class Teacher(Protocol):
    """The distribution that is learned, for all N tokens."""

    def divergence(self, kept_C: slice | Tensor, scores_CU: Tensor, temperature: float, head: LinearHead) -> Divergence:
        """The divergence of the student from the teacher at the tokens `kept_C`. scores_CU: the student's logits over
        the temperature. head: the student's, which knows this rank's rows of the vocabulary.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class TeacherHead:
    """A teacher's hidden states [N, E] and whole output projection [V, E]. soft_cap: as in `LinearHead`."""

    hidden_NE: Tensor
    weight_VE: Tensor
    soft_cap: float = 0.0
    kind: DivergenceKind = FORWARD

    def divergence(self, kept_C: slice | Tensor, scores_CU: Tensor, temperature: float, head: LinearHead) -> Divergence:
        """See `Teacher`."""
        rows = slice(head.first_row, head.first_row + scores_CU.shape[1])
        dtype = torch.promote_types(self.hidden_NE.dtype, self.weight_VE.dtype)
        hidden_PE, weight = padded_rows(self.hidden_NE[kept_C], dtype), self.weight_VE[rows].to(dtype)
        capped_CU = logits_of(hidden_PE, weight, len(scores_CU), self.soft_cap, scores_CU.dtype)
        log_teacher_CU = log_softmax_over_ranks(capped_CU / temperature, head.gather)
        return self.kind.of(log_teacher_CU, log_softmax_over_ranks(scores_CU, head.gather), head.gather)


@dataclass(frozen=True, kw_only=True)
class TopTokens:
    """The K likeliest tokens of a teacher at the temperature of the loss: their log-probabilities [N, K] and their
    numbers [N, K], int64. The divergence is KL(teacher || student).
    """

    log_probs_NK: Tensor
    tokens_NK: Tensor

    def divergence(self, kept_C: slice | Tensor, scores_CU: Tensor, temperature: float, head: LinearHead) -> Divergence:
        """See `Teacher`. With z the student's scores and q its probabilities, the gradient in z is q - p for stored
        tokens and q * (1 - p_rest / q_rest) for the others.
        """
        log_teacher_CK = self.log_probs_NK[kept_C].to(scores_CU.dtype)
        teacher_CK = log_teacher_CK.exp()
        rest_C = (1.0 - teacher_CK.sum(dim=-1)).clamp_min_(0.0)
        places_CK = self.tokens_NK[kept_C] - head.first_row
        here_CK = (places_CK >= 0) & (places_CK < scores_CU.shape[1])
        places_CK = places_CK * here_CK
        log_student_CU = log_softmax_over_ranks(scores_CU, head.gather)
        # A stored token on another rank gathers row 0 here, and counts 0.
        chosen_CK = log_student_CU.gather(1, places_CK)
        own_C = (teacher_CK * here_CK * (log_teacher_CK - chosen_CK)).sum(dim=-1)
        is_stored_CU = torch.zeros_like(scores_CU).scatter_add_(1, places_CK, here_CK.to(scores_CU.dtype)) > 0
        log_others_CU = log_student_CU.masked_fill(is_stored_CU, -torch.inf)
        log_rest_C = log_sum_over_ranks(log_others_CU, head.gather)
        # K may be the whole vocabulary: no other outcome is left, and its logarithm is minus infinity.
        has_rest_C = (rest_C > 0) & log_rest_C.isfinite()
        log_rest_C = torch.where(has_rest_C, log_rest_C, 0.0)
        of_rest_C = torch.where(has_rest_C, torch.special.xlogy(rest_C, rest_C) - rest_C * log_rest_C, 0.0)
        ratio_C1 = torch.where(has_rest_C, rest_C * (-log_rest_C).exp(), 0.0)[:, None]
        grad_CU = log_student_CU.exp_()
        grad_CU.sub_(grad_CU * ratio_C1 * ~is_stored_CU).scatter_add_(1, places_CK, -teacher_CK * here_CK)
        return Divergence(sum_over_ranks(own_C, head.gather) + of_rest_C, grad_CU)


def log_sum_over_ranks(scores_CU: Tensor, gather: Gather) -> Tensor:
    """Log-sum-exp over the whole vocabulary [C]; every rank merges the parts in the same order."""
    return gather(scores_CU.logsumexp(dim=-1)).logsumexp(dim=0)


def log_softmax_over_ranks(scores_CU: Tensor, gather: Gather) -> Tensor:
    """This rank's part of the log-probabilities [C, U]."""
    return scores_CU - log_sum_over_ranks(scores_CU, gather)[:, None]


@dataclass(frozen=True, kw_only=True)
class DistillationTerms:
    """Sums over the tokens that count. loss: differentiable once, in the student's hidden states and weight; divergence
    and label_loss: the parts that it mixes, without gradient and without the factor t^2.
    """

    loss: Tensor
    divergence: Tensor
    label_loss: Tensor


def distillation_loss(
    hidden_ND: Tensor,
    head: LinearHead,
    teacher: Teacher,
    labels_N: Tensor,
    *,
    temperature: float,
    label_share: float,
    chunk_tokens: int = CHUNK_TOKENS,
    ignore_index: int = -100,
) -> DistillationTerms:
    """The mixture of the module's head, summed over the tokens whose label is not `ignore_index`; the others cost
    nothing. In FP32 at least, nats. Peak memory above the gradients: a few times chunk_tokens * U elements.
    """
    settings = _Settings(head, teacher, temperature, label_share, chunk_tokens, ignore_index)
    function: Any = _DistillationLoss
    loss, divergence, label_loss = function.apply(head.enter(hidden_ND), head.weight_UD, labels_N, settings)
    return DistillationTerms(loss=loss, divergence=divergence, label_loss=label_loss)


def distillation_loss_naive(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    teacher_NV: Tensor,
    labels_N: Tensor,
    *,
    temperature: float,
    label_share: float,
    soft_cap: float = 0.0,
    kind: DivergenceKind = FORWARD,
    top_k: int = 0,
    ignore_index: int = -100,
) -> Tensor:
    """The definition, with all logits: the reference for `distillation_loss`. teacher_NV: the teacher's logits. top_k:
    number of stored tokens; 0 stores all.
    """
    products_NV = F.linear(hidden_ND, weight_VD)
    logits_NV = soft_cap_logits(products_NV, soft_cap) if soft_cap else products_NV
    student_NV = (logits_NV / temperature).softmax(dim=-1)
    teacher_NV = (teacher_NV / temperature).softmax(dim=-1)
    if 0 < top_k < len(weight_VD):
        teacher_NK, tokens_NK = teacher_NV.topk(top_k, dim=-1)
        student_NK = student_NV.gather(1, tokens_NK)
        stored_NV = torch.zeros_like(teacher_NV).scatter(1, tokens_NK, 1.0)
        teacher_NV = torch.cat([teacher_NK, (teacher_NV * (1 - stored_NV)).sum(-1, keepdim=True)], dim=-1)
        student_NV = torch.cat([student_NK, (student_NV * (1 - stored_NV)).sum(-1, keepdim=True)], dim=-1)
    counts_N = labels_N != ignore_index
    divergence = (kind.naive(teacher_NV, student_NV) * counts_N).sum()
    nll = F.cross_entropy(logits_NV, labels_N, ignore_index=ignore_index, reduction="sum")
    return (1 - label_share) * temperature**2 * divergence + label_share * nll


@dataclass(frozen=True)
class _Settings:
    head: LinearHead
    teacher: Teacher
    temperature: float
    label_share: float
    chunk_tokens: int
    ignore_index: int


@dataclass(kw_only=True)
class _Sums:
    """Losses and gradients, summed over the chunks so far."""

    loss: Tensor
    divergence: Tensor
    label_loss: Tensor
    grad_hidden_ND: Tensor | None
    grad_weight_UD: Tensor | None
    compute: torch.dtype


class _DistillationLoss(torch.autograd.Function):
    """Computes the gradients together with the sums; backward only scales them."""

    @staticmethod
    def forward(ctx, hidden_ND, weight_UD, labels_N, settings):
        compute = settings.head.compute or torch.promote_types(hidden_ND.dtype, weight_UD.dtype)
        wide = torch.promote_types(compute, torch.float32)
        nothing = torch.zeros((), dtype=wide, device=hidden_ND.device)
        sums = _Sums(
            loss=nothing,
            divergence=nothing.clone(),
            label_loss=nothing.clone(),
            grad_hidden_ND=torch.zeros_like(hidden_ND) if ctx.needs_input_grad[0] else None,
            grad_weight_UD=torch.zeros_like(weight_UD, dtype=wide) if ctx.needs_input_grad[1] else None,
            compute=compute,
        )
        weight = weight_UD.to(compute)
        for kept_C in kept_chunks(labels_N, settings.ignore_index, settings.chunk_tokens):
            _add_chunk(sums, kept_C, padded_rows(hidden_ND[kept_C], compute), weight, labels_N[kept_C], settings)
        ctx.save_for_backward(sums.grad_hidden_ND, sums.grad_weight_UD)
        ctx.dtypes = hidden_ND.dtype, weight_UD.dtype
        ctx.mark_non_differentiable(sums.divergence, sums.label_loss)
        return sums.loss, sums.divergence, sums.label_loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, *_unused):
        grads = [
            None if saved is None else (saved.to(grad.dtype) * grad).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*grads, None, None)


def _add_chunk(
    sums: _Sums, kept_C: slice | Tensor, hidden_PD: Tensor, weight: Tensor, labels_C: Tensor, settings: _Settings
) -> None:
    """Adds one chunk's losses and gradients. A function, so that its logits are freed before the next chunk's."""
    head, temperature, share = settings.head, settings.temperature, settings.label_share
    logits_CU = logits_of(hidden_PD, weight, len(labels_C), head.soft_cap, sums.loss.dtype)
    soft = settings.teacher.divergence(kept_C, logits_CU / temperature, temperature, head)
    # In the logits: t^2 times the gradient in the scores, over t.
    grad_CU = soft.grad_CU.mul_((1 - share) * temperature)
    places_C1 = labels_C[:, None] - head.first_row
    here_C1 = (places_C1 >= 0) & (places_C1 < logits_CU.shape[1])
    places_C1 = places_C1 * here_C1
    log_probs_CU = log_softmax_over_ranks(logits_CU, head.gather)
    nll_C = -sum_over_ranks((log_probs_CU.gather(1, places_C1) * here_C1)[:, 0], head.gather)
    hard_grad_CU = log_probs_CU.exp_().scatter_add_(1, places_C1, -here_C1.to(log_probs_CU.dtype))
    grad_CU.add_(hard_grad_CU, alpha=share)
    if head.soft_cap:
        grad_CU.mul_(1 - (logits_CU / head.soft_cap).square())
    divergence, nll = soft.values_C.sum(), nll_C.sum()
    sums.divergence += divergence
    sums.label_loss += nll
    sums.loss += (1 - share) * temperature**2 * divergence + share * nll
    grad_PU = padded_rows(grad_CU, sums.compute)
    if sums.grad_hidden_ND is not None:
        sums.grad_hidden_ND[kept_C] = product(grad_PU, weight)[: len(labels_C)].to(sums.grad_hidden_ND.dtype)
    if sums.grad_weight_UD is not None:
        add_product(sums.grad_weight_UD, grad_PU.T, hidden_PD)
