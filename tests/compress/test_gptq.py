"""GPTQ against column-by-column elimination with explicit inverses, and against rounding to the nearest code."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny_run
import torch

from modelwright.compress.gptq import DAMPING, LayerError, gptq, quantize_layer
from modelwright.compress.int8 import (
    Int8Embedding,
    Int8Linear,
    Int8WeightsConfig,
    TrainedGrid,
    choose_backend,
    load_int8,
    quantize_rows,
    quantize_to_grid,
    save_grid_model,
)
from modelwright.core.config import ConfigError, ModelError
from modelwright.model.decoder import Decoder
from modelwright.ops.int_grid import WeightGrid
from modelwright.train.objective import forward

GRIDS = [
    WeightGrid(bits=4, symmetric=symmetric, granularity=granularity)
    for symmetric in (True, False)
    for granularity in ("tensor", "channel", "group_32")
]


def inputs(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight, and E[x x'] of correlated inputs, one of which is always zero."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(12, width, generator=draw, dtype=torch.float64)
    mixing = torch.randn(width, width, generator=draw, dtype=torch.float64)
    x = torch.randn(400, width, generator=draw, dtype=torch.float64) @ mixing
    x[:, 3] = 0
    return weight, x.T @ x / len(x)


def naive_codes(weight: torch.Tensor, hessian: torch.Tensor, grid: WeightGrid) -> torch.Tensor:
    """Equations 2 and 3 of the paper: quantize an input, spread its error by the inverse, eliminate it."""
    weight, num_inputs = weight.clone(), weight.shape[1]
    dead = hessian.diagonal() == 0
    hessian = hessian + torch.diag(dead.double())
    weight[:, dead] = 0
    inverse = torch.linalg.inv(
        hessian + DAMPING * hessian.diagonal().mean() * torch.eye(num_inputs, dtype=torch.float64)
    )
    low, high = grid.bounds
    channel = WeightGrid(bits=grid.bits, symmetric=grid.symmetric, granularity="channel")
    step, zero = (WeightGrid(**vars(grid)) if grid.granularity == "tensor" else channel).ranges(weight)
    codes = torch.zeros_like(weight)
    for place in range(num_inputs):
        if grid.group_size and place % grid.group_size == 0:
            step, zero = channel.ranges(weight[:, place : place + grid.group_size])
        codes[:, place] = ((weight[:, place] / step).round() + zero).clamp(low, high)
        error = weight[:, place] - (codes[:, place] - zero) * step
        weight -= torch.outer(error, inverse[place] / inverse[place, place])
        inverse = inverse - torch.outer(inverse[:, place], inverse[place]) / inverse[place, place]
        inverse[place] = inverse[:, place] = 0
    return codes


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("width", [64, 192])
def test_codes_equal_the_naive_twins(grid: WeightGrid, width: int) -> None:
    weight, hessian = inputs(width)
    codes = quantize_layer(weight, hessian, grid)
    assert torch.equal(codes.codes_OI.double(), naive_codes(weight, hessian, grid))
    assert codes.step_G.numel() == grid.num_groups(weight.shape)


def test_independent_inputs_are_rounded_to_the_nearest() -> None:
    weight, _ = inputs(64)
    grid = WeightGrid(bits=4, symmetric=False)
    codes = quantize_layer(weight, torch.eye(64, dtype=torch.float64), grid)
    assert torch.equal(codes.codes_OI, grid.codes(weight, *grid.ranges(weight)).codes_OI)


def test_inputs_that_are_not_finite_are_refused() -> None:
    weight, hessian = inputs(64)
    with pytest.raises(ModelError, match="not finite or degenerate"):
        quantize_layer(weight, hessian * torch.nan, WeightGrid(bits=4))


@pytest.mark.parametrize(
    "grid", [WeightGrid(bits=4, granularity="group_32"), WeightGrid(bits=4, symmetric=False)], ids=str
)
def test_a_model_keeps_its_outputs_better_than_by_rounding(grid: WeightGrid) -> None:
    model = tiny_run.tiny_model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(5.0 if name.startswith("blocks") and parameter.dim() > 1 else 1.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    errors: dict[str, LayerError] = {}
    calibration = [tiny_run.Rows().batch(number) for number in range(4)]
    codes = gptq(model, calibration, grid, show=errors.__setitem__)
    assert list(errors) == list(codes) == [name for name in model.projections() if name in codes]
    assert len(codes) == len(model.projections())
    assert all(error.gptq < error.nearest for error in errors.values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    trained = TrainedGrid(weights=grid)
    batch = tiny_run.Rows().batch(50)
    with torch.no_grad():
        wanted = forward(model.eval(), batch)
        gaps = [
            (forward(quantize_to_grid(model, trained, codes=own, choose=_choose), batch) - wanted).square().mean()
            for own in (codes, None)
        ]
    assert gaps[0] < 0.8 * gaps[1]


def test_groups_that_do_not_divide_the_inputs_are_refused() -> None:
    model, grid = tiny_run.tiny_model(), WeightGrid(bits=4, granularity="group_128")
    message = "inputs of blocks.0.attention.q_proj do not divide into groups of 128; choose a smaller group"
    with pytest.raises(ConfigError, match=message):
        gptq(model, [tiny_run.Rows().batch(0)], grid)
    with pytest.raises(ConfigError, match=message):
        quantize_to_grid(model, TrainedGrid(weights=grid), choose=_choose)


def _choose(matrices):
    return choose_backend(Int8WeightsConfig(backend="int_mm"), matrices)


@pytest.mark.parametrize("tie", [True, False])
def test_embedding_and_head_of_a_four_bit_model_may_be_int8(tie: bool, tmp_path: Path) -> None:
    model = Decoder(replace(tiny_run.SHAPE, tie_embeddings=tie))
    model.init_weights(0)
    model.eval()
    grid = TrainedGrid(weights=WeightGrid(bits=4, granularity="group_32"), int8_ends=True)
    small = quantize_to_grid(model, grid, choose=_choose)
    assert torch.equal(small.embedding.weight, Int8Embedding(*quantize_rows(model.embedding.weight)).weight)
    assert isinstance(small.head, Int8Linear)
    save_grid_model(small, grid, tmp_path / "m")
    loaded = load_int8(tmp_path / "m", Int8WeightsConfig(backend="int_mm"))
    batch = tiny_run.Rows().batch(50)
    with torch.no_grad():
        hidden = [forward(one, batch) for one in (small, loaded)]
        logits = [one.logits(hidden[0]) for one in (small, loaded, model)]
    assert torch.equal(*hidden)
    assert torch.equal(*logits[:2])
    torch.testing.assert_close(logits[0], logits[2], rtol=0.05, atol=0.02 * float(logits[2].abs().max()))
