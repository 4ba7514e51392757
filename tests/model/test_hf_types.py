"""Every Hugging Face type in the table against `transformers` itself, with random weights and odd sizes."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_folders import CASES, VOCAB_SIZE, write_folder
from modelwright.model.attention import causal_attend, packed_attend
from modelwright.model.decoder import AttentionConfig, Decoder, FeedForwardConfig
from modelwright.model.hf import hf_tensors, load_config, load_model, save_model, type_of
from modelwright.ops.rope_norm_swiglu import RopeScaling
from tolerances import TOLERANCES

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(3, VOCAB_SIZE, (2, 61), generator=torch.Generator().manual_seed(0))
"""Longer than the windows, and than the contexts before scaling."""


def our_logits(model: Decoder, tokens_BT: torch.Tensor) -> torch.Tensor:
    positions_BT = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
    with torch.no_grad():
        return model.logits(model(tokens_BT, positions_BT, causal_attend()))


def their_logits(model, tokens_BT: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens_BT).logits


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_logits_are_equal_and_survive_the_round_trip(tmp_path: Path, name: str) -> None:
    theirs = write_folder(name, tmp_path / "theirs", shard_size="100KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    ours = load_model(tmp_path / "theirs")
    expected = their_logits(theirs, TOKENS)
    assert expected.std() > 0.5
    torch.testing.assert_close(our_logits(ours, TOKENS), expected, **TOLERANCES["fp32_logits"])

    save_model(ours, tmp_path / "ours", eos_id=2)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert type(again) is type(theirs)
    torch.testing.assert_close(their_logits(again, TOKENS), expected, rtol=0.0, atol=1e-6)
    assert load_config(tmp_path / "ours") == ours.config


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_of_a_step_are_equal(tmp_path: Path, name: str) -> None:
    """Through packed attention, as in training; the loss is the mean over all predicted tokens."""
    theirs = write_folder(name, tmp_path).train()
    ours = load_model(tmp_path)
    expected = theirs(TOKENS, labels=TOKENS, use_cache=False).loss
    expected.backward()

    positions_BT = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    attend = packed_attend(torch.zeros_like(TOKENS, dtype=torch.int32), ours.config.windows)
    labels_BT = torch.nn.functional.pad(TOKENS[:, 1:], (0, 1), value=-100)
    hidden_BTD = ours(TOKENS, positions_BT, attend)
    loss = ours.cross_entropy(hidden_BTD, labels_BT, chunk_tokens=50) / (labels_BT != -100).sum()
    loss.backward()

    torch.testing.assert_close(loss, expected, **TOLERANCES["fp32_loss"])
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    found = {
        tensor: torch.cat([gradients[name] for name in names])
        for tensor, names in hf_tensors(ours, type_of(ours.config)).items()
    }
    wanted = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert found.keys() == wanted.keys()
    for tensor, gradient in wanted.items():
        torch.testing.assert_close(
            found[tensor], gradient, **TOLERANCES["fp32_gradient"], msg=partial("{}: {}".format, tensor)
        )


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama-biased", {"attention": AttentionConfig(qkv_bias=True, output_bias=True, query_scale=0.2)}),
        ("llama-llama3", {"rope": RopeScaling()}),
        ("llama-linear", {"rope": RopeScaling()}),
        ("llama-dynamic", {"rope": RopeScaling()}),
        ("llama-yarn", {"rope": RopeScaling()}),
        ("llama-gelu", {"feed_forward": FeedForwardConfig()}),
        ("qwen2-window", {"attention": AttentionConfig(qkv_bias=True)}),
        ("mistral", {"attention": AttentionConfig()}),
        ("phi3", {"rotary_dim": 0}),
        ("phi3-long", {"rope": RopeScaling()}),
        ("smollm3", {"attention": AttentionConfig()}),
        ("gemma2", {"logit_soft_cap": 0.0}),
        ("gemma2", {"embedding_scale": 1.0}),
        ("gemma3", {"window_rope_theta": 0.0}),
    ],
)
def test_each_feature_changes_the_logits(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    """So that the comparisons above would notice if one were ignored."""
    write_folder(name, tmp_path)
    model = load_model(tmp_path)
    other = Decoder(replace(model.config, **changes))
    other.load_state_dict(model.state_dict())
    assert (our_logits(model, TOKENS) - our_logits(other, TOKENS)).abs().max() > 0.02
