"""Divergences of a student's distribution q from a teacher's p, with their gradients in the student's scores.

    forward_kl    KL(p || q) = sum p (log p - log q)
    reverse_kl    KL(q || p): the student drops modes that it cannot fit, where KL(p || q) makes it cover all of them
    jsd           b KL(p || m) + (1 - b) KL(q || m) with m = b p + (1 - b) q (Agarwal et al. 2024, "On-Policy
                  Distillation of Language Models", arXiv 2306.13649, equation 1)

With q the softmax of scores z, the gradient in z is q (g - sum q g) for g = dD/dq.

Legend: C tokens, U the rows of the vocabulary on this rank.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

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
