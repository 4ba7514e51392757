"""Settings of eight-bit formats, from the config to the products: each reaches the operator and changes something."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from modelwright.core.config import parse
from modelwright.ops.lowp_linear import E4M3, E5M2, Fp8, Int8, in_products
from modelwright.train.precision.apply import AmaxHistory, ModelPrecision
from modelwright.train.precision.policy import PrecisionConfig
from tiny_decoder import make_decoder

NAME = "blocks.1.ffn.up_proj"
PAST = [2.0, 0.5, 1.0]
"""Largest values of earlier steps: too small for the inputs, too large for the weights."""
BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True, kw_only=True)
class Case:
    """options: of the config. made: the operator that they mean. changes: what is no longer as without them."""

    options: dict[str, Any]
    made: Fp8 | Int8
    changes: set[str]


def past() -> AmaxHistory:
    maxima = AmaxHistory(16)
    maxima.push(PAST)
    return maxima


def fp8(**changes: Any) -> Fp8:
    return Fp8(**{"recipe": "tensorwise", "result": BF16, "gradients": E5M2, **changes})


ALL, BACKWARD = {"y", "dx", "dw"}, {"dx", "dw"}
CASES = {
    "fp8": [
        Case(options={"fp8": {"recipe": "rowwise"}}, made=fp8(recipe="rowwise"), changes=ALL),
        Case(options={"fp8": {"recipe": "blockwise"}}, made=fp8(recipe="blockwise", gradients=E4M3), changes=ALL),
        Case(
            options={"fp8": {"recipe": "blockwise", "grad_dtype": "e5m2"}},
            made=fp8(recipe="blockwise", gradients=E5M2),
            changes=ALL,
        ),
        Case(options={"fp8": {"grad_dtype": "e4m3"}}, made=fp8(gradients=E4M3), changes=BACKWARD),
        Case(options={"fp8": {"wgrad_high_precision": True}}, made=fp8(wgrad_high_precision=True), changes={"dw"}),
        Case(options={"fp8": {"save_quantized_input": True}}, made=fp8(cache=True), changes={"bytes"}),
        Case(options={"fp8": {"scaling": "delayed"}}, made=fp8(maxima=past()), changes=ALL),
        Case(options={"output_dtype": "fp32"}, made=fp8(result=FP32), changes={*ALL, "bytes"}),
    ],
    "int8": [
        Case(
            options={"int8": {"stochastic_rounding": False}}, made=Int8(result=BF16, stochastic=False), changes=BACKWARD
        ),
        Case(
            options={"int8": {"wgrad_high_precision": True}},
            made=Int8(result=BF16, wgrad_high_precision=True),
            changes={"dw"},
        ),
        Case(options={"output_dtype": "fp32"}, made=Int8(result=FP32), changes={*ALL, "bytes"}),
        Case(options={"overrides": {"embedding": "fp32"}}, made=Int8(result=FP32), changes={*ALL, "bytes"}),
    ],
}
DEFAULTS = {"fp8": fp8(), "int8": Int8(result=BF16)}


def outcome(product) -> dict[str, torch.Tensor]:
    """Value and both gradients of a layer whose rows and columns differ in size, and the bytes kept for backward."""
    generator = torch.Generator().manual_seed(4)
    x, weight, grad = (torch.randn(shape, generator=generator) for shape in ((2, 40, 300), (56, 300), (2, 40, 56)))
    x = (x * torch.logspace(-1, 1, 300)).requires_grad_()
    weight, grad = weight.requires_grad_(), grad * torch.logspace(-2, 0, 40)[:, None]
    kept: list[int] = []
    torch.manual_seed(5)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.nbytes) or one, lambda one: one):
        y = product(x, weight)
    y.backward(grad.to(y.dtype))
    assert x.grad is not None
    assert weight.grad is not None
    return {"y": y.detach(), "dx": x.grad, "dw": weight.grad, "bytes": torch.tensor(sum(kept))}


def of_config(chosen, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    formats = ModelPrecision(make_decoder(), parse(PrecisionConfig, {"policy": chosen, **options}, constants=True))
    for maxima in formats.delayed.values():
        maxima.push(PAST)
    return outcome(formats.product(NAME, chosen))


def of_operator(made: Fp8 | Int8) -> dict[str, torch.Tensor]:
    return outcome(lambda x, weight: in_products(made.products(), made.result, x, weight))


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in one if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])}


@pytest.mark.parametrize("chosen", DEFAULTS)
def test_without_options_products_are_the_default_operator_s(chosen):
    assert differing(of_config(chosen, {}), of_operator(DEFAULTS[chosen])) == set()


@pytest.mark.parametrize(
    ("chosen", "case"), [pytest.param(chosen, one, id=str(one.options)) for chosen in CASES for one in CASES[chosen]]
)
def test_an_option_reaches_the_products(chosen, case):
    """To the last bit the operator's own results with that option."""
    found = of_config(chosen, case.options)
    assert differing(found, of_operator(case.made)) == set()
    assert differing(found, of_operator(DEFAULTS[chosen])) == case.changes


def test_delayed_scaling_looks_back_as_many_steps_as_it_is_told():
    given = parse(
        PrecisionConfig, {"policy": "fp8", "fp8": {"scaling": "delayed", "amax_history_len": 3}}, constants=True
    )
    assert {maxima.past["x"].maxlen for maxima in ModelPrecision(make_decoder(), given).delayed.values()} == {3}
