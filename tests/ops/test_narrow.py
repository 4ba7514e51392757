"""Products in formats without instructions, against the processor's or PyTorch's own."""

import pytest
import torch

from modelwright.ops import matmul
from modelwright.ops.attention import packed_attention, packed_tiles
from modelwright.ops.cross_entropy import linear_cross_entropy
from modelwright.ops.matmul import PLAIN, multiply
from modelwright.ops.quantize import int8_product

pytestmark = pytest.mark.usefixtures("either_way")


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def dtype(request):
    return request.param


def both_ways(monkeypatch, call):
    """What `call` gives with FP32 products of widened factors, and with products in the format itself."""
    found = []
    for multiplies in (frozenset(), matmul.NARROW):
        monkeypatch.setattr(matmul, "CPU_MULTIPLIES", multiplies)
        found.append(call())
    return found


def close(found, wanted, dtype, *, roundings=2.0):
    """Within some roundings of the largest value."""
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert (one.float() - other.float()).abs().max() <= roundings * torch.finfo(
            dtype
        ).eps * other.float().abs().max()


def test_a_product_is_that_of_the_format_and_keeps_its_dtype(dtype, monkeypatch):
    left, right = torch.randn(33, 300).to(dtype), torch.randn(300, 17).to(dtype)
    wide, own = both_ways(monkeypatch, lambda: matmul.product(left, right))
    close([wide], [own], dtype)
    exact = left.double() @ right.double()
    assert (
        torch.equal(wide, exact.to(dtype)) or (wide - exact).abs().max() <= (exact.to(dtype) - exact).abs().max() * 1.01
    )


def test_gradients_of_a_layer_are_those_of_the_format(dtype, monkeypatch):
    x, weight, dy = torch.randn(2, 9, 40), torch.randn(24, 40), torch.randn(2, 9, 24).to(dtype)

    def run():
        given, weights = (one.to(dtype).requires_grad_() for one in (x, weight))
        y = multiply(given, weights, PLAIN)
        y.backward(dy)
        return y.detach(), given.grad, weights.grad

    wide, own = both_ways(monkeypatch, run)
    close(wide, own, dtype)


def test_what_a_layer_keeps_has_the_narrow_format(dtype, monkeypatch):
    monkeypatch.setattr(matmul, "CPU_MULTIPLIES", frozenset())
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.dtype) or one, lambda one: one):
        multiply(torch.randn(5, 8).to(dtype).requires_grad_(), torch.randn(6, 8).to(dtype).requires_grad_())
    assert kept
    assert set(kept) == {dtype}


def test_attention_and_its_gradients(dtype, monkeypatch):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 40, heads, 16) for heads in (4, 2, 2))
    tiles = packed_tiles(torch.arange(40).div(15, rounding_mode="floor").repeat(2, 1), tile_len=8)

    def run():
        queries, keys, values = (one.to(dtype).requires_grad_() for one in (q, k, v))
        out = packed_attention(queries, keys, values, tiles)
        out.float().square().sum().backward()
        return out.detach(), queries.grad, keys.grad, values.grad

    wide, own = both_ways(monkeypatch, run)
    close(wide, own, dtype, roundings=6.0)


def test_the_head_and_its_gradients(dtype, monkeypatch):
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(20, 16), torch.randn(31, 16), torch.randint(0, 31, (20,))

    def run():
        states, weights = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = linear_cross_entropy(states, weights, labels, chunk_tokens=8, compute=dtype)
        loss.backward()
        return loss.detach(), states.grad, weights.grad

    wide, own = both_ways(monkeypatch, run)
    close(wide, own, dtype, roundings=4.0)


def test_sums_of_int8_products_are_exact(monkeypatch):
    left, right = (torch.randint(-127, 128, (rows, 900), dtype=torch.int8) for rows in (21, 13))
    exact = left.long() @ right.long().T
    if torch.int8 in matmul.CPU_MULTIPLIES:  # oneDNN's sums saturate where it may use AVX2 alone
        assert torch.equal(int8_product(left, right).long(), exact)
    monkeypatch.setattr(matmul, "CPU_MULTIPLIES", frozenset())
    assert torch.equal(int8_product(left, right).long(), exact)


def test_fp32_and_accelerators_are_never_widened():
    assert not matmul.is_emulated(torch.float32, torch.device("cpu"))
    assert not matmul.is_emulated(torch.bfloat16, torch.device("cuda"))
