"""torchao's FP8 products, emulated on a CPU, against this package's own."""

from functools import partial

import pytest
import torch

from modelwright.ops.lowp_linear import E4M3, E5M2, Fp8, in_products, torchao_product

pytest.importorskip("torchao")
BF16 = torch.bfloat16


def results(product, rows: int = 32):
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=draw).requires_grad_() for shape in ((2, rows, 64), (48, 64)))
    y = product(x, weight)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
    return y.float(), x.grad, weight.grad


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    # Scales by row are powers of two in torchao: one bit of the mantissa less where a scale rounds up.
    ("recipe", "gradients", "most"), [("tensorwise", E5M2, 0.02), ("rowwise", E4M3, 0.08)],
)  # fmt: skip
def test_outputs_and_gradients_agree(recipe, gradients, most):
    own = partial(in_products, Fp8(recipe=recipe, result=BF16, gradients=gradients).products(), BF16)
    theirs = results(torchao_product(recipe, own, BF16, wide=False, emulate=True))
    for one, other in zip(results(own), theirs, strict=True):
        assert one.dtype == other.dtype == torch.float32
        assert (one - other).norm() < most * one.norm()
    exact = results(lambda x, weight: x @ weight.T)
    assert all((one - other).norm() < 0.15 * one.norm() for one, other in zip(exact, theirs, strict=True))


@pytest.mark.filterwarnings("ignore")
def test_dimensions_that_a_card_does_not_take_are_computed_here():
    own = partial(in_products, Fp8(recipe="rowwise", result=BF16).products(), BF16)
    product = torchao_product("rowwise", own, BF16, wide=False, emulate=True)
    for one, other in zip(results(own, 3), results(product, 3), strict=True):
        assert torch.equal(one, other)
