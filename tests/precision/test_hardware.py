"""Measured speeds of the formats: of every candidate, whatever the model computes in at the moment."""

from typing import get_args

import pytest
import torch

from modelwright.core.config import parse
from modelwright.ops.formats import Format
from modelwright.precision.hardware import measure_speeds
from modelwright.precision.model import ModelFormats
from modelwright.precision.policy import PrecisionConfig
from tiny_decoder import make_decoder


@pytest.mark.parametrize("policy", ["fp32", "bf16_mixed", "int8"])
def test_every_format_is_measured_from_every_policy(policy):
    formats = ModelFormats(make_decoder(), parse(PrecisionConfig, {"policy": policy}))
    candidates: tuple[Format, ...] = get_args(Format)
    shapes = {"attention": [(32, 32)], "ffn": [(64, 32), (32, 64)]}
    seconds = measure_speeds(formats, shapes, candidates, num_rows=16, device=torch.device("cpu"))  # type: ignore[arg-type]
    assert set(seconds) == {(kind, chosen) for kind in shapes for chosen in candidates}
    assert min(seconds.values()) > 0
