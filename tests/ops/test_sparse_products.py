"""Products that leave out outputs: against their masked twin, and what they cost."""

import pytest
import torch

from modelwright.ops.matmul import PLAIN, Executed, counted, multiply
from modelwright.train.techniques.sparse_updates import masked_naive, on_columns, on_rows

SHAPES = [(2, 5, 7, 3), (1, 1, 4, 9)]


def gradients(products, shape):
    """Output, and gradients of input and weight, of the same draw."""
    rows, length, num_inputs, num_outputs = shape
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(rows, length, num_inputs, generator=draw).requires_grad_()
    weight = torch.randn(num_outputs, num_inputs, generator=draw).requires_grad_()
    y = multiply(x, weight, products)
    (y * torch.randn(y.shape, generator=draw)).sum().backward()
    return y, x.grad, weight.grad


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chosen", [None, [0], [0, 2], [2, 1]])
@pytest.mark.parametrize(("sparse", "input_too"), [(on_columns, True), (on_rows, False)])
def test_fewer_products_give_what_a_mask_gives(shape, chosen, sparse, input_too):
    chosen_S = None if chosen is None else torch.tensor(chosen)
    fast = gradients(sparse(PLAIN, lambda: chosen_S), shape)
    naive = gradients(masked_naive(PLAIN, lambda: chosen_S, input_too=input_too), shape)
    for ours, theirs in zip(fast, naive, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_what_is_left_out_is_not_executed():
    """5 x 7 inputs, 3 outputs: a product is 2 * 5 * 7 * 3 FLOPs, with one chosen output a third of that."""
    whole = 2 * 5 * 7 * 3
    found = {}
    for name, sparse in (("columns", on_columns), ("rows", on_rows)):
        executed = Executed()
        gradients(sparse(counted(PLAIN, executed), lambda: torch.tensor([1])), (1, 5, 7, 3))
        found[name] = executed.flops
    assert found == {"columns": whole + 2 * whole // 3, "rows": 2 * whole + whole // 3}


def test_a_layer_whose_weight_is_frozen_computes_no_gradient_of_it():
    executed = Executed()
    x, weight = torch.randn(4, 6).requires_grad_(), torch.randn(8, 6)
    multiply(x, weight, counted(PLAIN, executed)).sum().backward()
    assert executed.flops == 2 * (2 * 4 * 6 * 8)
