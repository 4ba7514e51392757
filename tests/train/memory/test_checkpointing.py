"""Activation checkpointing: equal gradients, the bytes and FLOPs that the formulas say."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from modelwright.core.config import ConfigError
from modelwright.model.adapters import attach_adapters
from modelwright.model.attention import causal_attend, packed_attend
from modelwright.model.decoder import AttentionConfig, Decoder, FeedForwardConfig, ModelConfig, NormConfig
from modelwright.model.low_rank import AdapterConfig
from modelwright.ops import cpu_kernels, matmul
from modelwright.ops.attention import packed_cuts
from modelwright.train.memory import checkpointing as selective
from modelwright.train.memory.activations import (
    OPERATORS,
    ActivationCheckpointingConfig,
    Segment,
    block_shape,
    total_kept_bytes,
    total_recomputed_flops,
)
from modelwright.train.memory.checkpointing import checkpoint_segments, remove_checkpoints, segments_for
from modelwright.train.precision.apply import ModelPrecision
from modelwright.train.precision.policy import PrecisionConfig
from refusals import config_error

CONFIG = ModelConfig(
    vocab_size=50, num_layers=5, model_dim=32, num_heads=4, num_kv_heads=2, ffn_dim=96, head_dim=8, max_seq_len=64
)
GEMMA = replace(
    CONFIG,
    attention=AttentionConfig(qkv_bias=True, output_bias=True, window=16, window_layers=(0, 1, 2)),
    norms=NormConfig(post_norms=True, one_plus_weight=True),
    feed_forward=FeedForwardConfig(activation="gelu_tanh", bias=True),
    embedding_scale=2.0,
)
"""What other model types add to a block."""
NO_ADAPTERS = AdapterConfig()
ROWS, LENGTH = 2, 64
TOKENS = ROWS * LENGTH
SEGMENTS = (torch.arange(LENGTH) // 40).int().repeat(ROWS, 1)
CONFIGS = {
    "unit of 1": ActivationCheckpointingConfig(mode="full", layers_per_segment=1),
    "unit of 2": ActivationCheckpointingConfig(mode="full", layers_per_segment=2),
    "unit of 8": ActivationCheckpointingConfig(mode="full"),
    "all products": ActivationCheckpointingConfig(mode="selective"),
    "two operators": ActivationCheckpointingConfig(mode="selective", save_outputs_of=("attend", "gate_proj")),
    "wide budget": ActivationCheckpointingConfig(mode="budget", budget_bytes=1_000_000),
    "narrow budget": ActivationCheckpointingConfig(mode="budget", budget_bytes=700_000),
}


class Storages:
    """Bytes of distinct storages that autograd and selective checkpointing keep, weights left out."""

    def __init__(self, model: Decoder) -> None:
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.saved: dict[int, torch.Tensor] = {}
        self.caches = []

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self.saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def contexts(self, policy):
        made = selective_contexts(policy)
        self.caches.append(made[0].storage)
        return made

    def num_bytes(self) -> int:
        for cache in self.caches:
            for entries in cache.values():
                for entry in entries.values() if isinstance(entries, dict) else entries:  # as PyTorch 2.11 keeps them
                    torch.utils._pytree.tree_map(lambda held: hasattr(held, "val") and self.keep(held.val), entry)
        return sum(x.untyped_storage().nbytes() for at, x in self.saved.items() if at not in self.weights)


selective_contexts = selective.create_selective_checkpoint_contexts


def run(config, *, compute="fp32", attend=None, decoder=CONFIG, adapters=NO_ADAPTERS):
    """Gradients, bytes kept, FLOPs of backward, and the segments."""
    model = Decoder(decoder)
    model.init_weights(3)
    attach_adapters(model, adapters, 0)
    for projection in model.projections().values():
        if projection.frozen is not None:
            projection.frozen.chunk_elements = 1024  # several blocks of rows
    names = list(model.state_dict())
    shape = block_shape(decoder, compute=compute, mean_context=0, fused=cpu_kernels.are_used_on("cpu"))
    segments = segments_for(config, decoder.num_layers, shape=shape, num_tokens=TOKENS)
    checkpoint_segments(model, segments)
    ModelPrecision(model, PrecisionConfig(policy="bf16_mixed" if compute == "bf16" else "fp32"))
    assert list(model.state_dict()) == names
    tokens = torch.arange(TOKENS).view(ROWS, LENGTH) % 50
    positions = torch.arange(LENGTH).repeat(ROWS, 1)
    attend = attend or packed_attend(SEGMENTS, decoder.windows)
    storages = Storages(model)
    with (
        torch.autograd.graph.saved_tensors_hooks(storages.keep, lambda tensor: tensor),
        mock.patch.object(selective, "create_selective_checkpoint_contexts", storages.contexts),
    ):
        hidden = model(tokens, positions, attend)
    num_bytes = storages.num_bytes()
    with FlopCounterMode(display=False) as counter:
        (hidden * torch.linspace(-1, 1, 32)).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    return gradients, num_bytes, counter.get_total_flops(), shape, segments


@pytest.mark.slow
@pytest.mark.parametrize("own_kernels", [True, False])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_gradients_are_equal_and_bytes_and_flops_are_those_of_the_formulas(compute, own_kernels, monkeypatch):
    """The last product of a block is spared where it is one of PyTorch's own, hence with instructions for BF16."""
    monkeypatch.setattr(matmul, "CPU_MULTIPLIES", matmul.NARROW)
    if not own_kernels:
        monkeypatch.setenv(cpu_kernels.SWITCH, "0")
    plain, _, flops, _, _ = run(ActivationCheckpointingConfig(), compute=compute)
    ids, tables, norm = 8 * TOKENS, 2 * TOKENS * CONFIG.head_dim * 4, 4 * TOKENS * (32 + 1)
    cuts = packed_cuts(SEGMENTS)
    bias = cuts.bias.nbytes + cuts.bounds_P5.nbytes
    for name, config in {"none": ActivationCheckpointingConfig(), **CONFIGS}.items():
        gradients, num_bytes, again, shape, segments = run(config, compute=compute)
        assert all(torch.equal(a, b) for a, b in zip(plain, gradients, strict=True)), name
        num_plain = sum(not segment.recompute for segment in segments)
        beside = ids + tables + norm + bias * (num_plain > 0)
        assert num_bytes == pytest.approx(TOKENS * total_kept_bytes(shape, segments) + beside, rel=0.03), name
        assert again - flops == pytest.approx(TOKENS * total_recomputed_flops(shape, segments)), name


