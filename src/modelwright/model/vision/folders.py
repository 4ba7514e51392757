"""Vision towers of CLIP and SigLIP folders in the Hugging Face layout.

The model types `clip`, `clip_vision_model`, `siglip` and `siglip_vision_model` can be read. The preparation of pixels
comes from `preprocessor_config.json`, where a folder has one. Nothing is unpickled.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from modelwright.core.artifacts import write_atomic, writing
from modelwright.core.config import ModelError
from modelwright.model.hf import WEIGHTS, StoredWeights, check_tensors, read_json, save_tensors, set_parameter
from modelwright.model.vision.config import CLIP_MEAN, CLIP_STD, TowerActivation, VisionConfig, three
from modelwright.model.vision.vit import VisionTower

CLIP, CLIP_VISION, SIGLIP, SIGLIP_VISION = "clip", "clip_vision_model", "siglip", "siglip_vision_model"
"""Values of `model_type`."""
VISION_PREFIX = "vision_model."
_ACTIVATIONS: Mapping[str, TowerActivation] = {
    "quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
}  # fmt: skip
_CLIP_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "num_channels": 3,
}  # fmt: skip
_SIGLIP_DEFAULTS: Mapping[str, Any] = {
    **_CLIP_DEFAULTS,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
"""Defaults of `transformers` for settings that a `config.json` lacks."""
_NAMES = (
    (r"^class_token$", "embeddings.class_embedding"),
    (r"^patches\.", "embeddings.patch_embedding."),
    (r"^positions$", "embeddings.position_embedding.weight"),
    (r"^blocks\.(\d+)\.attention_norm\.", r"encoder.layers.\1.layer_norm1."),
    (r"^blocks\.(\d+)\.ffn_norm\.", r"encoder.layers.\1.layer_norm2."),
    (r"^blocks\.(\d+)\.attention\.o_proj\.", r"encoder.layers.\1.self_attn.out_proj."),
    (r"^blocks\.(\d+)\.attention\.", r"encoder.layers.\1.self_attn."),
    (r"^blocks\.(\d+)\.ffn\.", r"encoder.layers.\1.mlp."),
    (r"^pool\.probe$", "head.probe"),
    (r"^pool\.qkv_proj\.", "head.attention.in_proj_"),
    (r"^pool\.o_proj\.", "head.attention.out_proj."),
    (r"^pool\.norm\.", "head.layernorm."),
    (r"^pool\.ffn\.", "head.mlp."),
    (r"\.up_proj\.", ".fc1."),
    (r"\.down_proj\.", ".fc2."),
    (r"^norm_in\.", "pre_layrnorm."),
    (r"^norm_out\.", "post_layernorm."),
)
"""Patterns of this project's names, and their replacements in `transformers`."""
_BESIDE = ("text_model.", "visual_projection.", "text_projection.", "logit_")
"""Prefixes of tensors outside the tower."""


def vision_config(folder: Path) -> VisionConfig:
    """Read the shape of the vision tower of a folder. Raises `ModelError` for a folder of another kind."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder; give a CLIP or SigLIP model in the Hugging Face layout")
    settings, known = read_json(folder / "config.json"), (CLIP, CLIP_VISION, SIGLIP, SIGLIP_VISION)
    kind, where = str(settings.get("model_type")), folder / "config.json"
    if kind not in known:
        names = ", ".join(known)
        raise ModelError(f"{where}: model_type is {kind!r}, which lacks a vision tower; known are {names}")
    given: dict[str, Any] = (settings.get("vision_config") or {}) if kind in (CLIP, SIGLIP) else settings
    return tower_config(given, folder, is_clip=kind in (CLIP, CLIP_VISION))


def tower_config(given: Mapping[str, Any], folder: Path, *, is_clip: bool) -> VisionConfig:
    """Shape of a tower from its settings and the folder's `preprocessor_config.json`. Raises `ModelError`."""
    own: dict[str, Any] = {**(_CLIP_DEFAULTS if is_clip else _SIGLIP_DEFAULTS), **given}
    where = str(folder / "config.json")
    if own["num_channels"] != 3:
        raise ModelError(f"{where}: num_channels is {own['num_channels']}; only images of 3 colors are read")
    if own.get("vision_use_head") is False:
        raise ModelError(f"{where}: vision_use_head is false; a tower without a pooled output cannot be aligned")
    if (activation := str(own["hidden_act"])) not in _ACTIVATIONS:
        raise ModelError(f"{where}: hidden_act is {activation!r}; known are {', '.join(_ACTIVATIONS)}")
    try:
        config = VisionConfig(
            image_size=own["image_size"],
            patch_size=own["patch_size"],
            num_layers=own["num_hidden_layers"],
            model_dim=own["hidden_size"],
            num_heads=own["num_attention_heads"],
            ffn_dim=own["intermediate_size"],
            pooling="class_token" if is_clip else "attention",
            activation=_ACTIVATIONS[activation],
            norm_eps=float(own["layer_norm_eps"]),
            fit="crop" if is_clip else "stretch",
            pixel_mean=CLIP_MEAN if is_clip else (0.5, 0.5, 0.5),
            pixel_std=CLIP_STD if is_clip else (0.5, 0.5, 0.5),
        )
    except (ValueError, TypeError) as error:
        raise ModelError(f"{where}: {error}") from None
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        return config
    settings = read_json(path)
    mean, std = settings.get("image_mean", config.pixel_mean), settings.get("image_std", config.pixel_std)
    crops = bool(settings.get("do_center_crop", config.fit == "crop"))
    try:
        return replace(config, pixel_mean=three(mean), pixel_std=three(std), fit="crop" if crops else "stretch")
    except (ValueError, TypeError) as error:
        raise ModelError(f"{path}: image_mean and image_std must be three numbers each ({error})") from None


