"""Measured times are those of the layers."""

import torch

from modelwright.data.rows.batch import TokenBatch
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.parallel.pipeline.balance import LayerCosts
from modelwright_claims.pipeline_utilisation import measure_layer_times

SHAPE = ModelConfig(
    vocab_size=64, num_layers=3, model_dim=16, num_heads=2, num_kv_heads=1, ffn_dim=32, head_dim=8, max_seq_len=32
)


def test_measured_times_see_the_slow_layer_and_leave_no_trace():
    torch.set_num_threads(1)
    model = Decoder(SHAPE)
    model.init_weights(0)
    tokens = torch.arange(64).reshape(2, 32)
    batch = TokenBatch(
        input_ids_BT=tokens, labels_BT=tokens, positions_BT=torch.arange(32).repeat(2, 1),
        segments_BT=torch.zeros(2, 32, dtype=torch.int32),
    )  # fmt: skip
    clock = [0.0]
    names = {id(block): float(number) for number, block in enumerate(model.blocks.values(), start=1)}

    def count(block, *_):
        clock[0] += names[id(block)]

    for block in model.blocks.values():
        block.register_forward_pre_hook(count)
    model.norm.register_forward_pre_hook(lambda *_: clock.__setitem__(0, clock[0] + 10))
    times = measure_layer_times(model, batch, num_repeats=2, clock=lambda: clock[0])
    assert times == LayerCosts(embedding=0.0, layers=(1.0, 2.0, 3.0), head=10.0)
    assert all(parameter.grad is None for parameter in model.parameters())
    real = measure_layer_times(model, batch)
    assert min(real.layers) > 0
    assert min(real.head, real.embedding) > 0
