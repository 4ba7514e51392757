"""Decoders that read images in the Hugging Face layout: folders of `LlavaForConditionalGeneration`.

A language model of a type in `hf_types/` with a CLIP or SigLIP vision tower and a projector. `transformers` reads what
`save_llava` writes, and `load_llava` reads what `transformers` writes. Nothing is unpickled.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from modelwright.core.artifacts import write_atomic
from modelwright.core.errors import ConfigError, ModelError, writing
from modelwright.model.decoder import Decoder
from modelwright.model.hf import (
    LLAVA,
    config_from_hf,
    hf_config,
    hf_tensors,
    hf_weights,
    save_tensors,
    set_parameter,
    type_of,
)
from modelwright.model.stored_weights import WEIGHTS, StoredWeights, check_tensors, read_json
from modelwright.model.vision.folders import (
    CLIP_VISION,
    SIGLIP_VISION,
    VISION_PREFIX,
    save_preprocessor,
    stored_name,
    tower_config,
    tower_settings,
    tower_weights,
)
from modelwright.model.vision.image_prefix import IMAGES, ImagePrefix, image_prefix
from modelwright.model.vision.vit import VisionTower

TEXT, TOWER, PROJECTOR = "language_model.", "vision_tower.", "multi_modal_projector."
"""Prefixes of the parts' names in the files that `transformers` writes."""
_DEFAULTS: Mapping[str, Any] = {
    "projector_hidden_act": "gelu", "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
    "multimodal_projector_bias": True,
}  # fmt: skip
"""Defaults of `transformers` for settings that a `config.json` lacks."""


def is_llava_folder(folder: Path) -> bool:
    """Returns whether a model folder is for `load_llava`. Raises `ModelError` without a `config.json`."""
    return read_json(folder / "config.json").get("model_type") == LLAVA


def save_llava(
    model: Decoder, folder: Path, *, image_token: str, eos_id: int, bos_id: int | None = None, pad_id: int | None = None
) -> None:
    """Write a decoder that reads images; patches replace `image_token`. Raises `StorageError` if writing fails."""
    prefix = image_prefix(model)
    assert prefix is not None, "the model reads no images"
    tower = prefix.tower
    special = {"bos_token_id": bos_id, "eos_token_id": eos_id, "pad_token_id": pad_id}
    dtype = str(model.head_weight.dtype).removeprefix("torch.")
    settings = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": LLAVA,
        "text_config": {**hf_config(model.config), **special, "dtype": dtype},
        "vision_config": tower_settings(tower.config),
        "image_token_index": prefix.tokens.token_id,
        "image_seq_length": prefix.tokens.num_patches,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "vision_feature_layer": prefix.feature_layer,
        "vision_feature_select_strategy": _strategy(tower),
        "tie_word_embeddings": model.config.tie_embeddings,
        **special,
        "dtype": dtype,
    }
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": image_token,
        "patch_size": tower.config.patch_size,
        "vision_feature_select_strategy": _strategy(tower),
        "num_additional_image_tokens": tower.config.num_tokens - tower.config.num_patches,
    }
    weights = {TEXT + name: one for name, one in hf_weights(model).items()}
    weights |= {TOWER + name: one for name, one in tower_weights(tower).items()}
    weights |= {PROJECTOR + name: one.detach().contiguous() for name, one in prefix.projector.named_parameters()}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(folder / WEIGHTS, weights)
    save_preprocessor(tower.config, folder)
    files = {"config.json": settings, "processor_config.json": processor, "generation_config.json": special}
    for name, content in files.items():
        write_atomic(folder / name, json.dumps(content, indent=2) + "\n")


