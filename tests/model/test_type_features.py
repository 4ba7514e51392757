"""What imported types add to the decoder, under the other parts of the project that take a decoder: number formats,
compiled blocks, INT8 weights, a type from outside the package.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_folders import CASES, VOCAB_SIZE, write_folder
from modelwright.compress.int8 import Int8WeightsConfig, load_int8, quantize_model, save_int8
from modelwright.core.config import ModelError
from modelwright.infer.products import fastest_head_kind, head_of
from modelwright.model.attention import causal_attend, packed_attend
from modelwright.model.decoder import Decoder, NormConfig
from modelwright.model.hf import config_from_hf, hf_config, load_config, load_model, save_model
from modelwright.model.hf_types import HF_TYPES
from modelwright.model.hf_types.llama import LLAMA
from modelwright.train.parallelize import compile_each_block
from modelwright.train.precision.apply import ModelPrecision
from modelwright.train.precision.policy import PrecisionConfig
from refusals import config_error
from tiny_decoder import make_config
from tolerances import TOLERANCES

pytest.importorskip("transformers")

TOKENS = torch.randint(3, VOCAB_SIZE, (2, 50), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.cat([torch.arange(30), torch.arange(20)]).repeat(2, 1)
SEGMENTS = (torch.arange(50) // 30).int().repeat(2, 1)
KINDS = ["llama-biased", "qwen2-window", "phi3-long", "smollm3", "gemma2", "gemma3"]


def loss_and_gradients(model: Decoder) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    hidden = model(TOKENS, POSITIONS, packed_attend(SEGMENTS, model.config.windows))
    loss = model.cross_entropy(hidden, TOKENS.roll(-1, 1), chunk_tokens=64) / TOKENS.numel()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients.values())
    return loss.detach(), {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None}


def cosine(left: torch.Tensor, right: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(left.flatten(), right.flatten(), dim=0))


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "least_cosine"), [("bf16_mixed", 0.98), ("fp8", 0.85), ("int8", 0.9)])
@pytest.mark.parametrize("name", KINDS)
def test_number_formats(tmp_path: Path, name: str, policy: Any, least_cosine: float) -> None:
    """E4M3 has three bits of mantissa, and these weights are large; a wrong gradient would be nowhere near."""
    write_folder(name, tmp_path)
    model = load_model(tmp_path)
    exact, exact_gradients = loss_and_gradients(model)
    ModelPrecision(model, PrecisionConfig(policy=policy))
    loss, gradients = loss_and_gradients(model)
    assert loss != exact
    assert abs(loss - exact) < 0.03 * exact
    for key in ("embedding.weight", "blocks.0.ffn.up_proj.weight", "blocks.2.attention.v_proj.weight"):
        assert cosine(gradients[key], exact_gradients[key]) > least_cosine, key


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # PyTorch's own tracer
@pytest.mark.parametrize("name", ["llama-biased", "gemma2", "gemma3"])
def test_compiled_blocks(tmp_path: Path, name: str) -> None:
    write_folder(name, tmp_path)
    model = load_model(tmp_path)
    exact, exact_gradients = loss_and_gradients(model)
    torch.compiler.reset()  # other tests of this process may have used up the number of recompilations
    loss, gradients = loss_and_gradients(compile_each_block(model, backend="eager"))
    torch.testing.assert_close(loss, exact, **TOLERANCES["fp32_loss"])
    for key, gradient in exact_gradients.items():
        torch.testing.assert_close(gradients[key], gradient, **TOLERANCES["fp32_gradient"])


@pytest.mark.parametrize("name", KINDS)
def test_int8_weights(tmp_path: Path, name: str) -> None:
    """Biases and norms stay FP32; the file has the whole shape."""
    write_folder(name, tmp_path / "hf")
    model = load_model(tmp_path / "hf")
    int8 = quantize_model(model, Int8WeightsConfig(backend="int_mm"))
    save_int8(int8, tmp_path / "int8")
    loaded = load_int8(tmp_path / "int8", Int8WeightsConfig(backend="int_mm"))
    assert loaded.config == model.config
    with torch.inference_mode():
        expected, found, again = (
            one.logits(one(TOKENS, torch.arange(50).expand(2, 50), causal_attend())) for one in (model, int8, loaded)
        )
        assert torch.equal(found, again)
        assert (found - expected).abs().mean() < 0.2 * expected.std()
        hidden = torch.randn(3, model.config.model_dim)
        for one in (model, int8):
            torch.testing.assert_close(
                head_of(one, fastest_head_kind(one))(hidden), one.logits(hidden), rtol=1e-4, atol=1e-4
            )


def test_a_type_from_outside_is_one_entry(tmp_path: Path) -> None:
    """A Llama under another name, with its own names of tensors and its gate and up projections in one."""
    names = {"attention_norm": "ln_1", "ffn_norm": "ln_2", "attention": "attn", "ffn": "mlp"}
    mine = replace(
        LLAMA,
        name="my_llama",
        architecture="MyLlamaForCausalLM",
        block_names=names,
        fused={"mlp.gate_up": ("ffn.gate_proj", "ffn.up_proj")},
    )
    types = (*HF_TYPES, mine)
    model = Decoder(make_config(qk_norm=False, hf_type="my_llama"))
    model.init_weights(0)
    save_model(model, tmp_path, types=types)
    loaded = load_model(tmp_path, types=types)
    assert loaded.config == model.config
    assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in model.state_dict().items())
    with pytest.raises(ModelError, match="model_type is 'my_llama'"):
        load_model(tmp_path)
    with config_error("hf_type", match="hf_type: 'my_llama' is unknown"):
        save_model(model, tmp_path)


def test_what_a_type_cannot_express_is_not_exported() -> None:
    with config_error("hf_type", match="hf_type: a qwen3 cannot have all features of this model"):
        hf_config(make_config(norms=NormConfig(post_norms=True)))


@pytest.mark.parametrize("name", CASES)
def test_layer_numbers_and_sizes_follow_the_folder(tmp_path: Path, name: str) -> None:
    """The config of a folder whose layers are all alike where the type allows it: one layer."""
    changes: dict[str, Any] = {"num_hidden_layers": 1}
    for key in ("layer_types", "no_rope_layers"):
        if key in CASES[name][1]:
            changes[key] = CASES[name][1][key][:1]
    write_folder(name, tmp_path, **changes)
    config = load_config(tmp_path)
    assert (config.num_layers, config.vocab_size, config.num_kv_heads) == (1, VOCAB_SIZE, 1)


OLDER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama3": (
        {
            "model_type": "llama",
            "rope_theta": 500_000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        {"rope_theta": 500_000.0, "rope.factor": 8.0, "rope.original_max_len": 8192},
    ),
    "qwen2.5-yarn": (
        {
            "model_type": "qwen2",
            "rope_theta": 1e6,
            "max_position_embeddings": 32_768,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
            "use_sliding_window": False,
            "sliding_window": 131_072,
        },
        {"rope.kind": "yarn", "attention.qkv_bias": True, "attention.output_bias": False, "windows": (0,)},
    ),
    "phi3-su": (
        {
            "model_type": "phi3",
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
            "sliding_window": 262_144,
        },
        {"rope.kind": "longrope", "rope.factor": 32.0, "rope.original_max_len": 4096, "windows": (262_144,)},
    ),
    "gemma2-9b": (
        {"model_type": "gemma2", "query_pre_attn_scalar": 256, "sliding_window": 4096, "num_hidden_layers": 4},
        {
            "attention.query_scale": 0.0,
            "attention.window_layers": (0, 2),
            "attention.soft_cap": 50.0,
            "logit_soft_cap": 30.0,
            "tie_embeddings": True,
            "head_dim": 256,
        },
    ),
    "gemma3-1b": (
        {
            "model_type": "gemma3_text",
            "rope_theta": 1_000_000,
            "rope_local_base_freq": 10_000,
            "rope_scaling": None,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "num_hidden_layers": 7,
            "final_logit_softcapping": None,
        },
        {
            "rope_theta": 1e6,
            "window_rope_theta": 1e4,
            "attention.window_layers": (0, 1, 2, 3, 4, 6),
            "logit_soft_cap": 0.0,
        },
    ),
    "smollm3-3b": (
        {"model_type": "smollm3", "rope_theta": 5e6, "num_hidden_layers": 8, "use_sliding_window": False},
        {"rope_theta": 5e6, "attention.layers_without_rope": (3, 7), "windows": (0,)},
    ),
    "mistral-7b": (
        {"model_type": "mistral", "sliding_window": 4096, "num_key_value_heads": 2},
        {"windows": (4096,), "rope_theta": 10_000.0},
    ),
}
"""Settings as published folders have them, which transformers before version 5 wrote, and what they mean."""


@pytest.mark.parametrize("name", OLDER)
def test_older_spellings(name: str) -> None:
    changes, expected = OLDER[name]
    sizes = {
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = config_from_hf({**sizes, **changes})
    for path, value in expected.items():
        found: Any = config
        for part in path.split("."):
            found = getattr(found, part)
        assert found == value, path
    assert config_from_hf(hf_config(config)) == config
