"""The Hugging Face layout both ways, against `transformers` itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from modelwright.core.artifacts import StorageError
from modelwright.core.config import ModelError
from modelwright.model.attention import causal_attend
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.model.hf import config_from_hf, hf_config, load_config, load_model, save_model
from tiny_decoder import make_decoder
from tolerances import TOLERANCES

transformers = pytest.importorskip("transformers")

KINDS = [(qk_norm, tied) for qk_norm in (False, True) for tied in (False, True)]
TOKENS = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(0))


def our_logits(model: Decoder, tokens_BT: torch.Tensor) -> torch.Tensor:
    positions_BT = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
    with torch.no_grad():
        return model.logits(model(tokens_BT, positions_BT, causal_attend()))


def greedy(model: Decoder, tokens_1T: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        best = our_logits(model, tokens_1T)[:, -1].argmax(-1, keepdim=True)
        tokens_1T = torch.cat((tokens_1T, best), dim=1)
    return tokens_1T


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(make_decoder(), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(("qk_norm", "tied"), KINDS)
def test_transformers_reads_what_we_write(tmp_path, qk_norm, tied):
    model = make_decoder(qk_norm=qk_norm, tie_embeddings=tied)
    save_model(model, tmp_path, eos_id=95)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(theirs).__name__ == ("Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM")
    assert (theirs.dtype, theirs.generation_config.eos_token_id) == (torch.float32, 95)
    with torch.no_grad():
        torch.testing.assert_close(our_logits(model, TOKENS), theirs(TOKENS).logits, **TOLERANCES["fp32_logits"])


@pytest.mark.slow
@pytest.mark.parametrize(("qk_norm", "tied"), KINDS)
def test_greedy_generations_are_identical(tmp_path, qk_norm, tied):
    model = make_decoder(qk_norm=qk_norm, tie_embeddings=tied)
    save_model(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for prompt in TOKENS[:, :8]:
        generated = theirs.generate(
            prompt[None], attention_mask=torch.ones(1, 8, dtype=torch.long), max_new_tokens=24, do_sample=False
        )
        assert torch.equal(generated, greedy(model, prompt[None], 24))


@pytest.mark.parametrize(("qk_norm", "tied"), KINDS)
@pytest.mark.parametrize("shard_size", ["5GB", "10KB"])
def test_we_read_what_transformers_writes(tmp_path, qk_norm, tied, shard_size):
    kind = (transformers.Qwen3Config, transformers.Qwen3ForCausalLM)
    if not qk_norm:
        kind = (transformers.LlamaConfig, transformers.LlamaForCausalLM)
    known = hf_config(make_decoder(qk_norm=qk_norm, tie_embeddings=tied).config)
    torch.manual_seed(0)
    theirs = kind[1](kind[0](**{key: known[key] for key in known if key not in ("architectures", "model_type")}))
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "10KB")
    ours = load_model(tmp_path)
    assert ours.config.qk_norm == qk_norm
    with torch.no_grad():
        torch.testing.assert_close(our_logits(ours, TOKENS), theirs(TOKENS).logits, **TOLERANCES["fp32_logits"])


@pytest.mark.parametrize(("qk_norm", "tied"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_bit_identical(tmp_path, qk_norm, tied, dtype):
    model = make_decoder(qk_norm=qk_norm, tie_embeddings=tied).to(dtype)
    save_model(model, tmp_path / "a")
    loaded = load_model(tmp_path / "a", dtype=dtype)
    assert loaded.config == model.config
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert all(p.requires_grad for p in loaded.parameters())
    save_model(loaded, tmp_path / "b")
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_tied_model_with_stored_head_loads(folder):
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    save_file(weights, folder / "model.safetensors")
    assert load_model(folder).head is None


def test_older_config_spelling(folder):
    data = json.loads((folder / "config.json").read_text())
    del data["rope_parameters"]
    data |= {"rope_theta": 500_000, "rope_scaling": None, "sliding_window": None, "torch_dtype": "float32"}
    assert config_from_hf(data).rope_theta == 500_000.0
    del data["head_dim"], data["num_key_value_heads"]
    llama = config_from_hf({**data, "model_type": "llama"})
    assert (llama.head_dim, llama.num_kv_heads, llama.qk_norm) == (8, 4, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe'"),
        ({"attention_bias": True}, r"tensors missing: .*k_proj\.bias"),
        ({"model_type": "llama", "mlp_bias": True}, r"tensors missing: .*mlp.*bias"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: kind linear without a factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor: must be at least 1"),
        ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, r"scaled rotary positions \(mrope\)"),
        ({"rope_scaling": "linear"}, "rope_scaling: 'linear' where a group of settings is expected"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "'low_freq_factor' is missing"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "short_factor: has 1 factors for 6"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differ between kinds of layers"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "part of each head"),
        ({"model_type": "llama", "use_sliding_window": True}, "sliding-window"),
        ({"model_type": "llama", "layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window: is not set"),
        ({"layer_types": ["full_attention"]}, "layer_types: has 1 entries for 2 layers"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of type 'linear_attention'"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 2}, "a Mistral whose layers differ"),
        ({"model_type": "gemma3"}, r"model_type is 'gemma3'.*gemma3_text"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "attention to later tokens"),
        ({"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2.0}}, r"\(linear\) of a Phi-3"),
        ({"num_experts": 8}, "mixture of experts"),
        ({"hidden_act": "relu2"}, "activation 'relu2'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized weights"),
        ({"num_key_value_heads": 3}, "num_kv_heads: 3 must divide"),
        ({"vocab_size": "many"}, "a size is not a number"),
        ({"hidden_size": 16}, "tensors of another shape .*embed_tokens"),
        ({"num_hidden_layers": 3}, r"tensors missing: model\.layers\.2"),
        ({"num_hidden_layers": 1}, r"tensors unknown: model\.layers\.1"),
        ({"model_type": "llama"}, r"tensors unknown: .*k_norm"),
        ({"tie_word_embeddings": False}, r"tensors missing: lm_head\.weight"),
    ],
)
def test_unsupported_is_refused_by_name(folder, changes, message):
    edit_config(folder, **changes)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def test_bias_in_the_weights_is_refused(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"tensors unknown: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load_model(folder)


def test_damaged_folders_are_refused(folder, tmp_path):
    with pytest.raises(ModelError, match="no such folder"):
        load_config(tmp_path / "nowhere")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(ModelError, match="damaged or truncated"):
        load_model(folder)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled"):
        load_model(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../secret.safetensors"}}')
    with pytest.raises(ModelError, match="shard named"):
        load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: is damaged"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="no such file"):
        load_model(folder)


def test_incomplete_config_is_refused():
    with pytest.raises(ModelError, match="'num_attention_heads' is missing"):
        config_from_hf({"model_type": "llama"})


def test_save_leaves_no_partial_files(folder):
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def test_hf_config_inverts(folder):
    config = load_config(folder)
    assert isinstance(config, ModelConfig)
    assert config_from_hf(hf_config(config)) == config


def test_refused_write_is_one_clear_error_and_keeps_the_old_weights(folder, monkeypatch):
    before = (folder / "model.safetensors").read_bytes()

    def full_disk(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr("modelwright.model.hf.save_file", full_disk)
    with pytest.raises(StorageError, match="No space left"):
        save_model(make_decoder(), folder)
    assert (folder / "model.safetensors").read_bytes() == before
    assert not list(folder.glob("*.tmp"))