def load_llava(folder: Path) -> Decoder:
    """Read a folder into a decoder with its `ImagePrefix` among its `heads`, on the CPU, with weights in FP32.

    Raises `ModelError` that names the setting or tensor when the folder holds anything that cannot be expressed
    exactly, or when files are missing, damaged or contradict each other.
    """
    settings = {**_DEFAULTS, **read_json(folder / "config.json")}
    where = str(folder / "config.json")
    if settings.get("model_type") != LLAVA:
        raise ModelError(f"{where}: model_type is {settings.get('model_type')!r}, not {LLAVA}")
    with torch.device("meta"):
        model = _without_weights(settings, folder, where)
    prefix = image_prefix(model)
    assert prefix is not None
    # This project's parameters in each tensor, by rows
    names = {TEXT + tensor: parts for tensor, parts in hf_tensors(model, type_of(model.config)).items()}
    for name, _ in prefix.tower.named_parameters():
        names[TOWER + stored_name(name, VISION_PREFIX)] = [f"heads.{IMAGES}.tower.{name}"]
    for name in dict(prefix.projector.named_parameters()):
        names[PROJECTOR + name] = [f"heads.{IMAGES}.projector.{name}"]
    stored = StoredWeights(folder)
    known = {canonical(name): name for name in stored.tensors if not name.endswith(("inv_freq", "position_ids"))}
    if model.config.tie_embeddings:
        known.pop(f"{TEXT}lm_head.weight", None)
    wanted: dict[str, torch.Size] = {}
    for tensor, parts in names.items():
        shapes = [model.get_parameter(name).shape for name in parts]
        wanted[tensor] = torch.Size((sum(shape[0] for shape in shapes), *shapes[0][1:]))
    check_tensors(folder, wanted=wanted, stored={name: stored.tensors[own].shape for name, own in known.items()})
    for tensor, parts in names.items():
        whole = stored.read(known[tensor]).float()
        rows = [model.get_parameter(name).shape[0] for name in parts]
        for name, part in zip(parts, torch.split(whole, rows), strict=True):
            # A clone, so that no parameter keeps the storage of the whole tensor alive
            set_parameter(model, name, part.clone() if len(parts) > 1 else part)
    return model


def _without_weights(settings: Mapping[str, Any], folder: Path, where: str) -> Decoder:
    text, vision = settings.get("text_config"), settings.get("vision_config")
    if not isinstance(text, Mapping) or not isinstance(vision, Mapping):
        raise ModelError(f"{where}: text_config or vision_config is missing, so the model is not complete")
    text, vision = cast(Mapping[str, Any], text), cast(Mapping[str, Any], vision)
    kind = vision.get("model_type", CLIP_VISION)
    if kind not in (CLIP_VISION, SIGLIP_VISION):
        raise ModelError(f"{where}: vision_config.model_type is {kind!r}; known are {CLIP_VISION} and {SIGLIP_VISION}")
    is_tied = bool(settings.get("tie_word_embeddings")) or bool(text.get("tie_word_embeddings"))
    model = Decoder(config_from_hf({**text, "tie_word_embeddings": is_tied}, source=f"{where}: text_config"))
    tower = VisionTower(tower_config(vision, folder, is_clip=kind == CLIP_VISION))
    wanted = {
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "vision_feature_select_strategy": _strategy(tower),
    }
    for name, value in wanted.items():
        if settings[name] != value:
            raise ModelError(f"{where}: {name} is {settings[name]!r}; only {value!r} can be read with such a tower")
    token_id = settings.get("image_token_index", settings.get("image_token_id"))
    layer = settings["vision_feature_layer"]
    if not isinstance(layer, int) or not isinstance(token_id, int) or not 0 <= token_id < model.config.vocab_size:
        raise ModelError(
            f"{where}: vision_feature_layer is {layer!r} and image_token_index {token_id!r}; one number each can be "
            "read, the latter a token of the vocabulary"
        )
    # transformers counts hidden states: 0 is the embedding, num_layers the output of the last block
    layer = layer if layer < 0 else layer - tower.config.num_layers - 1
    try:
        prefix = ImagePrefix(tower, model.config.model_dim, feature_layer=layer, token_id=token_id)
    except ConfigError as error:
        raise ModelError(f"{where}: vision_{error}") from None
    model.heads[IMAGES] = prefix
    return model


def canonical(name: str) -> str:
    """Name of a tensor in the form of `save_llava`; versions of `transformers` differ in prefixes."""
    if name.startswith(tuple(f"model.{part}" for part in (TEXT, TOWER, PROJECTOR))):
        name = name.removeprefix("model.")
    if name.startswith("lm_head."):
        return TEXT + name
    if name.startswith(TEXT) and not name.startswith((f"{TEXT}model.", f"{TEXT}lm_head.")):
        return f"{TEXT}model.{name.removeprefix(TEXT)}"
    if name.startswith(TOWER) and not name.startswith(TOWER + VISION_PREFIX):
        return TOWER + VISION_PREFIX + name.removeprefix(TOWER)
    return name


def _strategy(tower: VisionTower) -> str:
    """Selection of the tower's tokens: `default` leaves the class token out."""
    return "default" if tower.config.pooling == "class_token" else "full"
