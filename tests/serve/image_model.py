"""A tiny random model that reads images, its tokenizer, and files of images."""

import base64
import io
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from modelwright.data.tokenizer.tokenizer import SPECIAL_TOKENS, Tokenizer, TokenizerConfig, train_tokenizer
from modelwright.model.decoder import Decoder
from modelwright.model.vision.config import VisionConfig
from modelwright.model.vision.llava import IMAGES, ImagePrefix, save_llava
from modelwright.model.vision.vit import VisionTower
from serve.conftest import TEXT, make_model

IMAGE_TOKEN, SIDE, NUM_PATCHES = "<|image|>", 16, 16


@lru_cache
def image_tokenizer() -> Tokenizer:
    return train_tokenizer(TEXT * 3, TokenizerConfig(vocab_size=330, special_tokens=(IMAGE_TOKEN,)))


def image_model(max_seq_len: int = 512) -> Decoder:
    model = make_model(max_seq_len)
    token_id = image_tokenizer().id_of(IMAGE_TOKEN)
    assert token_id is not None
    torch.manual_seed(1)
    shape = VisionConfig(image_size=SIDE, patch_size=4, num_layers=1, model_dim=16, num_heads=2, ffn_dim=24)
    prefix = ImagePrefix(VisionTower(shape), model.config.model_dim, feature_layer=-1, token_id=token_id)
    with torch.no_grad():
        for one in prefix.projector.parameters():
            one.copy_(torch.randn(one.shape) * 0.3)
    model.heads[IMAGES] = prefix
    assert model.head is not None
    model.head.weight.data[len(SPECIAL_TOKENS)] = 0
    return model.eval()


def write_image_model(folder: Path, max_seq_len: int = 512) -> Path:
    """A folder in the layout of LLaVA that the server can load."""
    save_llava(image_model(max_seq_len), folder, image_token=IMAGE_TOKEN, eos_id=image_tokenizer().eos_id)
    image_tokenizer().save(folder)
    return folder


def png(seed: int, *, width: int = 20, height: int = 20) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
