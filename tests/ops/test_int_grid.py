"""Integer grids: codes, ranges, and fake quantization against its definition with gradients."""

import pytest
import torch

from modelwright.ops.int_grid import (
    WeightGrid,
    activation_range,
    fake_quantize,
    fake_quantize_naive,
    lsq_step,
    round_tokens,
)
from refusals import config_error

GRIDS = [
    WeightGrid(bits=bits, symmetric=symmetric, granularity=granularity)
    for bits in (4, 8)
    for symmetric in (True, False)
    for granularity in ("tensor", "channel", "group_32")
]


def weight(shape: tuple[int, int] = (6, 64)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float64) + 0.3


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_codes_stand_for_what_training_sees(grid: WeightGrid) -> None:
    x = weight()
    step, zero = grid.ranges(x)
    assert step.numel() == grid.num_groups(x.shape)
    codes = grid.codes(x, step, zero)
    rounded = grid.rounded(x, step, zero)
    assert torch.equal(grid.dequantized(codes), rounded)
    low, high = grid.bounds
    assert low <= int(codes.codes_OI.min()) <= int(codes.codes_OI.max()) <= high
    error = grid.grouped(rounded - x).abs().amax(dim=1)
    assert (error <= 0.5001 * step * (1 if grid.symmetric else 2)).all()  # the zero point is rounded, too
    assert torch.equal(grid.codes(rounded, step, zero).codes_OI, codes.codes_OI)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("shrink", [1.0, 0.4])
def test_gradients_equal_the_naive_twins(grid: WeightGrid, shrink: float) -> None:
    """Also with clamped codes, where the step is too small for the largest values."""
    x = weight().requires_grad_()
    step, zero = grid.ranges(x)
    step = (step * shrink).requires_grad_()
    low, high = grid.bounds
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    fast = grid.rounded(x, step, zero)
    naive = fake_quantize_naive(grid.grouped(x), step[:, None], zero[:, None], low, high).view(x.shape)
    torch.testing.assert_close(fast, naive)
    ours, reference = (torch.autograd.grad(one, (x, step), upstream) for one in (fast, naive))
    torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-9)
    share = float((ours[0] != 0).double().mean())
    assert share > 0.99 if shrink == 1.0 else share < 1.0


def test_the_steps_gradient_is_that_of_the_paper() -> None:
    """Equation 3 of LSQ by hand: -v + round(v) inside, the bound outside, times 1 / sqrt(elements * largest)."""
    x = torch.tensor([[0.3, -0.9, 20.0, -20.0]], dtype=torch.float64)
    step = torch.tensor([[1.0]], dtype=torch.float64, requires_grad=True)
    fake_quantize(x, step, torch.zeros_like(step), -7, 7).sum().backward()
    assert step.grad is not None
    assert step.grad.item() == pytest.approx(((-0.3) + (0.9 - 1.0) + 7 - 7) / (4 * 7) ** 0.5)
    assert lsq_step(x, WeightGrid(bits=4)).item() == pytest.approx(2 * 10.3 / 7**0.5)


def test_tokens_are_rounded_by_themselves() -> None:
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 3, 5)[:, None]
    rounded = round_tokens(x.requires_grad_())
    peak = x.detach().abs().amax(dim=1, keepdim=True)
    codes = rounded.detach() / peak * 127
    torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-4)
    (gradient,) = torch.autograd.grad(rounded.sum(), x)
    assert torch.equal(gradient, torch.ones_like(x))
    assert torch.equal(round_tokens(x.detach()[2:3]), round_tokens(x.detach())[2:3])


@pytest.mark.parametrize(("least", "most"), [(-1.0, 3.0), (0.5, 2.0), (-4.0, -1.0)])
def test_static_ranges_have_zero_on_the_grid(least: float, most: float) -> None:
    x = torch.linspace(least, most, 50)
    step, zero = activation_range(least, most, x)
    rounded = fake_quantize(x, step, zero, -128, 127)
    assert (rounded - x).abs().max() <= 1.0001 * step
    assert fake_quantize(torch.zeros(1), step, zero, -128, 127).item() == 0.0


def test_groups_have_to_divide_the_inputs() -> None:
    with config_error("granularity", match="the 40 inputs of up_proj do not divide into groups of 32"):
        WeightGrid(granularity="group_32").check("up_proj", 40)
