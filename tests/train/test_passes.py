"""Passes: their order, names kept, results unchanged."""

import pytest
import torch

from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.mesh import build_mesh, single
from modelwright.train import parallelize
from modelwright.train.memory.activations import Segment
from modelwright.train.memory.checkpointing import checkpoint_segments
from modelwright.train.objective import forward
from modelwright.train.precision.policy import PrecisionConfig


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
