"""PEFT loads the adapters that this project writes with equal outputs, and the other way round, for all model types."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_folders import write_folder
from modelwright.core.config import ConfigError, ModelError
from modelwright.model.adapters import adapters_of, attach_adapters, merge_adapters
from modelwright.model.attention import causal_attend
from modelwright.model.decoder import Decoder
from modelwright.model.hf import load_model, save_model
from modelwright.model.low_rank import AdapterConfig
from modelwright.model.peft_folder import CONFIG, TENSORS, load_adapter, save_adapter
from refusals import config_error
from tiny_decoder import make_decoder

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
"""PEFT reads a property of models that transformers has renamed."""

TOKENS = torch.randint(1003, (2, 21), generator=torch.Generator().manual_seed(2))
TYPES = ("llama-biased", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "smollm3")
SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "lora_alpha": 6.0, "rank_pattern": {"ffn": 2}, "alpha_pattern": {"blocks.1": 3.0}},
    "rslora": {"r": 3, "use_rslora": True, "target_modules": ("q_proj|v_proj", "blocks.0.ffn.up_proj")},
    "dora": {"r": 4, "use_dora": True, "target_modules": ("attention", "up_proj")},
}


def logits(model: Decoder) -> Tensor:
    positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    return model.logits(model(TOKENS, positions, causal_attend()))


def drawn(parameter: Tensor, name: str) -> Tensor:
    """Values of a trained adapter's parameter: none is zero."""
    generator = torch.Generator().manual_seed(len(name))
    noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return parameter.detach() * (1 + 0.3 * noise) if "magnitude" in name else 0.2 * noise


def train_a_little(model: Any, names: tuple[str, ...]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in names):
                parameter.copy_(drawn(parameter, name))


def adapted(folder: Path, settings: dict[str, Any]) -> Decoder:
    model = load_model(folder, dtype=torch.float64)
    attach_adapters(model, AdapterConfig(**settings), 0)
    train_a_little(model, (".adapter.",))
    return model.eval()


def in_peft(base: Path, adapter: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(model, str(adapter), autocast_adapter_dtype=False).eval()


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_peft_loads_ours_and_we_load_it_back(tmp_path: Path, kind: str) -> None:
    write_folder(kind, tmp_path / "base")
    for name, settings in SETTINGS.items():
        model, adapter = adapted(tmp_path / "base", settings), tmp_path / name
        save_adapter(model, adapter, base=str(tmp_path / "base"))
        wanted = logits(model)
        torch.testing.assert_close(in_peft(tmp_path / "base", adapter)(TOKENS).logits, wanted, rtol=1e-5, atol=1e-5)
        again = load_model(tmp_path / "base", dtype=torch.float64)
        load_adapter(again, adapter)
        torch.testing.assert_close(logits(again.eval()), wanted, rtol=1e-9, atol=1e-9)
        if kind != "phi3":
            attach_adapters(again, model.adapters, 0)  # the settings are of the same form, so that training goes on
            first = next(iter(adapters_of(model)))
            assert torch.equal(adapters_of(again)[first].lora_A, adapters_of(model)[first].lora_A)


PEFT_SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "target_modules": ["q_proj", "v_proj", "qkv_proj", "up_proj", "gate_up_proj"]},
    "dora": {"r": 3, "use_dora": True, "target_modules": "all-linear", "lora_alpha": 5},
    "patterns": {
        "r": 2,
        "use_rslora": True,
        "target_modules": r".*\.(o_proj|down_proj)",
        "rank_pattern": {"down_proj": 5},
        "alpha_pattern": {"layers.1.self_attn.o_proj": 3},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama-biased", "gemma3", "phi3"])
def test_we_load_what_peft_writes_with_equal_outputs_and_gradients(tmp_path: Path, kind: str) -> None:
    write_folder(kind, tmp_path / "base")
    for name, settings in PEFT_SETTINGS.items():
        plain = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "base", dtype=torch.float64, attn_implementation="eager"
        )
        theirs = peft.get_peft_model(plain, peft.LoraConfig(**settings), autocast_adapter_dtype=False)
        train_a_little(theirs, ("lora_",))
        theirs.save_pretrained(tmp_path / name)
        model = load_model(tmp_path / "base", dtype=torch.float64)
        load_adapter(model, tmp_path / name)
        wanted, found = theirs(TOKENS).logits, logits(model)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        towards = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(4), dtype=wanted.dtype)
        (wanted * towards).sum().backward()
        (found * towards).sum().backward()
        if kind != "phi3":  # whose one A is here one for each projection
            assert_same_gradients(model, theirs, use_dora="use_dora" in settings)
        merge_adapters(model)
        torch.testing.assert_close(logits(model), wanted, rtol=1e-5, atol=1e-5)


