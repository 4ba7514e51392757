"""Activations in the host's memory: what goes, what stays, and that it comes back."""

import pytest
import torch
from torch import nn

from modelwright.core.errors import ConfigError
from modelwright.memory import offload
from modelwright.memory.activations import Segment
from modelwright.memory.checkpointing import checkpoint_segments, remove_checkpoints
from modelwright.model.attention import causal_attend
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder

CONFIG = ModelConfig(
    vocab_size=64, num_layers=3, model_dim=64, num_heads=4, num_kv_heads=2, ffn_dim=192, head_dim=16, max_seq_len=256
)


def test_a_model_on_the_host_is_refused():
    with pytest.raises(ConfigError, match="lies there already"):
        checkpoint_segments(Decoder(CONFIG), [Segment(num_layers=3, recompute=True)], offload=True)


def test_activations_go_weights_and_shared_tensors_stay(monkeypatch):
    gone = []
    monkeypatch.setattr(offload, "to_host", lambda t: gone.append(t) or (t.clone(), t.device, ()))
    linear, inputs, table = nn.Linear(256, 128, bias=False), torch.randn(500, 256, requires_grad=True), torch.ones(
        500, 128
    )  # fmt: skip
    small = torch.randn(4, requires_grad=True)
    with offload.offloading([linear], [table]):
        result = (linear(inputs) * table).sin().sum() + small.square().sum()
    assert sorted(tuple(t.shape) for t in gone) == [(500, 128), (500, 256)]
    result.backward()
    inputs_alone = inputs.detach().requires_grad_()
    (linear(inputs_alone) * table).sin().sum().backward()
    assert torch.equal(inputs.grad, inputs_alone.grad)


def test_values_come_back_unchanged():
    tensor = torch.randn(3, 5).t()
    host, device, layout = offload.to_host(tensor)
    assert host.data_ptr() != tensor.data_ptr()
    assert torch.equal(offload.from_host(host, device, layout), tensor)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="offload needs an accelerator")
@pytest.mark.parametrize("segments", [[(1, False)] * 3, [(1, True)] * 3, [(3, True)]])
def test_gradients_are_equal_and_the_device_holds_less(segments):
    def gradients_and_bytes(offloads):
        model = Decoder(CONFIG).cuda()
        model.init_weights(0)
        made = [Segment(num_layers=count, recompute=recompute) for count, recompute in segments]
        checkpoint_segments(model, made, offload=offloads)
        before = torch.cuda.memory_allocated()
        tokens = torch.arange(1024, device="cuda").view(4, 256) % 64
        hidden = model(tokens, torch.arange(256, device="cuda").repeat(4, 1), causal_attend())
        held = torch.cuda.memory_allocated() - before
        hidden.square().sum().backward()
        remove_checkpoints(model)
        return [p.grad for p in model.parameters()], held

    (here, all_bytes), (there, few_bytes) = gradients_and_bytes(False), gradients_and_bytes(True)
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
    assert few_bytes < all_bytes
