"""Precision policies: settled once, kinds of layers, what stays in FP32."""

import pytest
import torch

from modelwright.core.config import ConfigError, parse
from modelwright.train.precision.policy import POLICIES, PrecisionConfig, resolve
from refusals import config_error


def test_fastest_is_the_higher_rate_and_fp32_on_a_tie():
    assert resolve(PrecisionConfig(), {"fp32": 1.0, "bf16": 2.0}).policy == "bf16_mixed"
    assert resolve(PrecisionConfig(), {"fp32": 2.0, "bf16": 1.0, "int8": 9.0}).policy == "fp32"
    assert resolve(PrecisionConfig(), {"bf16": 1.0, "fp32": 1.0}).policy == "fp32"


def test_a_settled_choice_is_left_alone():
    assert resolve(PrecisionConfig(policy="int8"), {"fp32": 9.0, "bf16": 1.0}).policy == "int8"


def test_an_unsettled_choice_is_an_error():
    with config_error("policy", match="measured rates"):
        resolve(PrecisionConfig(), {})
    with config_error("policy", match="resolve it"):
        _ = PrecisionConfig().formats


@pytest.mark.parametrize("policy", POLICIES)
def test_single_kinds_go_before_the_policy(policy):
    config = parse(
        PrecisionConfig, {"policy": policy, "overrides": {"head": "bf16", "attention": "fp8"}}, constants=True
    )
    usual = parse(PrecisionConfig, {"policy": policy}, constants=True).formats
    assert config.formats == {**usual, "head": "bf16", "attention": "fp8"}


def test_a_loss_scale_is_needed_where_gradients_pass_through_fp16():
    needing = {policy for policy in POLICIES if parse(PrecisionConfig, {"policy": policy}, constants=True).uses_fp16}
    assert needing == {"fp16_mixed", "pure_fp16"}
    assert parse(PrecisionConfig, {"policy": "fp8", "output_dtype": "fp16"}, constants=True).uses_fp16
    for given in (
        {"kind": "schedule", "schedule": [[0, 1.0]], "low_precision": "fp16"},
        {"kind": "rules", "candidates": ["fp16"]},
    ):
        assert parse(PrecisionConfig, {"policy": "bf16_mixed", "adaptive": given}, constants=True).uses_fp16
    unused = {"kind": "rules", "candidates": ["bf16"], "low_precision": "fp16"}
    assert not parse(PrecisionConfig, {"policy": "bf16_mixed", "adaptive": unused}, constants=True).uses_fp16
    assert parse(PrecisionConfig, {"policy": "fp8"}, constants=True).result_of["fp8"] == torch.bfloat16


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"fp32_ops": ["softmax", "reduction", "rope", "dropout"]}, "fp32_ops: 'dropout' is not one of"),
        ({"fp32_ops": ["norm"]}, "fp32_ops: softmax always stays in FP32: attention kernels"),
        ({"fp32_ops": ["softmax", "rope"]}, "fp32_ops: reduction always stays in FP32.*gradient_sync.kind bf16"),
        ({"overrides": {"head": "int8"}}, "overrides.head"),
        ({"fp8": {"recipe": "blockwise", "scaling": "delayed"}}, "fp8.scaling: delayed requires recipe tensorwise"),
        ({"fp8": {"amax_history_len": 0}}, "fp8.amax_history_len: must be at least 1"),
    ],
)
def test_what_cannot_be_is_named(given, said):
    with pytest.raises(ConfigError, match=said):
        parse(PrecisionConfig, given, constants=True)


@pytest.mark.parametrize("value", [True, "fast", 1.0])
def test_kernels_of_fp32_products_are_named(value):
    with config_error("fp32_matmul", "choice", match=r"^fp32_matmul: .* is not one of auto, default, onednn, tf32"):
        parse(PrecisionConfig, {"fp32_matmul": value})
