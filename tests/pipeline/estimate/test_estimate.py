from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from modelwright.model.adapters import attach_adapters, merge_adapters
from modelwright.model.attention import causal_attend
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.model.low_rank import AdapterConfig
from modelwright.pipeline.estimate.cost import (
    ASSUMED_FORWARD_MFU,
    ASSUMED_OTHER_WORK,
    data_stage,
    duration,
    plan_text,
    scoring_stage,
    size,
    training_memory,
    training_stage,
)
from modelwright.train.memory.activations import ActivationCheckpointingConfig
from modelwright.train.optim.build import orthogonal, update_flops
from modelwright.train.work import adapter_step_flops

EACH = ActivationCheckpointingConfig(mode="full", layers_per_segment=1)
SHAPE = {
    "vocab_size": 4096,
    "num_layers": 4,
    "model_dim": 192,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 32,
    "ffn_dim": 512,
    "max_seq_len": 256,
}


def small_model() -> Decoder:
    shape = {"vocab_size": 96, "num_layers": 3, "model_dim": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    decoder = Decoder(ModelConfig(**shape, ffn_dim=40, max_seq_len=64))
    decoder.init_weights(0)
    return decoder


def counted_flops(model: Decoder, *, backward: bool) -> int:
    """FLOPs that torch counts over 2 x 16 tokens, attention over all of 16 positions."""
    ids = torch.arange(32).view(2, 16)

    def attend(layer, q_BTHd, k_BTKd, v_BTKd):
        k_BTHd, v_BTHd = (x.repeat_interleave(2, dim=2) for x in (k_BTKd, v_BTKd))
        scores = torch.einsum("bthd,bshd->bhts", q_BTHd, k_BTHd)
        return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v_BTHd)

    with FlopCounterMode(display=False) as counter:
        logits = model.logits(model(ids, torch.arange(16).expand(2, 16), attend))
        if backward:
            logits.square().sum().backward()
    return counter.get_total_flops()


def test_flops_of_adapters_are_what_torch_counts() -> None:
    model, config = small_model(), AdapterConfig(r=1)
    whole = 3 * 32 * model.config.flops_per_token(16)
    attach_adapters(model, config, 0)
    wanted = whole + adapter_step_flops(model.config, config, num_tokens=32, num_targets=32)
    assert wanted < 0.85 * whole
    # the embedding is frozen, so that nothing is passed back from the first queries, keys and values and their adapters
    not_passed_back = 2 * 32 * 24 * (32 + 16 + 16 + 3)
    assert counted_flops(model, backward=True) == pytest.approx(wanted - not_passed_back, rel=5e-3)


def test_flops_are_what_torch_counts() -> None:
    model = small_model()
    forward = 32 * model.config.flops_per_token(16)
    assert counted_flops(model, backward=False) == pytest.approx(forward, rel=1e-3)
    assert counted_flops(model, backward=True) == pytest.approx(3 * forward, rel=2e-2)


def test_parameters_are_counted() -> None:
    model = small_model()
    assert model.config.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    hidden = model(torch.zeros(1, 4, dtype=torch.int64), torch.arange(4)[None], causal_attend())
    assert hidden.shape == (1, 4, 24)


def test_checkpointing_costs_time_and_saves_memory() -> None:
    model = ModelConfig(**SHAPE)
    settings = {
        "num_steps": 10,
        "batch_tokens": 8192,
        "num_microbatches": 2,
        "mean_context": 100.0,
        "compute": "fp32",
        "flops_per_s": 1e11,
        "fp32_flops_per_s": 5e10,
    }
    plain = training_stage("pretrain", model, activations=ActivationCheckpointingConfig(), **settings)
    wrapped = training_stage("pretrain", model, activations=EACH, **settings)
    assert plain.seconds - plain.overhead_s == pytest.approx(plain.flops * (1 / 1e11 + ASSUMED_OTHER_WORK / 5e10))
    assert plain.flops == wrapped.flops
    assert 1.1 < (wrapped.seconds - wrapped.overhead_s) / (plain.seconds - plain.overhead_s) < 4 / 3
    assert wrapped.peak_bytes < plain.peak_bytes
    quarter = training_stage(
        "pretrain", model, activations=ActivationCheckpointingConfig(), **{**settings, "num_microbatches": 8}
    )
    assert quarter.peak_bytes < plain.peak_bytes


