"""One norm over many tensors, against FP64."""

import pytest
import torch

from modelwright.parallel.strategy import total_norm


def test_millions_of_elements_are_added_up_accurately():
    """FP32's own norm of this tensor is off by more than 1e-5."""
    tensors = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in [(3000, 1000), (7,), ()]]
    exact = sum(float(tensor.double().square().sum()) for tensor in tensors) ** 0.5
    assert abs(float(tensors[0].norm()) / float(tensors[0].double().norm()) - 1) > 1e-5
    assert float(total_norm(tensors)) == pytest.approx(exact, rel=3e-7)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_value_that_is_not_finite_shows(value):
    tensors = [torch.zeros(70_000), torch.zeros(3)]
    tensors[0][69_999] = value
    assert not total_norm(tensors).isfinite()


def test_of_nothing_it_is_zero():
    assert float(total_norm([])) == 0.0
    assert float(total_norm([torch.zeros(0)])) == 0.0


@pytest.mark.parametrize("size", [1, 2**16 - 1, 2**16, 3 * 2**16, 200_001])
def test_pieces_in_one_call_have_the_bits_of_one_call_for_each(size):
    draw = torch.Generator().manual_seed(size)
    tensors = [torch.randn(size, generator=draw), torch.randn(300, 700, generator=draw), torch.randn(5, generator=draw)]
    pieces = [piece for tensor in tensors for piece in tensor.reshape(-1).split(2**16)]
    assert torch.equal(total_norm(tensors), torch.nn.utils.get_total_norm(pieces, foreach=True))
