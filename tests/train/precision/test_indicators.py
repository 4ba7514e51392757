"""Indicators against their definitions."""

import math
import random
from collections.abc import Callable

import pytest
import torch

from modelwright.core.config import parse
from modelwright.ops import lowp_linear
from modelwright.ops.lowp_linear import Format, Role
from modelwright.ops.quantize import dequantize
from modelwright.train.precision import indicators
from modelwright.train.precision.apply import ModelPrecision
from modelwright.train.precision.indicators import (
    GradientStats,
    LossLevel,
    Momentum,
    Observer,
    PartStatistics,
    ValueSample,
    error_of,
    kept_noise,
    loss_excess,
    outlier_share,
    relative_rise,
    trend,
    variation,
)
from modelwright.train.precision.policy import PrecisionConfig
from tiny_decoder import make_decoder


def test_sums_of_a_tensor_and_what_follows_from_them():
    weight, gradient = torch.full((4,), 2.0), torch.tensor([1.0, -70000.0, 1e-9, 0.0])
    found = GradientStats.of(weight, gradient, Momentum(0.1 * gradient, 0.05, 0.04), scale=1.0)
    assert (found.overflows, found.underflows, found.elements) == (1, 1, 4)
    assert found.gradient_noise == pytest.approx(0.0, abs=1e-5)  # all gradients pointed one way
    assert found.update_to_weight == pytest.approx(0.2 / 4)
    scaled = GradientStats.of(weight, gradient, None, scale=2.0**10)
    assert (scaled.overflows, scaled.underflows, scaled.gradient_noise) == (1, 0, 0.0)


def test_tensors_that_several_ranks_hold_count_once():
    weight = torch.ones(3)
    weight.grad = torch.ones(3)
    one = GradientStats.of(weight, weight.grad, None, scale=1.0)
    held_twice = PartStatistics(
        parts=["blocks.0.ffn"],
        config=PrecisionConfig(policy="fp32"),
        names={weight: "blocks.0.ffn.up_proj.weight"},
        num_holders=[2],
        sum_over_ranks=lambda values: [2.0 * value for value in values],
    )
    sums = held_twice.sums(lambda parameter, gradient: GradientStats.of(parameter, gradient, None, scale=1.0))
    assert sums == {"blocks.0.ffn": one}


def test_what_an_average_keeps_of_noise():
    assert kept_noise(0.9, 1) == 1.0
    weights = [0.1 * 0.9**age for age in range(7)]
    assert kept_noise(0.9, 7) == pytest.approx(sum(w * w for w in weights) / sum(weights) ** 2)


def test_trend_is_the_slope_of_the_logarithm():
    assert trend([2.0 * math.exp(-0.01 * step) for step in range(11)]) == pytest.approx(-0.1)
    assert trend([1.0, float("nan"), 1.0]) == 0.0
    assert trend([1.0, 1.1, 1.2, 1.3]) > 0.2


def levels_of(
    curve: Callable[[int], float], *, every: int, num_periods: int, noise: float, seed: int
) -> list[LossLevel]:
    draw = random.Random(seed)
    losses = [curve(step) + draw.gauss(0.0, noise) for step in range(1, every * num_periods + 1)]
    found = [LossLevel.of(losses[start : start + every]) for start in range(0, len(losses), every)]
    return [level for level in found if level]


CURVES: dict[str, Callable[[int], float]] = {
    "root": lambda step: 2.0 + 6.0 * step**-0.5,
    "power": lambda step: 1.0 + 8.0 * step**-0.2,
    "exponential": lambda step: 3.0 + 4.0 * math.exp(-step / 150) + 2.0 * math.exp(-step / 20),
    "flat": lambda step: 3.0,
}


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("every", [4, 20, 100])
def test_a_loss_that_falls_ever_more_slowly_is_not_in_excess(curve, every):
    """Never without noise, and with it about as seldom as three standard errors promise."""
    found = {noise: [] for noise in (0.0, 0.03)}
    for seed in range(20):
        for noise, excesses in found.items():
            levels = levels_of(CURVES[curve], every=every, num_periods=12, noise=noise, seed=seed)
            excesses += [loss_excess(levels[:number], level) for number, level in enumerate(levels)]
    assert max(found[0.0]) < 1e-9
    assert sum(excess > 0 for excess in found[0.03]) <= 0.015 * len(found[0.03])


