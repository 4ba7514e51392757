"""A linear layer in each format: values and both gradients against FP32, what is kept, and the exact cases."""

import pytest
import torch
import torch.nn.functional as F

from modelwright.ops.lowp_linear import E4M3, E5M2, Fp8, Int8, in_float, in_products
from modelwright.ops.matmul import PLAIN, LinearGemms, multiply

pytestmark = pytest.mark.usefixtures("either_way")

FORMATS = {
    "int8": (Int8(result=torch.float32, stochastic=False), 0.02),
    "int8-random": (Int8(result=torch.float32), 0.03),
    "fp8-tensorwise": (Fp8(recipe="tensorwise", result=torch.float32), 0.09),
    "fp8-rowwise": (Fp8(recipe="rowwise", result=torch.float32), 0.09),
    "fp8-blockwise": (Fp8(recipe="blockwise", result=torch.float32, gradients=E4M3), 0.05),
    "fp8-cached": (Fp8(recipe="blockwise", result=torch.float32, gradients=E4M3, cache=True), 0.05),
}


def layer() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, weight, grad = (torch.randn(shape, generator=generator) for shape in ((2, 40, 72), (56, 72), (2, 40, 56)))
    return x.requires_grad_(), weight.requires_grad_(), grad


def value_and_gradients(product) -> list[torch.Tensor]:
    x, weight, grad = layer()
    y = product(x, weight)
    y.backward(grad.to(y.dtype))
    assert x.grad is not None
    assert weight.grad is not None
    return [y.detach(), x.grad, weight.grad]


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", FORMATS)
def test_value_and_gradients_are_near_those_of_fp32(name):
    """Near, and not equal: the format is really used, forward and in both gradients."""
    made, allowed = FORMATS[name]
    wanted = value_and_gradients(F.linear)
    found = value_and_gradients(lambda x, weight: in_products(made.products(), torch.float32, x, weight))
    for ours, exact in zip(found, wanted, strict=True):
        assert ours.dtype == torch.float32
        assert 1e-4 < relative_error(ours, exact) < allowed


def test_a_wide_weight_gradient_is_exact():
    for made in (
        Int8(result=torch.float32, wgrad_high_precision=True),
        Fp8(recipe="rowwise", result=torch.float32, wgrad_high_precision=True),
    ):
        found = value_and_gradients(lambda x, w, made=made: in_products(made.products(), torch.float32, x, w))
        assert relative_error(found[2], value_and_gradients(F.linear)[2]) < 1e-6
        assert relative_error(found[1], value_and_gradients(F.linear)[1]) > 1e-3


def test_plain_products_by_hand_are_autograds():
    """The same three products, written out."""
    by_hand = LinearGemms(name="by hand")
    assert by_hand is not PLAIN
    for ours, exact in zip(
        value_and_gradients(lambda x, w: multiply(x, w, by_hand)), value_and_gradients(F.linear), strict=True
    ):
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)


def test_cached_inputs_take_a_byte_an_element():
    x, weight, _ = layer()
    sizes: dict[str, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() != weight.data_ptr():
            sizes[kind] += tensor.nbytes
        return tensor

    for kind, cache in (("whole", False), ("cached", True)):
        sizes[kind] = 0
        products = Fp8(recipe="tensorwise", result=torch.float32, cache=cache).products()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            in_products(products, torch.float32, x, weight)
    assert sizes == {"whole": 4 * x.numel(), "cached": x.numel() + 4}


def test_roles_tell_delayed_scaling_what_it_looks_at():
    seen: list[str] = []

    def maxima(role, now):
        seen.append(role)
        return now

    made = Fp8(recipe="tensorwise", result=torch.float32, gradients=E5M2, maxima=maxima)
    value_and_gradients(lambda x, weight: in_products(made.products(), torch.float32, x, weight))
    assert seen == ["x", "weight", "grad", "weight", "grad", "x"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float_formats_compute_in_their_format_and_give_fp32_gradients(dtype):
    x, weight, grad = layer()
    y = in_float(dtype, x, weight)
    y.backward(grad.to(dtype))
    assert y.dtype == dtype
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad, weight.grad.to(dtype).float())


@pytest.mark.parametrize("keeps_cast", [True, False])
def test_a_weight_is_cast_again_for_backward_unless_its_cast_is_kept(keeps_cast):
    """The same gradients to the last bit; what waits for backward is the weight itself."""
    x, weight, grad = layer()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        y = in_float(torch.bfloat16, x, weight, keeps_cast=keeps_cast)
    y.backward(grad.bfloat16())
    plain_x, plain_weight, _ = layer()
    torch.nn.functional.linear(plain_x.bfloat16(), plain_weight.bfloat16()).backward(grad.bfloat16())
    assert torch.equal(x.grad, plain_x.grad)
    assert torch.equal(weight.grad, plain_weight.grad)
    is_weight = [tensor.dtype == weight.dtype for tensor in kept if weight.shape in (tensor.shape, tensor.T.shape)]
    assert is_weight == [not keeps_cast]
