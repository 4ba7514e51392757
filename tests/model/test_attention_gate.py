"""Gated attention: the formula, generation, every layout, folders, and what must refuse it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch

from distributed import run_distributed
from modelwright.compress.gptq import gptq
from modelwright.compress.int8 import Int8WeightsConfig, load_int8, quantize_model, save_int8
from modelwright.compress.prune import prune
from modelwright.infer.generate import generate
from modelwright.infer.sequence import SamplingParams
from modelwright.model.adapters import projection_sizes
from modelwright.model.attention import causal_attend
from modelwright.model.decoder import AttentionGate, Decoder, Linear, ModelConfig
from modelwright.model.hf import load_model, save_model
from modelwright.ops.int_grid import WeightGrid
from modelwright.parallel.mesh import World, single
from modelwright.pipeline.exports.hf import export_hf
from modelwright.pipeline.models import FoundModel
from modelwright.serve.load import ModelSource
from modelwright.train.objective import forward
from modelwright.train.precision.apply import names_of_projections
from refusals import config_error

GATES: tuple[AttentionGate, ...] = ("head", "element")


def shape(gate: AttentionGate) -> ModelConfig:
    return replace(tiny_run.SHAPE, attention_gate=gate)


def gated_model(gate: AttentionGate, dtype: torch.dtype = torch.float32) -> Decoder:
    model = Decoder(shape(gate))
    model.init_weights(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(10.0 if name.startswith("blocks") and parameter.dim() > 1 else 1.0)
    return model.to(dtype).eval()


@pytest.mark.parametrize("gate", GATES)
def test_the_output_of_attention_is_gated(gate: AttentionGate) -> None:
    """Gradients included, against the product written out for each head."""
    model = gated_model(gate, torch.float64)
    attention = model.blocks["1"].attention
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cos, sin = model.rotary_tables(torch.arange(9).expand(2, -1))[:2]
    inner = causal_attend()
    linear: Linear = attention.output_gate
    plain = []

    def attend(*inputs: Any) -> torch.Tensor:
        plain.append(inner(*inputs))
        return plain[-1]

    found = attention(x, cos, sin, attend)
    gates = 1 / (1 + (-(x @ linear.weight.T)).exp())
    width = 1 if gate == "head" else 8
    heads = [plain[0][:, :, head] * gates[..., width * head : width * (head + 1)] for head in range(4)]
    expected = torch.cat(heads, dim=-1) @ attention.o_proj.weight.T
    torch.testing.assert_close(found, expected)
    ours, naive = (
        torch.autograd.grad(one.square().sum(), (linear.weight, attention.v_proj.weight), retain_graph=True)
        for one in (found, expected)
    )
    torch.testing.assert_close(ours, naive)
    assert linear.weight.shape == (width * 4, 32)


@pytest.mark.parametrize("gate", GATES)
def test_shapes_count_the_gate(gate: AttentionGate) -> None:
    model = gated_model(gate)
    assert model.config.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert set(names_of_projections(model.config)) == set(model.projections())
    sizes = {name: tuple(projection.weight.shape) for name, projection in model.projections().items()}
    assert projection_sizes(model.config) == sizes
    more = model.config.flops_per_token(8.0) - tiny_run.SHAPE.flops_per_token(8.0)
    assert more == 2 * 2 * 32 * model.config.gate_dim


@pytest.mark.parametrize("gate", GATES)
def test_generation_agrees_with_whole_rows(gate: AttentionGate) -> None:
    model, prompt = gated_model(gate), [5, 9, 40, 3]
    (completion,) = generate(model, [prompt], [SamplingParams(max_tokens=6, temperature=0.0)])
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad():
        logits = model.logits(model(ids, torch.arange(ids.shape[1])[None], causal_attend()))
    assert logits[0, 3:-1].argmax(-1).tolist() == list(completion.token_ids)


LAYOUTS: list[dict[str, Any]] = [{"tensor": 2}, {"zero_stage": 3}, {"pipeline": 2}, {"context": 2}]


def train(world: World, folder: Path, gate: AttentionGate, parallel: dict[str, Any]) -> dict[str, torch.Tensor]:
    return tiny_run.weights_of_layout(gated_model(gate, torch.float64), folder, world, parallel)


def on_two_ranks(world: World, folder: Path) -> list[dict[str, torch.Tensor]]:
    return [train(world, folder / str(number), GATES[number % 2], one) for number, one in enumerate(LAYOUTS)]


@pytest.mark.slow
def test_every_layout_trains_it_alike(tmp_path: Path) -> None:
    alone = {gate: train(single(), tmp_path / gate, gate, {}) for gate in GATES}
    start = gated_model("head", torch.float64).state_dict()
    name = "blocks.0.attention.output_gate.weight"
    assert not torch.equal(alone["head"][name], start[name])
    for rank in run_distributed(on_two_ranks, 2, tmp_path):
        for number, found in enumerate(rank):
            for name, value in alone[GATES[number % 2]].items():
                torch.testing.assert_close(value, found[name], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("gate", GATES)
def test_folders_keep_it_and_the_export_refuses_it(gate: AttentionGate, tmp_path: Path) -> None:
    model = gated_model(gate)
    save_model(model, tmp_path / "m")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["model_type"] == "modelwright"
    loaded = load_model(tmp_path / "m")
    assert loaded.config == model.config
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    found = FoundModel(ModelSource(name="m", folder=tmp_path / "m"))
    with config_error("model.attention_gate"):
        export_hf(found, tmp_path / "exported", overwrite=False)
    assert not (tmp_path / "exported").exists()
    with config_error("hf_type", match="a gemma2 cannot have all features of this model"):
        save_model(Decoder(replace(model.config, hf_type="gemma2")), tmp_path / "other")


@pytest.mark.parametrize("gate", GATES)
def test_smaller_formats_take_it(gate: AttentionGate, tmp_path: Path) -> None:
    model, batch = gated_model(gate), tiny_run.Rows().batch(3)
    config = Int8WeightsConfig(backend="int_mm")
    int8 = quantize_model(model, config)
    save_int8(int8, tmp_path)
    with torch.no_grad():
        assert torch.equal(forward(load_int8(tmp_path, config), batch), forward(int8, batch))
    assert "blocks.0.attention.output_gate" in gptq(model, [batch], WeightGrid(bits=4))
    smaller = prune(model, replace(model.config, num_heads=2, num_kv_heads=1), {})
    with torch.no_grad():
        for block in model.blocks.values():
            block.attention.o_proj.weight.zero_()
        for block in smaller.blocks.values():
            block.attention.o_proj.weight.zero_()
        torch.testing.assert_close(forward(smaller, batch), forward(model, batch))
