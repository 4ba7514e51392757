"""Vision towers: CLIP and SigLIP folders give the embeddings of `transformers`, in both directions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from modelwright.core.config import ModelError
from modelwright.model.vision.config import VisionConfig
from modelwright.model.vision.folders import (
    load_vision_tower,
    save_vision_tower,
    vision_config,
)
from modelwright.model.vision.vit import VisionTower
from refusals import config_error

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
VISION = {**SHAPE, "image_size": 24, "patch_size": 8}
TEXT = {**SHAPE, "vocab_size": 60, "max_position_embeddings": 12}
CLOSE = {"rtol": 0.0, "atol": 1e-5}


def with_large_weights(model: Any, seed: int = 0) -> Any:
    """Random weights of which each matters to the output, norms and biases included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, one in model.named_parameters():
            offset = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            one.copy_(offset + 0.2 * torch.randn(one.shape, generator=generator))
    return model.eval()


def clip(folder: Path, *, eos_id: int = 59, **changes: Any) -> Any:
    text = {**TEXT, "eos_token_id": eos_id, "bos_token_id": 0}
    config = transformers.CLIPConfig(text_config=text, vision_config={**VISION, **changes}, projection_dim=20)
    model = with_large_weights(transformers.CLIPModel(config))
    model.save_pretrained(folder)
    return model


def siglip(folder: Path) -> Any:
    model = with_large_weights(
        transformers.SiglipModel(transformers.SiglipConfig(text_config=TEXT, vision_config=VISION))
    )
    model.save_pretrained(folder)
    return model


def pixels(count: int = 3) -> Tensor:
    return torch.randn(count, 3, 24, 24, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("make", [clip, siglip])
def test_the_tower_of_a_whole_folder_gives_the_embeddings_of_transformers(
    make: Callable[[Path], Any], tmp_path: Path
) -> None:
    theirs = make(tmp_path)
    with torch.no_grad():
        expected = theirs.vision_model(pixels()).pooler_output
        assert expected.std() > 0.1
        torch.testing.assert_close(load_vision_tower(tmp_path)(pixels()), expected, **CLOSE)


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "quick_gelu"])
def test_activations(activation: str, tmp_path: Path) -> None:
    theirs = clip(tmp_path, hidden_act=activation)
    with torch.no_grad():
        found = load_vision_tower(tmp_path)(pixels())
        torch.testing.assert_close(found, theirs.vision_model(pixels()).pooler_output, **CLOSE)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_vision_towers_are_read_by_themselves_and_written_for_transformers(kind: str, tmp_path: Path) -> None:
    name = {"clip": "CLIPVision", "siglip": "SiglipVision"}[kind]
    config = getattr(transformers, f"{name}Config")(**VISION)
    theirs = with_large_weights(getattr(transformers, f"{name}Model")(config))
    theirs.save_pretrained(tmp_path / "theirs")
    tower = load_vision_tower(tmp_path / "theirs")
    save_vision_tower(tower, tmp_path / "ours")
    again = transformers.AutoModel.from_pretrained(tmp_path / "ours").eval()
    assert type(again).__name__ == f"{name}Model"
    with torch.no_grad():
        expected = theirs(pixels()).pooler_output
        for found in (tower(pixels()), again(pixels()).pooler_output, load_vision_tower(tmp_path / "ours")(pixels())):
            torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("pooling", ["class_token", "attention"])
def test_a_tower_from_scratch_is_written_and_read_with_its_pixels(pooling: Any, tmp_path: Path) -> None:
    config = VisionConfig(
        image_size=24, patch_size=8, num_layers=2, model_dim=32, ffn_dim=40, pooling=pooling, norm_eps=1e-4,
        pixel_mean=(0.1, 0.2, 0.3), pixel_std=(0.4, 0.5, 0.6), fit="stretch",
    )  # fmt: skip
    tower = VisionTower(config)
    save_vision_tower(tower, tmp_path)
    assert vision_config(tmp_path) == config
    images = torch.randint(0, 256, (2, 3, 24, 24), dtype=torch.uint8)
    normalized = (images / 255 - torch.tensor(config.pixel_mean)[:, None, None]) / torch.tensor(
        config.pixel_std
    )[:, None, None]  # fmt: skip
    with torch.no_grad():
        torch.testing.assert_close(load_vision_tower(tmp_path)(images), tower(images))
        torch.testing.assert_close(tower(images), tower(normalized), **CLOSE)
        assert tower.patch_states(images).shape == (2, 9, 32)


def test_every_parameter_of_a_tower_gets_a_gradient() -> None:
    for pooling in ("class_token", "attention"):
        tower = VisionTower(VisionConfig(image_size=8, num_layers=2, model_dim=16, ffn_dim=24, pooling=pooling))
        (tower(torch.randn(2, 3, 8, 8)) * torch.randn(2, 16)).sum().backward()
        missing = [name for name, one in tower.named_parameters() if one.grad is None]
        assert not missing


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "'bert', which lacks a vision tower"),
        ({"vision_config": {**VISION, "num_channels": 4}}, "num_channels is 4"),
        ({"vision_config": {**VISION, "hidden_act": "relu"}}, "hidden_act is 'relu'"),
        ({"vision_config": {**VISION, "patch_size": 7}}, "patch_size: 7 must divide"),
        ({"vision_config": {**VISION, "num_hidden_layers": 2}}, "tensors unknown"),
        ({"vision_config": {**VISION, "image_size": 32}}, "of another shape than config.json says"),
    ],
)
def test_folders_that_cannot_be_expressed_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    clip(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=message):
        load_vision_tower(tmp_path)


def test_wrong_inputs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        load_vision_tower(tmp_path / "absent")
    tower = VisionTower(VisionConfig(image_size=8, num_layers=1, model_dim=16, ffn_dim=24))
    with pytest.raises(ValueError, match="where the tower reads"):
        tower(torch.zeros(1, 3, 16, 16))
    with config_error("num_heads", match="num_heads: 3 must divide"):
        VisionConfig(num_heads=3)
    save_vision_tower(tower, tmp_path)
