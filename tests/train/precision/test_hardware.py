"""Measured speeds of the formats: of every candidate, whatever the model computes in at the moment."""

from typing import get_args

import pytest
import torch

from modelwright.core.config import parse
from modelwright.ops.lowp_linear import Format
from modelwright.train.precision import apply, controllers
from modelwright.train.precision.apply import ModelPrecision
from modelwright.train.precision.controllers import measure_speeds, onednn_speed_up
from modelwright.train.precision.policy import PrecisionConfig
from tiny_decoder import make_decoder


@pytest.mark.parametrize("policy", ["fp32", "bf16_mixed", "int8"])
def test_every_format_is_measured_from_every_policy(policy):
    formats = ModelPrecision(make_decoder(), parse(PrecisionConfig, {"policy": policy}, constants=True))
    candidates: tuple[Format, ...] = get_args(Format)
    shapes = {"attention": [(32, 32)], "ffn": [(64, 32), (32, 64)]}
    seconds = measure_speeds(formats, shapes, candidates, num_rows=16, device=torch.device("cpu"))  # type: ignore[arg-type]
    assert set(seconds) == {(kind, chosen) for kind in shapes for chosen in candidates}
    assert min(seconds.values()) > 0


@pytest.mark.parametrize("refused_by", ["onednn_multiplies", "_products_are_exact"])
def test_products_that_are_rounded_or_not_onednns_are_never_faster(monkeypatch, refused_by):
    for check in ("onednn_multiplies", "_products_are_exact"):
        monkeypatch.setattr(apply, check, lambda check=check: check != refused_by)
    assert onednn_speed_up([(32, 32)], num_rows=16) == 0.0


def test_the_speed_up_of_onednn_is_of_the_best_times_of_all_shapes(monkeypatch):
    """The first time of each is a slow one; only oneDNN's are asked for at that precision."""
    for check in ("onednn_multiplies", "_products_are_exact"):
        monkeypatch.setattr(apply, check, lambda: True)
    seen = []

    def seconds(x_NI, weight_OI):
        seen.append((tuple(weight_OI.shape), torch.get_float32_matmul_precision() == "medium"))
        return (9.0 if seen.count(seen[-1]) == 1 else 1.0) * weight_OI.numel() / (4 if seen[-1][1] else 1)

    monkeypatch.setattr(controllers, "_product_seconds", seconds)
    assert onednn_speed_up([(32, 32), (64, 32)], num_rows=16) == pytest.approx(4.0)
    assert {one for one, _ in seen} == {(32, 32), (64, 32)}
