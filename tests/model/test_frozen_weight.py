"""Packed weights against their dequantized twin, with gradients; the whole weight never exists in a wide format."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from largest_output import largest_tensor
from modelwright.core.config import ConfigError, parse
from modelwright.model.adapters import attach_adapters, base_fingerprint
from modelwright.model.low_rank import AdapterConfig, FrozenWeight, PackedFormat, pack
from modelwright.ops.lowp_linear import in_float
from modelwright.ops.quantize import packed_product_naive
from modelwright.train.config import TrainConfig
from tiny_decoder import make_decoder
from tolerances import TOLERANCES

FORMATS: tuple[PackedFormat, ...] = ("int8", "nf4")


def packed(weight_OI: torch.Tensor, packed_format: PackedFormat, chunk_elements: int) -> FrozenWeight:
    frozen = FrozenWeight(*weight_OI.shape, packed_format)
    with torch.no_grad():
        for parameter, value in zip((frozen.codes, frozen.scales), pack(weight_OI, packed_format), strict=True):
            parameter.copy_(value)
    frozen.chunk_elements = chunk_elements
    return frozen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_elements", [1, 300, 2**22])
@pytest.mark.parametrize("packed_format", FORMATS)
def test_product_and_gradient_are_those_of_the_dequantized_weight(
    packed_format: PackedFormat, chunk_elements: int, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(11, 129, generator=draw) / 129**0.5
    frozen = packed(weight_OI, packed_format, chunk_elements)
    x = torch.randn(2, 5, 129, generator=draw).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    product = F.linear if dtype == torch.float32 else partial(in_float, dtype)
    out = frozen(x, product)
    wanted = packed_product_naive(twin, *frozen.tensors(), frozen.row_blocks, F.linear)
    towards = torch.randn(wanted.shape, generator=draw)
    out.backward(towards.to(dtype))
    wanted.backward(towards)
    kind = "fp32_op" if dtype == torch.float32 else "bf16_op"
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), wanted, **TOLERANCES[kind])
    torch.testing.assert_close(x.grad, twin.grad, **TOLERANCES[kind])
    assert (frozen.dense() - weight_OI).norm() / weight_OI.norm() < (0.12 if packed_format == "nf4" else 0.01)


@pytest.mark.parametrize("packed_format", FORMATS)
def test_the_whole_weight_never_exists(packed_format: PackedFormat) -> None:
    frozen = packed(torch.randn(512, 512), packed_format, chunk_elements=2**14)
    x = torch.randn(4, 512, requires_grad=True)
    assert largest_tensor(lambda: frozen(x, F.linear).sum().backward()) <= 2**14
    assert x.grad is not None
    stored = sum(parameter.nbytes for parameter in frozen.parameters())
    assert stored == 512 * 512 * (0.5 if packed_format == "nf4" else 1) + 512 * 8 * 4


def test_the_fingerprint_is_that_of_the_weights_before_they_were_packed() -> None:
    model = make_decoder()
    fingerprint = base_fingerprint(model)
    attach_adapters(model, AdapterConfig(r=2, base_format="nf4"), 0)
    assert model.base_fingerprint == fingerprint


@pytest.mark.parametrize("policy", ["fp8", "int8"])
def test_products_in_eight_bits_of_a_packed_weight_are_refused(policy: str) -> None:
    settings = {"lora": {"r": 2, "base_format": "nf4"}, "precision": {"policy": policy}}
    with pytest.raises(
        ConfigError, match=f"lora.base_format: nf4 needs matrix products in floating-point .* precision.policy {policy}"
    ):
        parse(TrainConfig, settings)
