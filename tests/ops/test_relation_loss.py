"""Divergence of attention relations against the definition over whole rows with a mask."""

import pytest
import torch

from modelwright.ops import attention_divergence as module
from modelwright.ops.attention_divergence import documents, relation_loss, relation_loss_naive

SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, -1], [0] * 10, [-1] * 10, [0, 1, 1, 1, 1, 1, 1, 1, 1, 1]])


def channels(width: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(4, 10, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("num_heads", [1, 2, 6])
@pytest.mark.parametrize("largest", [1, 2**24])
def test_equals_naive_twin(num_heads, largest, monkeypatch):
    monkeypatch.setattr(module, "LARGEST", largest)
    student, teacher = channels(12, 1).requires_grad_(), channels(18, 2)
    fast = relation_loss(student, teacher, SEGMENTS, num_heads=num_heads)
    naive = relation_loss_naive(student, teacher, SEGMENTS, num_heads=num_heads)
    torch.testing.assert_close(fast, naive, rtol=1e-11, atol=1e-11)
    ours, reference = (torch.autograd.grad(2.3 * loss, student)[0] for loss in (fast, naive))
    torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-11)


def test_equal_relations_cost_nothing():
    student = channels(12, 1, torch.float32).requires_grad_()
    loss = relation_loss(student, student.detach(), SEGMENTS, num_heads=3)
    (gradient,) = torch.autograd.grad(loss, student)
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    assert float(gradient.abs().max()) < 1e-6


def test_documents_are_found():
    assert list(documents(SEGMENTS)) == [(0, 0, 3), (0, 3, 5), (0, 5, 9), (1, 0, 10), (3, 0, 1), (3, 1, 10)]
