"""Time of operators, against the FLOPs that the memory planner counts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelwright.model.decoder import ModelConfig
from modelwright.train.memory.activations import (
    OPERATORS,
    ActivationCheckpointingConfig,
    block_shape,
    total_recomputed_flops,
)
from modelwright.train.memory.checkpointing import segments_for
from modelwright_plan.catalog import DEVICES
from modelwright_plan.step_time import ComputeRate, block_time, head_time, operator_seconds, recomputed_s

MODEL = ModelConfig(
    vocab_size=32_000, num_layers=4, model_dim=2048, num_heads=16, num_kv_heads=4, head_dim=128, ffn_dim=5632,
    max_seq_len=2048,
)  # fmt: skip
SHAPE = block_shape(MODEL, compute="bf16", mean_context=1024)
NO_MEMORY = ComputeRate(peak_flops_per_s=1e12, product_share=0.5, attention_share=0.5, source="")
H100 = DEVICES["h100"].rate("bf16", name="h100")


def test_without_memory_time_is_flops_over_the_rate():
    one = block_time(SHAPE, 100, NO_MEMORY)
    assert one.forward_s == pytest.approx(100 * SHAPE.forward_flops / 0.5e12)
    attend_s = 100 * SHAPE.flops("attend") / 0.5e12
    assert one.total_s == pytest.approx(3 * one.forward_s + 0.5 * attend_s)  # five products of attention, not four
    head = head_time(2048, 32_000, 100, NO_MEMORY, width=2)
    assert head.total_s == pytest.approx(3 * 100 * 2 * 2048 * 32_000 / 0.5e12)


@pytest.mark.parametrize(
    "config",
    [
        ActivationCheckpointingConfig(),
        ActivationCheckpointingConfig(mode="full", layers_per_segment=3),
        ActivationCheckpointingConfig(mode="selective"),
        ActivationCheckpointingConfig(mode="selective", save_outputs_of=("q_proj", "attend")),
    ],
)
def test_recomputation_is_that_of_the_memory_planner(config):
    segments = segments_for(config, MODEL.num_layers, shape=SHAPE, num_tokens=64)
    expected = 64 * total_recomputed_flops(SHAPE, segments) / 0.5e12
    assert recomputed_s(SHAPE, segments, 64, NO_MEMORY) == pytest.approx(expected)


@given(tokens=st.integers(1, 2**16), inputs=st.integers(1, 2**15), outputs=st.integers(1, 2**15))
def test_a_product_reaches_at_most_its_share_and_more_of_it_the_larger_it_is(tokens, inputs, outputs):
    def reached(scale: int) -> float:
        flops = 2 * tokens * inputs * outputs * scale**3
        return flops / H100.product_s(scale * tokens, scale * inputs, scale * outputs, width=2) / H100.peak_flops_per_s

    assert reached(1) < reached(2) < H100.product_share


def test_tensor_and_sequence_parallelism_divide_the_work():
    half = block_shape(MODEL, compute="bf16", mean_context=1024, tensor=2, sequence_parallel=True)
    whole, divided = operator_seconds(SHAPE, 4096, H100), operator_seconds(half, 4096, H100)
    assert divided["elementwise"] == pytest.approx(whole["elementwise"] / 2)
    assert whole["q_proj"] / 2 < divided["q_proj"] < whole["q_proj"]  # each rank reads the whole input
    replicated = block_shape(MODEL, compute="bf16", mean_context=1024, tensor=2)
    assert operator_seconds(replicated, 4096, H100)["elementwise"] > divided["elementwise"]


def test_products_in_fp8_gain_less_than_their_peak():
    fp8 = DEVICES["h100"].rate("fp8", name="h100")
    assert fp8.attention_share * fp8.peak_flops_per_s == pytest.approx(H100.attention_share * H100.peak_flops_per_s)
    gain = block_time(SHAPE, 16_384, H100).total_s / block_time(SHAPE, 16_384, fp8).total_s
    assert 1.1 < gain < 1979 / 989
    free = replace(fp8, cast_bytes=0.0)
    assert block_time(SHAPE, 16_384, free).total_s < block_time(SHAPE, 16_384, fp8).total_s
    assert set(operator_seconds(SHAPE, 1, H100)) == {*OPERATORS, "down_proj", "elementwise"}