@pytest.mark.parametrize("past", [1, 2, 3, 8])
def test_a_jump_is_in_excess_by_what_it_rises(past):
    levels = levels_of(CURVES["root"], every=20, num_periods=past + 1, noise=0.03, seed=past)
    usual = levels[-1]
    fell = levels[-2].mean - usual.mean if past < 3 else 0.0  # a fall that so short a past does not lead to expect
    risen = LossLevel(1.2 * (usual.mean + fell), usual.variance, usual.count)
    assert loss_excess(levels[:-1], risen) == pytest.approx(0.2, abs=0.04)


def test_a_level_leaves_its_own_slope_and_what_is_not_finite_out_of_its_variance():
    draw = random.Random(0)
    level = LossLevel.of([*(5.0 - 0.01 * step + draw.gauss(0.0, 0.1) for step in range(400)), math.nan])
    assert level is not None
    assert level.count == 400
    assert level.variance == pytest.approx(0.01, rel=0.2)
    assert LossLevel.of([1.0, math.inf]) is None


def test_outliers_variation_and_rises():
    assert outlier_share([1.0, 1.1, 0.9, 9.0]) == 0.25
    assert outlier_share([1.0, float("inf")]) == 0.5
    assert variation([1.0, 3.0]) == 0.5
    assert variation([1.0]) == 0.0
    assert relative_rise(2.0, 2.1) == pytest.approx(0.05)
    assert relative_rise(2.0, float("nan")) == 1.0
    assert relative_rise(float("inf"), 2.0) == 1.0


def config(**given) -> PrecisionConfig:
    return parse(PrecisionConfig, {"policy": "fp32", **given}, constants=True)


def observer(candidates: list[Format]) -> Observer:
    return Observer(candidates, config())


def error(x: torch.Tensor, chosen: Format, role: Role = "x") -> float:
    return error_of(ValueSample.of(x), chosen, role, config())


def test_formats_lose_what_their_mantissa_cannot_hold():
    x = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))
    lost = {chosen: error(x, chosen) for chosen in ("fp32", "fp16", "bf16", "int8", "fp8")}
    assert lost["fp32"] == 0.0
    assert lost["fp16"] < lost["bf16"] < lost["int8"] < lost["fp8"] < 0.05
    assert lost["bf16"] == pytest.approx(2.0**-8 / math.sqrt(3) * 0.7, rel=0.3)


CODES: dict[str, dict] = {
    "int8": {"int8": {"stochastic_rounding": False}},
    "int8 at random": {},
    "int8, wide": {"int8": {"wgrad_high_precision": True}},
    **{f"fp8 {recipe}": {"fp8": {"recipe": recipe}} for recipe in ("tensorwise", "rowwise", "blockwise")},
    "fp8 with e4m3": {"fp8": {"grad_dtype": "e4m3"}},
}


def uneven(*shape: int, seed: int) -> torch.Tensor:
    """Some rows and some columns are much larger than others."""
    draw = torch.Generator().manual_seed(seed)
    rows, columns = torch.randn(shape[0], 1, generator=draw), torch.randn(1, shape[1], generator=draw)
    return torch.randn(shape, generator=draw) * (1.5 * rows).exp() * columns.exp()


@pytest.mark.parametrize("num_rows", [100, 1500])
@pytest.mark.parametrize("name", CODES)
def test_errors_are_those_of_the_products_own_codes(monkeypatch, name, num_rows):
    """The larger of both sides on which a factor is read; of some of 1,500 rows about that of all."""
    made, chosen = config(**CODES[name]), "int8" if name.startswith("int8") else "fp8"
    x, weight, gradient = (uneven(*shape, seed=i) for i, shape in enumerate([(num_rows, 48), (32, 48), (num_rows, 32)]))
    factors: dict[Role, torch.Tensor] = {"x": x, "weight": weight, "grad": gradient}
    lost: dict[Role, float] = dict.fromkeys(factors, 0.0)
    usual = lowp_linear.quantize

    def quantize(factor, grid, dtype, **given):
        codes, scales = usual(factor, grid, dtype, **given)
        (role,) = (role for role, whole in factors.items() if sorted(whole.shape) == sorted(factor.shape))
        error = (dequantize(codes, scales, grid) - factor).norm() / factor.norm()
        lost[role] = max(lost[role], float(error))
        return codes, scales

    monkeypatch.setattr(lowp_linear, "quantize", quantize)
    product = ModelPrecision(make_decoder(), made).product("", chosen)
    torch.manual_seed(0)
    wide_x = x.to(made.result_of[chosen]).requires_grad_()
    product(wide_x, weight.clone().requires_grad_()).backward(gradient.to(made.result_of[chosen]))
    near = 0.05 if num_rows == 100 else 0.35
    for role, factor in factors.items():
        assert error_of(ValueSample.of(factor), chosen, role, made) == pytest.approx(lost[role], rel=near), role


