"""Passes: their order, names kept, results unchanged."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention

from modelwright.model.attention import fused_attend
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.parallel.mesh import ParallelConfig, build_mesh, single
from modelwright.train import config, parallelize
from modelwright.train.config import TrainConfig
from modelwright.train.memory.activations import Segment
from modelwright.train.memory.checkpointing import checkpoint_segments
from modelwright.train.objective import forward
from modelwright.train.precision.apply import ModelPrecision
from modelwright.train.precision.policy import AdaptiveConfig, Fp8Config, PrecisionConfig

pytestmark = pytest.mark.slow

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("bf16_mixed", "fp8:rowwise", "fp8:blockwise")]


def test_compile_comes_after_activation_checkpointing(tiny, monkeypatch):
    order = []
    monkeypatch.setattr(parallelize, "compile_each_block", lambda model: order.append("compile") or model)
    parallelize.apply_passes(
        tiny.tiny_model(),
        mesh=build_mesh(single(), ParallelConfig()),
        parallel=ParallelConfig(),
        activations=lambda model: order.append("checkpoint") or model,
        compile_blocks=True,
        precision=PrecisionConfig(policy="fp32"),
    )
    assert order == ["checkpoint", "compile"]


@pytest.mark.filterwarnings("ignore")  # torch.compile warns about its own internals
def test_compiled_blocks_give_the_same_gradients_under_the_same_names(tiny):
    """With the tracing back end: graphs are captured and differentiated, only the C++ compiler stays out."""
    plain, compiled = tiny.tiny_model(), tiny.tiny_model()
    checkpoint_segments(compiled, [Segment(num_layers=1, recompute=True), Segment(num_layers=1, recompute=False)])
    parallelize.compile_each_block(compiled, backend="aot_eager")
    assert list(compiled.state_dict()) == list(plain.state_dict())
    batch = tiny.Rows().batch(0)
    for model in (plain, compiled):
        forward(model, batch).square().mean().backward()
    for ours, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-6)
    assert all(block._compiled_call_impl is not None for block in compiled.blocks.values())
    parallelize.remove_passes(compiled)
    assert all("forward" not in vars(block) and block._compiled_call_impl is None for block in compiled.blocks.values())


@pytest.mark.filterwarnings("ignore")  # torch.compile warns about its own internals
@pytest.mark.parametrize("policy", ["fp32", "int8", "fp8:tensorwise", *SLOW])
def test_a_compiled_step_has_no_graph_break_and_ragged_batches_share_one_graph(policy, monkeypatch):
    """Attention as on CUDA; all blocks run the graph of the first one."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)  # it refuses gradients on a CPU
    shape = ModelConfig(vocab_size=32, num_layers=2, model_dim=32, num_heads=2, num_kv_heads=1, ffn_dim=32, head_dim=16,
                        max_seq_len=160)  # fmt: skip
    model = Decoder(shape)
    model.init_weights(seed=0)
    name, _, recipe = policy.partition(":")
    ModelPrecision(model, PrecisionConfig(policy=name, fp8=Fp8Config(recipe=recipe or "tensorwise")))
    torch.compiler.reset()
    counters.clear()
    parallelize.compile_each_block(model, backend="eager")
    draw = torch.Generator().manual_seed(0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            lengths = torch.randint(1, 60, (2, 160), generator=draw)
            segments = torch.stack([torch.repeat_interleave(torch.arange(160), row)[:160] for row in lengths])
            tokens = torch.randint(32, (2, 160), generator=draw)
            hidden = model(tokens, torch.arange(160).expand(2, 160), fused_attend(segments, shape.windows))
            hidden.float().square().mean().backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    torch.compiler.reset()


def test_blocks_are_compiled_on_cuda_unless_a_setting_needs_them_uncompiled(monkeypatch):
    monkeypatch.setattr(config, "triton_compiles", lambda: True)
    plain, alone = TrainConfig(num_steps=1), ParallelConfig()
    assert plain.compiles("cuda", alone)
    assert not plain.compiles("cpu", alone)
    assert not plain.compiles("cuda", ParallelConfig(pipeline=2, schedule="zero_bubble"))
    adaptive = PrecisionConfig(policy="bf16_mixed", adaptive=AdaptiveConfig(kind="rules"))
    assert not TrainConfig(num_steps=1, precision=adaptive).compiles("cuda", alone)
    assert TrainConfig(num_steps=1, compile=True).compiles("cpu", alone)
    assert not TrainConfig(num_steps=1, compile=False).compiles("cuda", alone)
    # Compiled or not, it is the same run: one that began on a GPU can go on without.
    assert TrainConfig(num_steps=1, compile=True).identity() == plain.identity()
