"""Precision policy: settled once, applied to products only."""

import pytest
import torch

from modelwright.core.errors import ConfigError
from modelwright.precision.policy import PrecisionConfig, autocast, compute_dtype, resolve

CPU = torch.device("cpu")


def test_fastest_is_the_higher_rate_and_fp32_on_a_tie():
    assert resolve(PrecisionConfig(), {"fp32": 1.0, "bf16": 2.0}).compute == "bf16"
    assert resolve(PrecisionConfig(), {"fp32": 2.0, "bf16": 1.0, "int8": 9.0}).compute == "fp32"
    assert resolve(PrecisionConfig(), {"bf16": 1.0, "fp32": 1.0}).compute == "fp32"


def test_a_settled_choice_is_left_alone():
    assert resolve(PrecisionConfig(compute="bf16"), {"fp32": 9.0, "bf16": 1.0}).compute == "bf16"


def test_an_unsettled_choice_is_an_error():
    with pytest.raises(ConfigError, match="measured rates"):
        resolve(PrecisionConfig(), {})
    with pytest.raises(ConfigError, match="resolve it"):
        compute_dtype(PrecisionConfig())


@pytest.mark.parametrize(("compute", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_products_run_in_the_format_and_gradients_stay_fp32(compute, dtype):
    linear = torch.nn.Linear(8, 8)
    with autocast(PrecisionConfig(compute=compute), CPU):
        out = linear(torch.randn(4, 8))
        assert out.dtype == dtype
        loss = out.float().square().sum()
    loss.backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.dtype == torch.float32