def load_vision_tower(folder: Path) -> VisionTower:
    """Read the vision tower of a folder, without its projection. Raises `ModelError` if it cannot be read."""
    tower = VisionTower(vision_config(folder))
    stored = StoredWeights(folder)
    # Folders of a tower alone may lack the prefix
    prefix = VISION_PREFIX if any(name.startswith(VISION_PREFIX) for name in stored.tensors) else ""
    names = {name: prefix + stored_name(name).removeprefix(VISION_PREFIX) for name, _ in tower.named_parameters()}
    shapes = {names[name]: one.shape for name, one in tower.named_parameters()}
    present = {
        name: one.shape
        for name, one in stored.tensors.items()
        if name.startswith(prefix) and not name.startswith(_BESIDE) and not name.endswith("position_ids")
    }
    check_tensors(folder, wanted=shapes, stored=present)
    for name, theirs in names.items():
        set_parameter(tower, name, stored.read(theirs).float())
    return tower


def save_vision_tower(tower: VisionTower, folder: Path) -> None:
    """Write a CLIP or SigLIP vision model, by its pooling. Raises `StorageError` if writing fails."""
    is_clip = tower.config.pooling == "class_token"
    settings = {
        "architectures": ["CLIPVisionModel" if is_clip else "SiglipVisionModel"],
        **tower_settings(tower.config),
        "dtype": str(tower.positions.dtype).removeprefix("torch."),
    }
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(folder / WEIGHTS, tower_weights(tower))
    write_atomic(folder / "config.json", json.dumps(settings, indent=2) + "\n")
    save_preprocessor(tower.config, folder)


def tower_settings(config: VisionConfig) -> dict[str, Any]:
    """Settings of a vision tower in `config.json`."""
    return {
        "model_type": CLIP_VISION if config.pooling == "class_token" else SIGLIP_VISION,
        "hidden_size": config.model_dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": 3,
        "hidden_act": next(name for name, own in _ACTIVATIONS.items() if own == config.activation),
        "layer_norm_eps": config.norm_eps,
    }


def tower_weights(tower: VisionTower) -> dict[str, Tensor]:
    """Weights of a tower under the names of `transformers`."""
    return {stored_name(name): one.detach().contiguous() for name, one in tower.named_parameters()}


def save_preprocessor(config: VisionConfig, folder: Path) -> None:
    """Write the preparation of pixels, `preprocessor_config.json`. Raises `StorageError` if writing fails."""
    square = {"height": config.image_size, "width": config.image_size}
    prepared = {
        "image_processor_type": "CLIPImageProcessor" if config.pooling == "class_token" else "SiglipImageProcessor",
        "size": {"shortest_edge": config.image_size} if config.fit == "crop" else square,
        "do_center_crop": config.fit == "crop",
        "crop_size": square,
        "image_mean": list(config.pixel_mean),
        "image_std": list(config.pixel_std),
    }
    write_atomic(folder / "preprocessor_config.json", json.dumps(prepared, indent=2) + "\n")


def stored_name(name: str) -> str:
    """Name in `transformers`: `blocks.0.ffn.up_proj.bias` is `vision_model.encoder.layers.0.mlp.fc1.bias`."""
    for pattern, theirs in _NAMES:
        name = re.sub(pattern, theirs, name)
    return VISION_PREFIX + name
