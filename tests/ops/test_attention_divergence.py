"""Divergence of attention distributions against the definition over whole rows with a mask, and against attention."""

import pytest
import torch

from modelwright.ops import attention_divergence as module
from modelwright.ops.attention import document_mask, masked_attention_naive
from modelwright.ops.attention_divergence import QueriesAndKeys, attention_divergence, attention_divergence_naive

SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, -1], [0] * 10, [-1] * 10, [0, 1, 1, 1, 1, 1, 1, 1, 1, 1]])


def scored(num_kv_heads: int, width: int, seed: int, soft_cap: float = 0.0, dtype=torch.float64) -> QueriesAndKeys:
    draw = torch.Generator().manual_seed(seed)
    shapes = [(4, 10, 6, width), (4, 10, num_kv_heads, width)]
    q, k = (torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes)
    return QueriesAndKeys(q, k, soft_cap)


@pytest.mark.parametrize("window", [0, 1, 3, 20])
@pytest.mark.parametrize("soft_cap", [0.0, 1.5])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
@pytest.mark.parametrize("largest", [1, 2**24])
def test_equals_naive_twin(window, soft_cap, num_kv_heads, largest, monkeypatch):
    monkeypatch.setattr(module, "LARGEST", largest)
    student, teacher = scored(num_kv_heads, 5, 1, soft_cap), scored(3, 7, 2, 2.0)
    leaves = [one.requires_grad_() for one in student[:2]]
    fast = attention_divergence(student, teacher, SEGMENTS, window=window)
    naive = attention_divergence_naive(student, teacher, SEGMENTS, window=window)
    torch.testing.assert_close(fast, naive, rtol=1e-11, atol=1e-11)
    assert (float(fast.detach()) > 0.1) == (window != 1)
    ours, reference = (torch.autograd.grad(2.3 * loss, leaves) for loss in (fast, naive))
    torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (3, 1.5)])
def test_the_distributions_are_those_that_attention_mixes_values_with(window, soft_cap):
    """A teacher whose values tell the places of its probabilities: their divergence is that of what is compared."""
    student, teacher = scored(2, 5, 1, soft_cap), scored(3, 7, 2, soft_cap)
    places = torch.eye(10, dtype=torch.float64).expand(4, 10, 10)
    mask, probabilities = document_mask(SEGMENTS, window), []
    for of in (student, teacher):
        values = places[:, :, None].expand(4, 10, of.k_BTKd.shape[2], 10)
        mixed = masked_attention_naive(of.q_BTHd, of.k_BTKd, values, mask, soft_cap=soft_cap)
        probabilities.append(mixed.transpose(1, 2))
    ours, its = probabilities
    terms = torch.where(its > 0, its * (its / ours).log(), 0.0).sum(dim=-1)
    expected = (terms * (SEGMENTS >= 0)[:, None]).sum()
    torch.testing.assert_close(attention_divergence(student, teacher, SEGMENTS, window=window), expected)


def test_equal_distributions_cost_nothing():
    student = scored(2, 5, 1, dtype=torch.float32)
    leaves = [one.requires_grad_() for one in student[:2]]
    loss = attention_divergence(student, QueriesAndKeys(*(one.detach() for one in leaves)), SEGMENTS)
    assert loss.item() == pytest.approx(0.0, abs=1e-5)
    assert all(float(gradient.abs().max()) < 1e-6 for gradient in torch.autograd.grad(loss, leaves))


def test_gradients_have_the_format_of_what_they_belong_to():
    student, teacher = scored(2, 5, 1, dtype=torch.bfloat16), scored(3, 7, 2)
    leaves = [one.requires_grad_() for one in student[:2]]
    loss = attention_divergence(student, teacher, SEGMENTS)
    assert loss.dtype == torch.float32
    assert all(one.dtype == torch.bfloat16 for one in torch.autograd.grad(loss, leaves))
