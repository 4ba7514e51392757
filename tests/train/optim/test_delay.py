"""Delay compensation against its formula, its twin, and a function whose Hessian is known."""

import pytest
import torch

from modelwright.train.optim.build import compensate, compensate_naive
from tolerances import TOLERANCES


def tensors(seed: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw, dtype=dtype) for shape in ((5, 3), (7,), (), (1, 1))]


def test_the_formula_by_hand():
    gradients = [torch.tensor([2.0, -3.0, 0.0])]
    compensate(gradients, [torch.tensor([1.5, 0.0, 9.0])], [torch.tensor([1.0, 2.0, 1.0])], strength=0.1)
    torch.testing.assert_close(gradients[0], torch.tensor([2.0 + 0.1 * 4 * 0.5, -3.0 + 0.1 * 9 * -2.0, 0.0]))


@pytest.mark.parametrize("strength", [0.04, 1.0, 500.0])
def test_fast_and_naive_agree_and_leave_weights_alone(strength):
    fast, naive, now, then = (tensors(seed, torch.float32) for seed in (1, 1, 2, 3))
    compensate(fast, now, then, strength=strength)
    compensate_naive(naive, now, then, strength=strength)
    for one, other in zip(fast, naive, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCES["fp32_op"])
    assert all(map(torch.equal, now, tensors(2, torch.float32)))
    assert all(map(torch.equal, then, tensors(3, torch.float32)))


def test_no_delay_changes_no_bit():
    gradients, now = tensors(1), tensors(2)
    compensate(gradients, now, tensors(2), strength=3.0)
    assert all(map(torch.equal, gradients, tensors(1)))


def test_it_goes_towards_the_gradient_at_the_present_weights():
    """Logistic loss of one sample: its Hessian is p (1 - p), near g squared where the model is still undecided."""
    then, now = torch.tensor([0.3], requires_grad=True), torch.tensor([0.0], requires_grad=True)
    old, fresh = (torch.autograd.grad(torch.nn.functional.softplus(-w).sum(), w)[0] for w in (then, now))
    late = old.clone()
    compensate([late], [now], [then], strength=1.0)
    assert abs(late - fresh) < 0.4 * abs(old - fresh)