def assert_same_gradients(model: Decoder, theirs: Any, *, use_dora: bool) -> None:
    parameters = dict(theirs.named_parameters())
    names = {"attention": "self_attn", "ffn": "mlp"}
    for name, adapter in adapters_of(model).items():
        _, layer, part, own = name.split(".")
        place = f"base_model.model.model.layers.{layer}.{names[part]}.{own}"
        pairs = [(adapter.lora_A, "lora_A.default.weight"), (adapter.lora_B, "lora_B.default.weight")]
        if use_dora:
            pairs.append((adapter.get_parameter("magnitude"), "lora_magnitude_vector.default.weight"))
        for parameter, their_name in pairs:
            wanted = parameters[f"{place}.{their_name}"].grad
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An adapter of a small model."""
    model = make_decoder()
    attach_adapters(model, AdapterConfig(r=2, target_modules=("q_proj", "ffn")), 0)
    save_adapter(model, tmp_path / "adapter", base="somewhere")
    return tmp_path / "adapter"


def change_config(folder: Path, **changes: Any) -> None:
    settings = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**settings, **changes}))


def change_tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / TENSORS)
    change(tensors)
    save_file(tensors, folder / TENSORS)


QUERY = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: change_config(f, modules_to_save=["lm_head"]), f"modules_to_save: {TENSORS} lacks lm_head"),
        (lambda f: change_config(f, use_qalora=True), "use_qalora: True cannot be loaded"),
        (lambda f: change_config(f, some_new_feature={"a": 1}), "some_new_feature: {'a': 1} cannot be loaded"),
        (
            lambda f: change_config(f, init_lora_weights="pissa"),
            "init_lora_weights: 'pissa' changes the weights of the",
        ),
        (lambda f: change_config(f, peft_type="IA3"), "peft_type: 'IA3' cannot be loaded; LORA can"),
        (lambda f: change_config(f, r=4), "proj.lora_A.weight: has shape [2, 48] instead of [4, 48]"),
        (lambda f: change_config(f, use_dora=True), "proj.lora_magnitude_vector: is missing"),
        (
            lambda f: change_config(f, target_modules=["q_proj", "k_proj"]),
            "lacks tensors for model.layers.0.self_attn.k",
        ),
        (lambda f: change_tensors(f, lambda t: t.pop(f"{QUERY}.lora_B.weight")), f"{QUERY}.lora_B.weight: is missing"),
        (
            lambda f: change_tensors(f, lambda t: t.update(x=torch.zeros(1))),
            "x: the model lacks a projection of this name",
        ),
        (
            lambda f: change_tensors(f, lambda t: t[f"{QUERY}.lora_A.weight"].fill_(torch.nan)),
            "has values that are not finite",
        ),
        (lambda f: (f / TENSORS).write_bytes(b"x" * 40), "is damaged or truncated"),
        (lambda f: (f / TENSORS).unlink(), f"{TENSORS}: no such file"),
        (lambda f: (f / CONFIG).write_text("{"), f"{CONFIG}: is damaged"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(folder: Path, change: Any, message: str) -> None:
    change(folder)
    model = make_decoder()
    with pytest.raises(ModelError, match=re.escape(message)):
        load_adapter(model, folder)
    assert not adapters_of(model)


def test_an_adapter_of_other_weights_is_refused(folder: Path) -> None:
    same, other, wider = make_decoder(), make_decoder(), make_decoder(head_dim=16)
    other.init_weights(1)
    load_adapter(same, folder)
    assert len(adapters_of(same)) == 8
    with pytest.raises(ModelError, match="belongs to other weights than this model's"):
        load_adapter(other, folder)
    with pytest.raises(ModelError, match="belongs to other weights"):
        load_adapter(wider, folder)


def test_the_config_names_what_has_adapters(folder: Path) -> None:
    settings = json.loads((folder / CONFIG).read_text())
    assert settings["target_modules"] == ["q_proj", "gate_proj", "up_proj", "down_proj"]
    assert (settings["r"], settings["lora_alpha"], settings["rank_pattern"]) == (2, 16, {})
    assert settings["base_model_name_or_path"] == "somewhere"


def test_a_model_folder_is_not_written_without_the_adapters(tmp_path: Path) -> None:
    model = make_decoder()
    with pytest.raises(ConfigError, match="the model lacks adapters to write"):
        save_adapter(model, tmp_path)
    attach_adapters(model, AdapterConfig(r=2), 0)
    with config_error("lora", match="the model has adapters; merge them"):
        save_model(model, tmp_path)