def test_an_observer_sees_inputs_and_gradients_of_each_part_and_changes_nothing():
    watching = observer(["bf16", "int8"])
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    product = watching.watched("blocks.0.ffn.up_proj", torch.nn.functional.linear)
    y = product(x, weight)
    assert torch.equal(y, torch.nn.functional.linear(x, weight))
    y.square().sum().backward()
    assert watching.errors.get(("blocks.0.ffn", "input", "int8"), (0.0, 0)) == (error(x, "int8"), 1)
    assert watching.errors.get(("blocks.0.ffn", "gradient", "int8"), (0.0, 0)) == (
        error(2 * y.detach(), "int8", "grad"),
        1,
    )
    assert watching.errors.get(("blocks.0.ffn", "gradient", "bf16"), (0.0, 0)) == (error(2 * y.detach(), "bf16"), 1)
    assert watching.errors.get(("blocks.1.ffn", "input", "int8"), (0.0, 0)) == (0.0, 0)
    product(x[:0], weight)
    assert watching.errors.get(("blocks.0.ffn", "input", "int8"), (0.0, 0))[1] == 1


def test_products_that_read_one_tensor_share_a_look_at_it(monkeypatch):
    watching, looks = observer(["int8"]), []
    monkeypatch.setattr(
        indicators.ValueSample, "of", lambda values, of=ValueSample.of: looks.append(values) or of(values)
    )
    queries, keys = (watching.watched(f"blocks.0.attention.{name}_proj", torch.nn.functional.linear) for name in "qk")
    x, other, weight = torch.randn(6, 8), torch.randn(6, 8), torch.randn(4, 8)
    for product, values in ((queries, x), (keys, x), (queries, other), (keys, x)):
        product(values, weight)
    assert len(looks) == 3
    total, count = watching.errors.get(("blocks.0.attention", "input", "int8"), (0.0, 0))
    assert (total, count) == (pytest.approx(3 * error(x, "int8") + error(other, "int8")), 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sample_is_the_same_however_many_pieces_it_is_read_in(monkeypatch, dtype):
    x = torch.randn(2, 37, 24, generator=torch.Generator().manual_seed(3)).to(dtype)
    monkeypatch.setattr(indicators, "AT_ONCE", 100)
    found = ValueSample.of(x)
    assert torch.equal(found.maxima_K, x.flatten(0, 1).abs().amax(0).float())
    torch.testing.assert_close(found.mean_square, x.float().square().mean())


def test_what_comes_rounded_has_lost_what_rounding_costs_and_an_overflow_tells_nothing():
    watching = observer(["fp32", "bf16", "int8"])
    product = watching.watched("blocks.0.ffn.up_proj", torch.nn.functional.linear)
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    product(x.bfloat16(), torch.randn(4, 256).bfloat16())
    lost, count = watching.errors.get(("blocks.0.ffn", "input", "bf16"), (0.0, 0))
    assert (lost, count) == (pytest.approx(error(x, "bf16"), rel=0.05), 1)
    assert watching.errors.get(("blocks.0.ffn", "input", "fp32"), (0.0, 0)) == (0.0, 1)
    for broken in (math.inf, math.nan):
        x[2, 4] = broken
        product(x, torch.randn(4, 256))
        assert watching.errors.get(("blocks.0.ffn", "input", "int8"), (0.0, 0))[1] == 1


def test_a_format_that_cannot_hold_the_values_loses_all_of_them():
    watching = observer(["bf16", "fp16"])
    product = watching.watched("blocks.0.ffn.up_proj", torch.nn.functional.linear)
    product(torch.full((64, 256), 1e5), torch.randn(4, 256))
    assert watching.errors.get(("blocks.0.ffn", "input", "fp16"), (0.0, 0)) == (1.0, 1)
    assert watching.errors.get(("blocks.0.ffn", "input", "bf16"), (0.0, 0))[0] < 0.01
