"""Decoders that read images, and their folders in the layout of `LlavaForConditionalGeneration`.

`ImagePrefix` computes an embedding for each patch of an image, which replaces one image token of a prompt (Liu et al.
2023, "Visual Instruction Tuning"; the projector is that of LLaVA 1.5). A folder holds a language model of a type in
`hf_types/`, a CLIP or SigLIP vision tower and a projector. `transformers` reads what `save_llava` writes, and
`load_llava` reads what `transformers` writes. Nothing is unpickled.

Legend: B rows, T tokens, N images, I images of a row at most, P patches, C colors, S pixels of a side, D width of the
decoder.
"""

# PyTorch leaves the types of a module's result open.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from modelwright.core.artifacts import write_atomic, writing
from modelwright.core.config import ConfigError, ModelError
from modelwright.model import hf
from modelwright.model.decoder import Decoder, Insert
from modelwright.model.vision import folders
from modelwright.model.vision.vit import VisionTower

IMAGES = "images"
"""The name in `Decoder.heads`."""
PIXELS = "prompt_images_BICSS"
"""Name of the batch extra with the images: uint8, for each row in the order of their tokens."""


class ImageProjector(nn.Module):
    """Two layers with a GELU, from a tower's width to a decoder's (LLaVA 1.5, Liu et al. 2024, section 3.2)."""

    def __init__(self, num_inputs: int, model_dim: int) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(num_inputs, model_dim), nn.Linear(model_dim, model_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(nn.functional.gelu(self.linear_1(x.to(self.linear_1.weight.dtype))))


@dataclass(frozen=True)
class ImageTokens:
    """Tokens of images in prompts. token_id: the image token; num_patches: image tokens of one image."""

    token_id: int
    num_patches: int

    def starts(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the positions at which the images of a prompt start. Raises `ConfigError` if an image is cut off."""
        places = [place for place, token in enumerate(token_ids) if token == self.token_id]
        starts = places[:: self.num_patches]
        for number, start in enumerate(starts):
            own = places[number * self.num_patches : (number + 1) * self.num_patches]
            if own != list(range(start, start + self.num_patches)):
                raise ConfigError(
                    f"prompt: the image tokens at {start} are not {self.num_patches} in a row, which one image has"
                )
        return starts


class ImagePrefix(nn.Module):
    """A vision tower with its projector, which reads block `feature_layer`; as in `transformers`, -1 is the last."""

    def __init__(self, tower: VisionTower, model_dim: int, *, feature_layer: int, token_id: int) -> None:
        super().__init__()
        config = tower.config
        if not -config.num_layers <= feature_layer <= -1:
            raise ConfigError(
                f"feature_layer: must be between -{config.num_layers} and -1 for a tower of {config.num_layers} blocks,"
                f" got {feature_layer}"
            )
        self.tower = tower
        self.projector = ImageProjector(config.model_dim, model_dim)
        self.feature_layer = feature_layer
        self.num_blocks = config.num_layers + 1 + feature_layer
        """Number of the tower's blocks that run."""
        self.tokens = ImageTokens(token_id, config.num_patches)

    def forward(self, pixels_NCSS: Tensor) -> Tensor:
        """Embeddings of patches [N, P, D]. pixels_NCSS: see `VisionTower.forward`."""
        return self.projector(self.tower.patch_states(pixels_NCSS, num_blocks=self.num_blocks))

    def freeze(self, *, whole_tower: bool) -> None:
        """Freeze the tower, or only those of its parts that do not reach the projector."""
        # Parts behind the projector's layer would never get a gradient
        tower = self.tower
        unused = [*tower.blocks[self.num_blocks :], tower.norm_out, *([tower.pool] if tower.pool else [])]
        for module in [tower] if whole_tower else unused:
            module.requires_grad_(False)


def image_prefix(model: Decoder) -> ImagePrefix | None:
    """Returns the vision part of a model, None for a model without."""
    prefix = dict(model.heads.items()).get(IMAGES)
    assert prefix is None or isinstance(prefix, ImagePrefix)
    return prefix


def inserted_images(model: Decoder, tokens_BT: Tensor, extras: Mapping[str, Tensor]) -> Insert | None:
    """Returns a function that puts a batch's images in place of their tokens [B, T], in order; None without images."""
    prefix, pixels_BICSS = image_prefix(model), extras.get(PIXELS)
    if prefix is None or pixels_BICSS is None:
        return None
    is_image_BT = tokens_BT == prefix.tokens.token_id
    counts_B1 = is_image_BT.sum(dim=1, keepdim=True) // prefix.tokens.num_patches
    is_there_BI = torch.arange(pixels_BICSS.shape[1], device=tokens_BT.device) < counts_B1
    # One blank image more: every rank and every microbatch has a gradient of the tower, whatever images it got.
    pixels_NCSS = torch.cat([pixels_BICSS[is_there_BI], torch.zeros_like(pixels_BICSS[:1, 0])])

    def insert(hidden_BTD: Tensor) -> Tensor:
        # The blank image is cut off after the tower, so that its gradient is zero
        embeddings_MD = prefix(pixels_NCSS)[:-1].flatten(0, 1)
        return replaced(hidden_BTD, is_image_BT.flatten().nonzero()[:, 0], embeddings_MD)

    return insert


def replaced(hidden_BTD: Tensor, places_M: Tensor, embeddings_MD: Tensor) -> Tensor:
    """Returns the embeddings with those at some positions, counted over all rows, replaced."""
    flat_ND = hidden_BTD.flatten(0, 1).index_copy(0, places_M, embeddings_MD.to(hidden_BTD.dtype))
    return flat_ND.view_as(hidden_BTD)


TEXT, TOWER, PROJECTOR = "language_model.", "vision_tower.", "multi_modal_projector."
"""Prefixes of the parts' names in the files that `transformers` writes."""
_DEFAULTS: Mapping[str, Any] = {
    "projector_hidden_act": "gelu", "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
    "multimodal_projector_bias": True,
}  # fmt: skip
"""Defaults of `transformers` for settings that a `config.json` lacks."""


def is_llava_folder(folder: Path) -> bool:
    """Returns whether a model folder is for `load_llava`. Raises `ModelError` without a `config.json`."""
    return hf.read_json(folder / "config.json").get("model_type") == hf.LLAVA


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
        "model_type": hf.LLAVA,
        "text_config": {**hf.hf_config(model.config), **special, "dtype": dtype},
        "vision_config": folders.tower_settings(tower.config),
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
    weights = {TEXT + name: one for name, one in hf.hf_weights(model).items()}
    weights |= {TOWER + name: one for name, one in folders.tower_weights(tower).items()}
    weights |= {PROJECTOR + name: one.detach().contiguous() for name, one in prefix.projector.named_parameters()}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        hf.save_tensors(folder / hf.WEIGHTS, weights)
    folders.save_preprocessor(tower.config, folder)
    files = {"config.json": settings, "processor_config.json": processor, "generation_config.json": special}
    for name, content in files.items():
        write_atomic(folder / name, json.dumps(content, indent=2) + "\n")


def load_llava(folder: Path) -> Decoder:
    """Read a folder into a decoder with its `ImagePrefix` among its `heads`, on the CPU, with weights in FP32.

    Raises `ModelError` that names the setting or tensor when the folder holds anything that cannot be expressed
    exactly, or when files are missing, damaged or contradict each other.
    """
    settings = {**_DEFAULTS, **hf.read_json(folder / "config.json")}
    where = str(folder / "config.json")
    if settings.get("model_type") != hf.LLAVA:
        raise ModelError(f"{where}: model_type is {settings.get('model_type')!r}, not {hf.LLAVA}")
    with torch.device("meta"):
        model = _without_weights(settings, folder, where)
    prefix = image_prefix(model)
    assert prefix is not None
    # This project's parameters in each tensor, by rows
    names = {TEXT + tensor: parts for tensor, parts in hf.hf_tensors(model, hf.type_of(model.config)).items()}
    for name, _ in prefix.tower.named_parameters():
        names[TOWER + folders.stored_name(name)] = [f"heads.{IMAGES}.tower.{name}"]
    for name in dict(prefix.projector.named_parameters()):
        names[PROJECTOR + name] = [f"heads.{IMAGES}.projector.{name}"]
    stored = hf.StoredWeights(folder)
    known = {canonical(name): name for name in stored.tensors if not name.endswith(("inv_freq", "position_ids"))}
    if model.config.tie_embeddings:
        known.pop(f"{TEXT}lm_head.weight", None)
    wanted: dict[str, torch.Size] = {}
    for tensor, parts in names.items():
        shapes = [model.get_parameter(name).shape for name in parts]
        wanted[tensor] = torch.Size((sum(shape[0] for shape in shapes), *shapes[0][1:]))
    hf.check_tensors(folder, wanted=wanted, stored={name: stored.tensors[own].shape for name, own in known.items()})
    for tensor, parts in names.items():
        whole = stored.read(known[tensor]).float()
        rows = [model.get_parameter(name).shape[0] for name in parts]
        for name, part in zip(parts, torch.split(whole, rows), strict=True):
            # A clone, so that no parameter keeps the storage of the whole tensor alive
            hf.set_parameter(model, name, part.clone() if len(parts) > 1 else part)
    return model


def _without_weights(settings: Mapping[str, Any], folder: Path, where: str) -> Decoder:
    text, vision = settings.get("text_config"), settings.get("vision_config")
    if not isinstance(text, Mapping) or not isinstance(vision, Mapping):
        raise ModelError(f"{where}: text_config or vision_config is missing, so the model is not complete")
    text, vision = cast(Mapping[str, Any], text), cast(Mapping[str, Any], vision)
    kind = vision.get("model_type", folders.CLIP_VISION)
    if kind not in (folders.CLIP_VISION, folders.SIGLIP_VISION):
        raise ModelError(
            f"{where}: vision_config.model_type is {kind!r}; known are {folders.CLIP_VISION} and "
            f"{folders.SIGLIP_VISION}"
        )
    is_tied = bool(settings.get("tie_word_embeddings")) or bool(text.get("tie_word_embeddings"))
    model = Decoder(hf.config_from_hf({**text, "tie_word_embeddings": is_tied}, source=f"{where}: text_config"))
    tower = VisionTower(folders.tower_config(vision, folder, is_clip=kind == folders.CLIP_VISION))
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
    if name.startswith(TOWER) and not name.startswith(TOWER + folders.VISION_PREFIX):
        return TOWER + folders.VISION_PREFIX + name.removeprefix(TOWER)
    return name


def _strategy(tower: VisionTower) -> str:
    """Selection of the tower's tokens: `default` leaves the class token out."""
    return "default" if tower.config.pooling == "class_token" else "full"