@pytest.mark.slow
@pytest.mark.parametrize("own_kernels", [True, False])
def test_blocks_of_other_types_are_recomputed_and_counted_too(own_kernels, monkeypatch):
    """Windows need no own bytes; tables, tiles and scales of 1 + weight are small beside the rest."""
    if not own_kernels:
        monkeypatch.setenv(cpu_kernels.SWITCH, "0")
    plain, num_plain, _, shape, segments = run(ActivationCheckpointingConfig(), decoder=GEMMA)
    assert num_plain == pytest.approx(TOKENS * total_kept_bytes(shape, segments), rel=0.08)
    for name, config in CONFIGS.items():
        gradients, *_ = run(config, decoder=GEMMA)
        assert all(torch.equal(a, b) for a, b in zip(plain, gradients, strict=True)), name


def test_budget_holds_and_is_used():
    """Bytes kept and FLOPs fall and rise as the budget narrows; too narrow a one says what would do."""
    shape = block_shape(CONFIG, compute="fp32", mean_context=0)
    wide, tight = (
        segments_for(CONFIGS[name], 5, shape=shape, num_tokens=TOKENS) for name in ("wide budget", "narrow budget")
    )
    assert 0 < total_recomputed_flops(shape, wide) < total_recomputed_flops(shape, tight)
    assert total_kept_bytes(shape, wide) > total_kept_bytes(shape, tight)
    with config_error("budget_bytes", match=r"^budget_bytes: 1000 .* minimum is about \d+"):
        segments_for(ActivationCheckpointingConfig(mode="budget", budget_bytes=1000), 5, shape=shape, num_tokens=TOKENS)


