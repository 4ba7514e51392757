"""Model folders of both kinds, and folders that do not fit together."""

import json
from pathlib import Path

import pytest
import torch

from modelwright.compress.int8 import Int8Linear, Int8WeightsConfig
from modelwright.core.config import ModelError, ModelwrightError
from modelwright.model.attention import causal_attend
from modelwright.model.hf import save_model
from modelwright.serve.load import load_folder
from modelwright.serve.server import ServerThread


def test_hugging_face_folder(server: ServerThread, tmp_path: Path):
    model = server.service.worker.client.engine._runner._model
    save_model(model, tmp_path, eos_id=1)
    server.service.model.tokenizer._tokenizer.save(tmp_path)
    loaded, tokenizer = load_folder(tmp_path, Int8WeightsConfig())
    tokens = torch.tensor([tokenizer.encode_chat([{"role": "user", "content": "the quick brown fox"}])])
    positions = torch.arange(tokens.shape[1])[None]
    with torch.inference_mode():
        left, right = (m.logits(m(tokens, positions, causal_attend())) for m in (model, loaded))
    assert torch.equal(left, right)


def test_int8_folder(model_folder: Path):
    model, tokenizer = load_folder(model_folder, Int8WeightsConfig(backend="int_mm"))
    assert isinstance(model.blocks["0"].ffn.up_proj, Int8Linear)
    assert tokenizer.decode(tokenizer.encode("the quick")) == "the quick"


def test_folders_that_do_not_fit_are_named(model_folder: Path):
    with pytest.raises(ModelError, match="no such model folder"):
        load_folder(model_folder / "absent", Int8WeightsConfig())
    definition = json.loads((model_folder / "tokenizer.json").read_text())
    vocab = definition["model"]["vocab"]
    vocab |= {f"zz{number}": len(vocab) + number for number in range(20)}
    (model_folder / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(ModelError, match="do not match"):
        load_folder(model_folder, Int8WeightsConfig())
    (model_folder / "tokenizer.json").unlink()
    with pytest.raises(ModelwrightError, match=r"tokenizer\.json"):
        load_folder(model_folder, Int8WeightsConfig())
