"""Every Hugging Face type in the table against `transformers` itself, with random weights and odd sizes."""

from pathlib import Path

import pytest
import torch

from hf_folders import CASES, VOCAB_SIZE, write_folder
from modelwright.model.attention import causal_attend, packed_attend
from modelwright.model.decoder import Decoder
from modelwright.model.hf import load_config, load_model, save_model
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