def test_attention_of_other_kinds_is_kept_too():
    """Outside packed rows attention is PyTorch's own operator."""
    plain = run(ActivationCheckpointingConfig(), attend=causal_attend())
    kept = run(ActivationCheckpointingConfig(mode="selective"), attend=causal_attend())
    without = run(
        ActivationCheckpointingConfig(mode="selective", save_outputs_of=OPERATORS[:3]), attend=causal_attend()
    )
    assert all(torch.equal(a, b) for a, b in zip(plain[0], kept[0], strict=True))
    assert plain[2] == kept[2] < without[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapters", "changes"),
    [
        (NO_ADAPTERS, {}),
        (AdapterConfig(r=4), {"attention_gate": "head", "head_budget": 0.5}),
        (AdapterConfig(r=4, use_dora=True, target_modules=("v_proj", "up_proj")), {"head_budget": 0.5}),
        (AdapterConfig(r=4, use_dora=True, base_format="nf4"), {"attention_gate": "element"}),
    ],
    ids=["plain", "LoRA, gate and router", "DoRA of some, router", "DoRA, packed, gate"],
)
def test_each_operator_can_be_kept_by_itself(adapters, changes):
    """What is spared is that operator's own FLOPs; attention's are not counted by torch."""
    settings = {"adapters": adapters, "decoder": replace(CONFIG, **changes)}
    nothing = run(ActivationCheckpointingConfig(mode="full", layers_per_segment=1), **settings)
    for operator in OPERATORS:
        one = run(ActivationCheckpointingConfig(mode="selective", save_outputs_of=(operator,)), **settings)
        assert all(torch.equal(a, b) for a, b in zip(nothing[0], one[0], strict=True)), operator
        spared = one[3].flops(operator) * TOKENS * CONFIG.num_layers
        assert nothing[2] - one[2] == pytest.approx(spared), operator
        assert one[1] - nothing[1] == one[3].output_bytes(operator) * TOKENS * CONFIG.num_layers, operator


def test_last_unit_is_shorter_and_the_model_becomes_plain_again():
    segments = segments_for(
        CONFIGS["unit of 2"], 5, shape=block_shape(CONFIG, compute="fp32", mean_context=0), num_tokens=1
    )
    assert [segment.num_layers for segment in segments] == [2, 2, 1]
    model = Decoder(CONFIG)
    checkpoint_segments(model, segments)
    assert "run_blocks" in vars(model)
    remove_checkpoints(model)
    assert "run_blocks" not in vars(model)
    assert all("forward" not in vars(block) for block in model.blocks.values())


def test_a_part_of_the_layers_keeps_its_names():
    """What a pipeline stage holds."""
    model = Decoder(CONFIG)
    for layer in ("0", "1", "4"):
        del model.blocks[layer]
    checkpoint_segments(model, [Segment(num_layers=2, recompute=True)])
    assert {name.split(".")[1] for name in model.state_dict() if name.startswith("blocks")} == {"2", "3"}
    model(torch.zeros(1, 4, dtype=torch.int64), torch.arange(4)[None], causal_attend()).sum().backward()
    assert model.blocks["2"].ffn.up_proj.weight.grad.abs().sum() > 0


def test_wrong_settings_name_their_field():
    for settings, field in (
        ({"mode": "full", "layers_per_segment": 0}, "layers_per_segment"),
        ({"mode": "selective", "save_outputs_of": ()}, "save_outputs_of"),
        ({"mode": "selective", "save_outputs_of": ("attend", "attend")}, "save_outputs_of"),
        ({"mode": "budget"}, "budget_bytes"),
        ({"budget_bytes": 5}, "budget_bytes"),
    ):
        with pytest.raises(ConfigError, match=f"^{field}: "):
            ActivationCheckpointingConfig(**settings)


def test_a_policy_that_is_asked_again_gives_the_same_answers() -> None:
    """As PyTorch 2.11 does when it recomputes: it would otherwise compute again what it has saved."""
    asked = []
    with mock.patch.object(selective, "create_selective_checkpoint_contexts", asked.append):
        selective.contexts_keeping(["q_proj", "gate_proj"], Decoder(CONFIG).blocks["0"])()
    (policy,) = asked
    linear = mock.Mock()
    linear.name.return_value = "aten::mm"
    answers = [[policy(mock.Mock(is_recompute=again), linear) for _ in range(7)] for again in (False, True)]
    assert answers[0] == answers[1]
    assert answers[0].count(selective.CheckpointPolicy.MUST_SAVE) == 2
