"""A stage that trains adapters leaves the merged model and the adapters, of which each gives the other."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from modelwright.core.artifacts import read_manifest
from modelwright.data.tokenizer.tokenizer import TokenizerConfig, train_tokenizer
from modelwright.model.adapters import merge_adapters
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.model.hf import load_model
from modelwright.model.peft_folder import load_adapter
from modelwright.pipeline.stages.init import save_model_folder

Command = Callable[..., subprocess.CompletedProcess[str]]
WORDS = (
    "--stages", "clean,pack,sft", "--pack.seq_len=64", "--sft.batch_tokens=256", "--sft.num_steps=4",
    "--sft.eval_every_steps=2", "--sft.learning_rate=0.01", "--data.validation_fraction=0.15",
)  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tokenizer = train_tokenizer(["what does it do? It is a fox."] * 3, TokenizerConfig(vocab_size=300))
    shape = {"num_layers": 2, "model_dim": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "ffn_dim": 48}
    model = Decoder(ModelConfig(vocab_size=tokenizer.vocab_size, max_seq_len=128, **shape))
    model.init_weights(0)
    save_model_folder(model, tokenizer, folder)
    return folder


@pytest.mark.slow
def test_the_model_is_the_base_with_the_adapters_merged_in(
    base: Path, corpus: Path, tmp_path: Path, inside: Command
) -> None:
    words = (
        "--init_from",
        str(base),
        "--data.sources",
        str(corpus / "pairs.jsonl"),
        "--lora.r",
        "4",
        "--lora.use_dora",
        "true",
    )
    done = inside("run", "tiny", *WORDS, *words, "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    artifact = tmp_path / "run" / "sft" / "artifact"
    assert "adapter/adapter_model.safetensors" in read_manifest(artifact, verify=True).files
    assert json.loads((artifact / "adapter/adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    trained, before, again = load_model(artifact), load_model(base), load_model(base)
    load_adapter(again, artifact / "adapter")
    merge_adapters(again)
    for name, weight in trained.state_dict().items():
        torch.testing.assert_close(again.get_parameter(name), weight, rtol=0.0, atol=1e-6)
        assert torch.equal(weight, before.get_parameter(name)) != name.endswith("_proj.weight"), name


def test_adapters_on_random_weights_are_refused(corpus: Path, tmp_path: Path, inside: Command) -> None:
    words = ("run", "tiny", "--data.sources", str(corpus), "--lora.r", "4", "--run-dir", str(tmp_path / "run"))
    done = inside(*words)
    assert done.returncode == 2
    assert "pretrain.lora.r: pretrain starts from random weights" in done.stderr
