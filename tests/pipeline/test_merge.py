"""A merged folder gives the logits that PEFT gives with the adapter, in the number format of its source."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_folders import write_folder
from modelwright.cli.main import main
from modelwright.core.config import ConfigError, ModelError
from modelwright.model.adapter_bank import prepare_adapter
from modelwright.model.hf import load_model
from modelwright.model.peft_folder import TENSORS, load_adapter
from modelwright.pipeline.exports.merge import merge_folder
from refusals import config_error

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*(tie_word_embeddings|ensure_weight_tying|tied):UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
]

TOKENS = torch.randint(1000, (2, 17), generator=torch.Generator().manual_seed(2))
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "down_proj"]},
    "ends": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "embedding alone": {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]},
    "head alone": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    "norms": {"target_modules": ["up_proj"], "modules_to_save": ["input_layernorm", "norm"]},
    "biases": {"target_modules": ["q_proj", "k_proj"], "bias": "all"},
    "biases of adapters": {"target_modules": ["q_proj", "k_proj"], "bias": "lora_only"},
    "adapted ends": {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_rslora": True},
}


def trained_in_peft(base: Path, folder: Path, **settings: Any) -> Any:
    """Writes an adapter whose every trained tensor has been changed; returns PEFT's model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    return model.eval()


def logits(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()(TOKENS).logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_logits_are_those_of_peft(tmp_path: Path, name: str, tied: bool) -> None:
    write_folder("llama-biased", tmp_path / "base", tie_word_embeddings=tied)
    wanted = trained_in_peft(tmp_path / "base", tmp_path / "adapter", **SETTINGS[name])(TOKENS).logits
    merged = merge_folder(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    assert not torch.allclose(logits(tmp_path / "base"), wanted, atol=1e-2)
    torch.testing.assert_close(logits(merged.folder), wanted, rtol=1e-5, atol=1e-5)
    is_tied = json.loads((merged.folder / "config.json").read_text())["tie_word_embeddings"]
    assert is_tied == (tied and not any(word in name for word in ("ends", "alone")))
    assert bool(merged.notes) == (tied and "alone" in name)


@pytest.mark.parametrize("kind", ["phi3", "qwen2", "gemma2"])
def test_other_types(tmp_path: Path, kind: str) -> None:
    write_folder(kind, tmp_path / "base")
    targets = ["qkv_proj", "down_proj"] if kind == "phi3" else ["q_proj", "down_proj"]
    wanted = trained_in_peft(
        tmp_path / "base", tmp_path / "adapter", target_modules=targets, modules_to_save=["embed_tokens"]
    )(TOKENS).logits
    merge_folder(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    torch.testing.assert_close(logits(tmp_path / "merged"), wanted, rtol=1e-5, atol=1e-5)


def test_grown_vocabulary_and_its_tokenizer(tmp_path: Path) -> None:
    write_folder("llama-biased", tmp_path / "base", tie_word_embeddings=True)
    trained_in_peft(
        tmp_path / "base", tmp_path / "adapter", target_modules=["q_proj"], modules_to_save=["embed_tokens"]
    )
    path = tmp_path / "adapter" / TENSORS
    tensors = load_file(path)
    name = next(one for one in tensors if "embed_tokens" in one)
    tensors[name] = torch.cat([tensors[name], torch.ones(3, tensors[name].shape[1])])
    save_file(tensors, path)
    settings = tmp_path / "adapter" / "adapter_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "ensure_weight_tying": True}))
    (tmp_path / "adapter" / "tokenizer.json").write_text("{}")
    merged = merge_folder(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    assert load_model(merged.folder).config.vocab_size == load_model(tmp_path / "base").config.vocab_size + 3
    assert load_model(merged.folder).config.tie_embeddings
    assert (merged.folder / "tokenizer.json").read_text() == "{}"
    assert len(merged.notes) == 1


@pytest.mark.parametrize(
    ("dtype", "written"), [("", torch.bfloat16), ("float32", torch.float32), ("float16", torch.float16)]
)
def test_number_format(tmp_path: Path, dtype: str, written: torch.dtype) -> None:
    write_folder("llama-biased", tmp_path / "base").to(torch.bfloat16).save_pretrained(tmp_path / "base")
    trained_in_peft(tmp_path / "base", tmp_path / "adapter", target_modules=["q_proj"])
    folder = merge_folder(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", dtype=dtype).folder
    tensors = load_file(folder / "model.safetensors")
    assert {one.dtype for one in tensors.values()} == {written}
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == str(written).removeprefix("torch.")
    assert "torch_dtype" not in config
    if written == torch.bfloat16:
        # What the adapter does not touch is the same to the bit
        base = load_file(tmp_path / "base" / "model.safetensors")
        assert all(torch.equal(base[n], t) for n, t in tensors.items() if "q_proj.weight" not in n)


def test_what_only_a_merge_can_is_refused_elsewhere(tmp_path: Path) -> None:
    write_folder("llama-biased", tmp_path / "base")
    trained_in_peft(tmp_path / "base", tmp_path / "adapter", target_modules=["q_proj"], modules_to_save=["lm_head"])
    for use in (load_adapter, prepare_adapter):
        with pytest.raises(ModelError, match="modelwright merge"):
            use(load_model(tmp_path / "base"), tmp_path / "adapter")


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    write_folder("llama-biased", base)
    trained_in_peft(base, adapter, target_modules=["q_proj"])
    with config_error("dtype"):
        merge_folder(base, adapter, tmp_path / "merged", dtype="int8")
    with pytest.raises(ConfigError, match="adapter_config"):
        merge_folder(base, base, tmp_path / "merged")
    for target in (base, adapter):
        with pytest.raises(ConfigError, match="read for the merge"):
            merge_folder(base, adapter, target, overwrite=True)
    words = ["merge", str(base), str(adapter), str(tmp_path / "merged")]
    assert main(words) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "merged")
    assert main(words) == 2
    assert main([*words, "--overwrite"]) == 0
    # Cut off, and of another model
    tensors = load_file(adapter / TENSORS)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name][:, :-1].contiguous()}, adapter / TENSORS)
    assert main([*words, "--overwrite"]) == 2
    assert (tmp_path / "merged" / "config.json").is_file()


def test_tied_folder_with_another_head_is_refused(tmp_path: Path) -> None:
    write_folder("llama-biased", tmp_path / "base", tie_word_embeddings=True)
    path = tmp_path / "base" / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path, {"format": "pt"})
    load_model(tmp_path / "base")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, path, {"format": "pt"})
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        load_model(tmp_path / "base")


def test_export_with_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder("llama-biased", tmp_path / "base")
    wanted = trained_in_peft(tmp_path / "base", tmp_path / "adapter", target_modules=["q_proj"])(TOKENS).logits
    words = ["export", str(tmp_path / "base"), "--adapter", str(tmp_path / "adapter"), "--to", "hf"]
    assert main([*words, str(tmp_path / "hf")]) == 0
    assert str(tmp_path / "adapter") in capsys.readouterr().err
    torch.testing.assert_close(logits(tmp_path / "hf"), wanted, rtol=1e-5, atol=1e-5)
    assert main([*words[:-1], "onnx", str(tmp_path / "onnx"), "--int8"]) == 2
