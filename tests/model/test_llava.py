"""Decoders that read images: folders give the logits of `transformers`, in both directions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from modelwright.core.config import ModelError
from modelwright.model.attention import causal_attend
from modelwright.model.decoder import Decoder
from modelwright.model.hf import load_model
from modelwright.model.vision.config import VisionConfig
from modelwright.model.vision.llava import (
    IMAGES,
    PIXELS,
    ImagePrefix,
    inserted_images,
    is_llava_folder,
    load_llava,
    save_llava,
)
from modelwright.model.vision.vit import VisionTower
from tiny_decoder import make_decoder

IMAGE_TOKEN, SIDE, NUM_PATCHES = 5, 24, 9
VISION = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
          "image_size": SIDE, "patch_size": 8}  # fmt: skip
TEXT = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
CLOSE = {"rtol": 0.0, "atol": 1e-4}


def with_large_weights(model: Any) -> Any:
    """Random weights of which each matters to the output."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, one in model.named_parameters():
            offset = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            one.copy_(offset + 0.2 * torch.randn(one.shape, generator=generator))
    return model.eval()


def theirs(text: str, vision: str, **changes: Any) -> Any:
    kinds = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "mistral": transformers.MistralConfig,
        "clip": transformers.CLIPVisionConfig,
        "siglip": transformers.SiglipVisionConfig,
    }
    config = transformers.LlavaConfig(
        text_config=kinds[text](**TEXT),
        vision_config=kinds[vision](**VISION),
        image_token_index=IMAGE_TOKEN,
        vision_feature_select_strategy="default" if vision == "clip" else "full",
        **changes,
    )
    return with_large_weights(transformers.LlavaForConditionalGeneration(config))


def prompt() -> tuple[Tensor, Tensor]:
    """Two rows with text around one image, and with an image at the beginning and another at the end."""
    image = [IMAGE_TOKEN] * NUM_PATCHES
    tokens = torch.tensor([[7, 8, *image, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19], [*image, 20, 21, 22, 23, *image]])
    pixels = torch.randint(0, 256, (3, 3, SIDE, SIDE), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return tokens, pixels


def our_logits(model: Decoder) -> Tensor:
    tokens, pixels = prompt()
    rows = torch.stack([torch.stack([pixels[0], torch.zeros_like(pixels[0])]), pixels[1:]])
    insert = inserted_images(model, tokens, {PIXELS: rows})
    with torch.no_grad():
        return model.logits(model(tokens, torch.arange(22).expand(2, -1), causal_attend(), insert=insert))


def their_logits(model: Any, tower: VisionTower) -> Tensor:
    tokens, pixels = prompt()
    with torch.no_grad():
        return model(input_ids=tokens, pixel_values=tower.normalized(pixels)).logits


def tower_of(model: Decoder) -> VisionTower:
    prefix = model.heads[IMAGES]
    assert isinstance(prefix, ImagePrefix)
    return prefix.tower


@pytest.mark.parametrize(
    ("text", "vision", "layer"),
    [("llama", "clip", -2), ("qwen2", "siglip", -1), ("qwen3", "clip", -3), ("mistral", "siglip", -2)],
)
def test_folders_of_transformers_give_its_logits(text: str, vision: str, layer: int, tmp_path: Path) -> None:
    model = theirs(text, vision, vision_feature_layer=layer)
    model.save_pretrained(tmp_path / "theirs")
    assert is_llava_folder(tmp_path / "theirs")
    ours = load_llava(tmp_path / "theirs")
    expected = their_logits(model, tower_of(ours))
    assert expected.std() > 0.1
    torch.testing.assert_close(our_logits(ours), expected, **CLOSE)
    save_llava(ours, tmp_path / "again", image_token="<image>", eos_id=2)
    again = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / "again").eval()
    torch.testing.assert_close(their_logits(again, tower_of(ours)), expected, **CLOSE)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("pooling", ["class_token", "attention"])
def test_a_model_of_ours_is_written_for_transformers_and_read_back(pooling: Any, is_tied: bool, tmp_path: Path) -> None:
    model = make_decoder(tie_embeddings=is_tied)
    vision = VisionConfig(
        image_size=SIDE, patch_size=8, num_layers=2, model_dim=16, num_heads=2, ffn_dim=24, pooling=pooling
    )
    model.heads[IMAGES] = ImagePrefix(
        VisionTower(vision), model.config.model_dim, feature_layer=-1, token_id=IMAGE_TOKEN
    )
    with_large_weights(model)
    save_llava(model, tmp_path, image_token="<image>", eos_id=2)
    again = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path).eval()
    expected = our_logits(model)
    torch.testing.assert_close(their_logits(again, tower_of(model)), expected, **CLOSE)
    read = load_llava(tmp_path)
    assert torch.equal(our_logits(read), expected)
    assert tower_of(read).config.pixel_mean == vision.pixel_mean


def test_the_pixels_matter(tmp_path: Path) -> None:
    theirs("llama", "clip").save_pretrained(tmp_path)
    model, (tokens, pixels) = load_llava(tmp_path), prompt()
    found = []
    for images in (pixels[:1], pixels[1:2]):
        insert = inserted_images(model, tokens[:1], {PIXELS: images[None]})
        with torch.no_grad():
            found.append(model(tokens[:1], torch.arange(22)[None], causal_attend(), insert=insert))
    assert torch.equal(found[0][:, :2], found[1][:, :2]), "no token before the image knows of it"
    assert (found[0][:, 2:] - found[1][:, 2:]).abs().amax(dim=-1).min() > 1e-3


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"projector_hidden_act": "relu"}, "projector_hidden_act"),
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy"),
        ({"vision_feature_layer": [-1, -2]}, "vision_feature_layer"),
        ({"vision_feature_layer": -9}, "vision_feature_layer"),
        ({"image_token_index": 96}, "image_token_index"),
        ({"text_config": None}, "text_config"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    theirs("llama", "clip").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ModelError, match=named):
        load_llava(tmp_path)


def test_it_is_no_language_model(tmp_path: Path) -> None:
    theirs("llama", "clip").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="reads images"):
        load_model(tmp_path)