def test_time_counts_what_products_leave_out() -> None:
    """Faster products leave the rest of a step as it is; evaluations and Muon's own products take time, too."""
    steps = partial(
        training_stage,
        "pretrain",
        ModelConfig(**SHAPE),
        num_steps=100,
        batch_tokens=2048,
        num_microbatches=1,
        mean_context=64.0,
        compute="bf16",
        activations=ActivationCheckpointingConfig(),
        fp32_flops_per_s=1e11,
    )
    slow, fast = steps(flops_per_s=1e11), steps(flops_per_s=4e11)
    products_s = slow.flops / 1e11
    assert slow.seconds - fast.seconds == pytest.approx(0.75 * products_s)
    evaluated = steps(flops_per_s=1e11, validation_tokens=1e6)
    forward_s = 1e6 * ModelConfig(**SHAPE).flops_per_token(64.0) / 1e11
    assert evaluated.overhead_s - slow.overhead_s == pytest.approx(forward_s / ASSUMED_FORWARD_MFU)
    assert evaluated.seconds - evaluated.overhead_s == pytest.approx(slow.seconds - slow.overhead_s)
    assert steps(flops_per_s=1e11, update_flops=1e9).seconds - slow.seconds == pytest.approx(1.0)


def test_the_flops_of_muon_are_what_torch_counts() -> None:
    for rows, columns in ((24, 40), (40, 24), (16, 16)):
        with FlopCounterMode(display=False) as counter:
            orthogonal(torch.randn(1, rows, columns))
        assert counter.get_total_flops() == update_flops(rows, columns)


def test_bf16_keeps_less_than_fp32() -> None:
    settings = {"tokens_per_microbatch": 4096, "activations": ActivationCheckpointingConfig()}
    model = ModelConfig(**SHAPE)
    narrow, wide = (training_memory(model, compute=compute, **settings) for compute in ("bf16", "fp32"))
    assert narrow.activations < 0.85 * wide.activations
    assert narrow.weights == wide.weights
    assert wide.checkpoint_copy == 3 * wide.weights


def test_plan_reads_well() -> None:
    model = ModelConfig(**SHAPE)
    stages = [
        data_stage("clean", num_bytes=20e6, bytes_per_s=2e6),
        scoring_stage(
            "evaluate", model, num_tokens=1e5, num_context_tokens=1e5, batch_tokens=4096, flops_per_s=1e11, mfu=0.5
        ),
    ]
    memory = training_memory(
        model, tokens_per_microbatch=2048, compute="fp32", activations=ActivationCheckpointingConfig()
    )
    text = plan_text(model, stages, {"pretrain": memory})
    assert f"{model.num_parameters:,}" in text
    assert "clean" in text
    assert "10 s" in text
    assert "memory of pretrain: " in text
    assert [duration(s) for s in (5, 600, 11_100)] == ["5 s", "10 min", "3 h 05 min"]
    assert [size(b) for b in (5, 3 * 2**20, 2.5 * 2**30)] == ["5 B", "3 MiB", "2.5 GiB"]


def test_adapters_shrink_what_training_needs() -> None:
    """The states of the planned run are those that training makes."""
    model = Decoder(ModelConfig(**SHAPE))
    model.init_weights(0)
    for base_format in ("full", "int8", "nf4"):
        config = AdapterConfig(r=8, use_dora=True, base_format=base_format)
        attach_adapters(model, config, 0)
        planned = training_memory(
            model.config, tokens_per_microbatch=512, compute="fp32", activations=EACH, adapters=config
        )
        assert planned.weights == pytest.approx(sum(one.nbytes for one in model.parameters()), rel=0.01)
        trained = sum(one.nbytes for one in model.parameters() if one.requires_grad)
        assert planned.optimizer == pytest.approx(2 * trained, rel=0.01)
        assert planned.checkpoint_copy == pytest.approx(3 * trained, rel=0.01)
        assert planned.gradients <= trained
        merge_adapters(model)
    whole = training_memory(model.config, tokens_per_microbatch=512, compute="fp32", activations=EACH)
    assert planned.total < whole.total - 3 * sum(one.nbytes for one in model.parameters())
