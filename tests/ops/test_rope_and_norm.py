"""Rotary positions and the RMS norm against their naive twins."""

import pytest
import torch

from modelwright.ops.rope_norm_swiglu import apply_rope, apply_rope_naive, rms_norm, rms_norm_naive, rope_tables
from tolerances import TOLERANCES

pytestmark = pytest.mark.usefixtures("either_way")


def test_rope_equals_complex_rotation():
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 5, 100, 511, 3]])
    x = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    fast = apply_rope(x, *rope_tables(positions, 8, 1e4))
    naive = apply_rope_naive(x, positions, 1e4)
    torch.testing.assert_close(fast, naive, **TOLERANCES["fp32_gradient"])
    ours, reference = (torch.autograd.grad(out, x, grad)[0] for out in (fast, naive))
    torch.testing.assert_close(ours, reference, **TOLERANCES["fp32_gradient"])


def test_rope_depends_on_distance_only():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 1, 1, 16, generator=generator), torch.randn(1, 1, 1, 16, generator=generator)

    def score(query_position: int, key_position: int) -> torch.Tensor:
        turned = [
            apply_rope(x, *rope_tables(torch.tensor([[position]]), 16, 1e4))
            for x, position in ((q, query_position), (k, key_position))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(7, 3), score(107, 103), **TOLERANCES["fp32_gradient"])


def test_rope_keeps_the_number_format():
    x = torch.randn(1, 3, 2, 8, dtype=torch.bfloat16)
    assert apply_rope(x, *rope_tables(torch.arange(3)[None], 8, 1e4)).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 7, 33), (2, 3, 4, 8)])
def test_norm_equals_naive(shape):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, requires_grad=True)
    weight = torch.randn(shape[-1], generator=generator, requires_grad=True)
    grad = torch.randn(shape, generator=generator)
    fast, naive = rms_norm(x, weight, 1e-5), rms_norm_naive(x, weight, 1e-5)
    torch.testing.assert_close(fast, naive, **TOLERANCES["fp32_op"])
    pairs = zip(
        torch.autograd.grad(fast, (x, weight), grad), torch.autograd.grad(naive, (x, weight), grad), strict=True
    )
    for ours, reference in pairs:
        torch.testing.assert_close(ours, reference, **TOLERANCES["fp32_gradient"])


def test_norm_in_bf16():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 32, generator=generator).bfloat16().requires_grad_()
    weight = torch.ones(32, requires_grad=True)
    out = rms_norm(x, weight, 1e-6)
    grad_x, grad_weight = torch.autograd.grad(out, (x, weight), torch.ones_like(out))
    assert (out.dtype, grad_x.dtype, grad_weight.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    torch.testing.assert_close(out, rms_norm_naive(x, weight, 1e-6), **TOLERANCES["bf16_op"])


def test_norm_of_zeros_is_finite():
    x = torch.zeros(2, 8, requires_grad=True)
    out = rms_norm(x, torch.ones(8), 1e-6)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(out, torch.zeros_like(out))
    assert grad.isfinite().all()
