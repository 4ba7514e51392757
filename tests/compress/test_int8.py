"""INT8: backends against the naive twin, whole models, files, damage."""

import copy
import json

import pytest
import torch

from modelwright.compress.int8 import (
    Int8Linear,
    Int8WeightsConfig,
    int8_linear_naive,
    is_int8_folder,
    load_int8,
    quantize_model,
    quantize_rows,
    save_int8,
    usable_backends,
    weight_bytes,
)
from modelwright.core.config import ModelError
from modelwright.infer.engine import Engine, EngineConfig
from modelwright.infer.sequence import SamplingParams
from modelwright.model.attention import causal_attend
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.pipeline.stages.quantize import compare

BACKENDS = usable_backends()


def build(tie: bool = True) -> Decoder:
    config = ModelConfig(
        vocab_size=320, num_layers=2, model_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_dim=128,
        max_seq_len=96, init_std=0.1, tie_embeddings=tie,
    )  # fmt: skip
    model = Decoder(config)
    model.init_weights(1)
    return model.eval()


def tokens(rows: int = 3, length: int = 32) -> torch.Tensor:
    return torch.randint(0, 320, (rows, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [1, 3, 16, 33])
@pytest.mark.parametrize("shape", [(64, 48), (256, 96)])
def test_backend_equals_naive_twin(backend, rows, shape):
    generator = torch.Generator().manual_seed(0)
    width, height = shape
    weight = torch.randn(height, width, generator=generator) * 0.1
    weight[0] = 0
    x = torch.randn(rows, width, generator=generator) * torch.logspace(-3, 3, rows)[:, None]
    quantized, scale = quantize_rows(weight)
    assert int(quantized.abs().max()) <= 64
    fast = Int8Linear(quantized, scale, backend)(x)
    torch.testing.assert_close(fast, int8_linear_naive(x, quantized, scale), rtol=2e-5, atol=1e-6)
    reference = x @ weight.T
    error = ((fast - reference).norm(dim=1) / reference.norm(dim=1)).max()
    assert float(error) < 0.03


@pytest.mark.parametrize("backend", BACKENDS)
def test_largest_values_do_not_saturate(backend):
    weight, x = torch.ones(16, 512), torch.ones(2, 512)
    quantized, scale = quantize_rows(weight)
    torch.testing.assert_close(Int8Linear(quantized, scale, backend)(x), torch.full((2, 16), 512.0))
    torch.testing.assert_close(Int8Linear(quantized, scale, backend)(-x), torch.full((2, 16), -512.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_does_not_depend_on_its_neighbors(backend):
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(3))
    linear = Int8Linear(*quantize_rows(weight), backend)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(4))
    x[1] *= 1000
    assert torch.equal(linear(x)[:1], linear(x[:1]))


@pytest.mark.skipif("kernel" not in BACKENDS, reason="there are no kernels here")
def test_backends_agree_on_a_chunk_of_a_prompt_and_a_copied_layer_points_to_its_own_weights():
    generator = torch.Generator().manual_seed(3)  # a value in the middle between two codes may become either
    weight, x = torch.randn(70, 96, generator=generator), torch.randn(257, 96, generator=generator)
    codes, scale = quantize_rows(weight)
    found = [Int8Linear(codes, scale, backend)(x) for backend in BACKENDS]
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], rtol=2e-6, atol=1e-6)
    linear = Int8Linear(codes.clone(), scale, "kernel")
    copied = copy.deepcopy(linear)
    linear.quantized.zero_()
    assert torch.equal(copied(x), Int8Linear(codes, scale, "kernel")(x))


def test_zero_input_gives_zero():
    linear = Int8Linear(*quantize_rows(torch.randn(8, 16)), "int_mm")
    assert torch.equal(linear(torch.zeros(2, 3, 16)), torch.zeros(2, 3, 8))


@pytest.mark.parametrize("tie", [True, False])
def test_whole_model_is_small_and_close(tie):
    model = build(tie)
    int8 = quantize_model(model, Int8WeightsConfig())
    result = compare(model, int8, tokens(), shapes=((4, 1), (1, 8)))
    assert result.int8_bytes < result.reference_bytes * (0.3 if tie else 0.52)
    assert result.agreement.divergence < 0.02
    assert abs(result.agreement.int8_loss - result.agreement.reference_loss) < 0.05
    assert result.agreement.same_first > 0.8
    assert result.speed[0].ratio > 0
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("tie", [True, False])
def test_file_round_trip_is_exact(tie, tmp_path):
    int8 = quantize_model(build(tie), Int8WeightsConfig(backend="int_mm"))
    save_int8(int8, tmp_path / "m")
    loaded = load_int8(tmp_path / "m", Int8WeightsConfig(backend="int_mm"))
    assert is_int8_folder(tmp_path / "m")
    assert weight_bytes(loaded) == weight_bytes(int8)
    size = (tmp_path / "m" / "model.safetensors").stat().st_size
    assert size < weight_bytes(int8) + 8192
    positions = torch.arange(32).expand(3, -1)
    with torch.inference_mode():
        left, right = (m.logits(m(tokens(), positions, causal_attend())) for m in (int8, loaded))
    assert torch.equal(left, right)


def test_damage_is_named(tmp_path):
    with pytest.raises(ModelError, match="not an INT8 model folder"):
        load_int8(tmp_path, Int8WeightsConfig())
    folder = tmp_path / "m"
    save_int8(quantize_model(build(), Int8WeightsConfig(backend="int_mm")), folder)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ModelError, match="damaged"):
        load_int8(folder, Int8WeightsConfig())
    (folder / "model.safetensors").write_bytes(weights)
    description = json.loads((folder / "config.json").read_text())
    description["model"]["num_layers"] = 3
    (folder / "config.json").write_text(json.dumps(description))
    with pytest.raises(ModelError, match=r"blocks\.2"):
        load_int8(folder, Int8WeightsConfig())


def test_engine_runs_an_int8_model_the_same_alone_and_in_a_batch():
    int8 = quantize_model(build(), Int8WeightsConfig())
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=4)
    prompts = [[n, n + 1, n + 2] for n in range(6)]
    together = Engine(int8, EngineConfig())
    for number, prompt in enumerate(prompts):
        together.add(str(number), prompt, params)
    found: dict[str, list[tuple[int, float]]] = {}
    while together.has_work:
        for output in together.step():
            found.setdefault(output.request_id, []).append((output.token_id, output.logprob))
    alone = Engine(int8, EngineConfig())
    alone.add("0", prompts[0], params)
    lone = []
    while alone.has_work:
        lone += [(output.token_id, output.logprob) for output in alone.step()]
    assert found["0"] == lone
