"""Muon: against its definition one matrix at a time, against PyTorch's own in BF16, and what it makes of a matrix."""

import math

import pytest
import torch
from torch import Tensor

from modelwright.ops.matmul import is_emulated
from modelwright.train.optim import build
from modelwright.train.optim.build import COEFFICIENTS, Muon, orthogonal

SHAPES = [(24, 24), (24, 40), (40, 24), (24, 40), (1, 8)]
CPU = torch.device("cpu")
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5} if is_emulated(torch.bfloat16, CPU) else {"rtol": 0.1, "atol": 0.02}


def matrices() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(step + 1)
    return [torch.randn(shape, generator=draw) for shape in SHAPES]


def orthogonal_naive(matrix: Tensor) -> Tensor:
    """In FP64, one matrix, without turning tall ones."""
    a, b, c = COEFFICIENTS
    found = matrix.double() / matrix.double().norm()
    for _ in range(5):
        gram = found @ found.T
        found = a * found + (b * gram + c * gram @ gram) @ found
    return found


def test_steps_against_the_definition():
    ours, twins = matrices(), [matrix.detach().double() for matrix in matrices()]
    optimizer = Muon(ours, lr=0.02, weight_decay=0.1)
    momenta = [torch.zeros_like(twin) for twin in twins]
    for step in range(3):
        for matrix, twin, momentum, gradient in zip(ours, twins, momenta, gradients(step), strict=True):
            matrix.grad = gradient
            momentum.mul_(0.95).add_(gradient, alpha=0.05)
            move = orthogonal_naive(gradient * 0.05 + momentum * 0.95)
            twin.mul_(1 - 0.02 * 0.1).sub_(move, alpha=0.02 * 0.2 * math.sqrt(max(twin.shape)))
        optimizer.step()
    for matrix, twin in zip(ours, twins, strict=True):
        torch.testing.assert_close(matrix.detach().double(), twin, **TOLERANCE)


def test_moves_are_those_of_pytorch_but_for_its_rounding():
    ours, theirs = matrices(), matrices()
    optimizers = [
        Muon(ours, lr=0.02, weight_decay=0.1),
        torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    ]
    before = [matrix.detach().clone() for matrix in ours]
    for parameters, optimizer in zip((ours, theirs), optimizers, strict=True):
        for matrix, gradient in zip(parameters, gradients(0), strict=True):
            matrix.grad = gradient
        optimizer.step()
    for own, their, start in zip(ours, theirs, before, strict=True):
        moved = [(matrix.detach() - start).flatten() for matrix in (own, their)]
        assert torch.cosine_similarity(*moved, dim=0) > 0.999
        assert moved[0].norm() == pytest.approx(float(moved[1].norm()), rel=0.02)
    states = [optimizer.state[parameters[1]] for parameters, optimizer in zip((ours, theirs), optimizers, strict=True)]
    assert states[0].keys() == states[1].keys()
    torch.testing.assert_close(states[0]["momentum_buffer"], states[1]["momentum_buffer"])


def test_singular_values_come_near_one_and_directions_stay():
    draw = torch.Generator().manual_seed(0)
    for shape in ((3, 16, 16), (2, 16, 48), (2, 48, 16)):
        given = torch.randn(shape, generator=draw)
        found = orthogonal(given).float()
        assert found.shape == given.shape
        values = torch.linalg.svdvals(found)
        assert values.max() < 1.3
        assert values.median() > 0.6
        u, _, vh = torch.linalg.svd(given, full_matrices=False)
        along = (u.mT @ found @ vh.mT).diagonal(dim1=1, dim2=2)
        torch.testing.assert_close(along.sort(descending=True).values, values, rtol=0.05, atol=0.05)


def test_matrices_go_together_as_far_as_memory_lets_them(monkeypatch):
    seen = []

    def watched(stack: Tensor, *, eps: float) -> Tensor:
        seen.append(tuple(stack.shape))
        return stack

    monkeypatch.setattr(build, "orthogonal", watched)
    parameters = [torch.nn.Parameter(torch.zeros(4, 4)) for _ in range(5)] + [torch.nn.Parameter(torch.zeros(2, 4))]
    for parameter in parameters[1:]:
        parameter.grad = torch.ones_like(parameter)
    optimizer = Muon(parameters, lr=1.0, weight_decay=0.0)
    optimizer.step()
    assert seen == [(4, 4, 4), (1, 2, 4)]
    assert not parameters[0].any()  # it had no gradient
    monkeypatch.setattr(build, "TOGETHER", 40)
    seen.clear()
    optimizer.step()
    assert seen == [(2, 4, 4), (2, 4, 4), (1, 2, 4)]
