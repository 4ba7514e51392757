"""`AlignedModel`: a trained alignment, which maps texts, code and images to vectors of one space.

Its folder is that of a language model with its tokenizer, plus `vision/`, a vision tower that `transformers` reads,
`alignment.safetensors` with the projections, and `alignment.json`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from modelwright.core.artifacts import write_atomic
from modelwright.core.errors import ModelError
from modelwright.data.images.decode import square_pixels
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.decoder import Decoder
from modelwright.model.hf import load_model, read_json, read_tensors, save_tensors, set_parameter
from modelwright.model.vision.config import VisionConfig
from modelwright.model.vision.folders import save_vision_tower
from modelwright.model.vision.vit import VisionTower
from modelwright.objectives.alignment_heads import CODE, IMAGE, SCALE, TEXT, alignment_heads
from modelwright.objectives.contrastive import pooled
from modelwright.train.objective import forward

VISION_FOLDER, WEIGHTS, SETTINGS = "vision", "alignment.safetensors", "alignment.json"
ROWS_AT_ONCE = 32
_TOWER = f"{IMAGE}.tower."


@dataclass(frozen=True)
class AlignedModel:
    """A decoder with the heads of an alignment."""

    model: Decoder
    pooling: Literal["mean", "last"]

    def embed_texts(self, sequences: Sequence[NDArray[np.integer]]) -> NDArray[np.float32]:
        """Maps token ids of texts to unit vectors [N, E]."""
        return self._embed_tokens(TEXT, sequences)

    def embed_code(self, sequences: Sequence[NDArray[np.integer]]) -> NDArray[np.float32]:
        """Maps token ids of pieces of code to unit vectors [N, E]."""
        return self._embed_tokens(CODE, sequences)

    @torch.no_grad()
    def embed_images(self, files: Sequence[bytes]) -> NDArray[np.float32]:
        """Maps image files to unit vectors [N, E]. Raises `ImageFault` for one that cannot be used."""
        shape, device = _tower(self.model).config, self.model.embedding.weight.device
        vectors: list[Tensor] = []
        for first in range(0, len(files), ROWS_AT_ONCE):
            squares = [square_pixels(one, size=shape.image_size, fit=shape.fit) for one in files[first:][:ROWS_AT_ONCE]]
            pixels = torch.from_numpy(np.stack(squares)).to(device)
            vectors.append(F.normalize(self.model.head_output(IMAGE, pixels).float(), dim=1))
        return torch.cat(vectors).cpu().numpy()

    @torch.no_grad()
    def _embed_tokens(self, head: str, sequences: Sequence[NDArray[np.integer]]) -> NDArray[np.float32]:
        # By length, so that the rows of a batch need little padding
        order = sorted(range(len(sequences)), key=lambda number: len(sequences[number]))
        vectors: dict[int, Tensor] = {}
        for first in range(0, len(order), ROWS_AT_ONCE):
            numbers = order[first : first + ROWS_AT_ONCE]
            batch = TokenBatch.of_sequences([sequences[number] for number in numbers])
            batch = batch.to(self.model.embedding.weight.device)
            pooled_BD = pooled(forward(self.model, batch), batch.segments_BT, 1, self.pooling)[:, 0]
            embedded_BE = F.normalize(self.model.head_output(head, pooled_BD).float(), dim=1)
            vectors |= dict(zip(numbers, embedded_BE, strict=True))
        return torch.stack([vectors[number] for number in range(len(sequences))]).cpu().numpy()


def save_alignment(model: Decoder, folder: Path, settings: dict[str, Any]) -> None:
    """Write the heads of an alignment into its language model's folder. settings: `embed_dim`, `pooling`, `loss`."""
    weights = {name: one.detach().contiguous() for name, one in _own_heads(model).items()}
    save_vision_tower(_tower(model), folder / VISION_FOLDER)
    save_tensors(folder / WEIGHTS, weights)
    write_atomic(folder / SETTINGS, json.dumps(settings, indent=2) + "\n")


def load_aligned(folder: Path) -> AlignedModel:
    """Read the model that the stage `align` wrote. Raises `ModelError` for a folder of another kind."""
    if not (folder / SETTINGS).is_file():
        raise ModelError(f"{folder}: {SETTINGS} is missing; give the artifact of the stage align")
    settings = read_json(folder / SETTINGS)
    embed_dim, pooling = settings.get("embed_dim"), settings.get("pooling")
    if not isinstance(embed_dim, int) or embed_dim < 1 or pooling not in ("mean", "last"):
        raise ModelError(f"{folder / SETTINGS}: lacks embed_dim or pooling of an alignment; copy the folder again")
    model = load_model(folder)
    tensors, _ = read_tensors(folder / WEIGHTS)
    heads = alignment_heads(
        VisionConfig(init_from=str(folder / VISION_FOLDER)),
        model_dim=model.config.model_dim,
        embed_dim=embed_dim,
        temperature=1.0,
        bias=0.0,
    )
    for name in (TEXT, CODE, IMAGE, SCALE):
        model.heads[name] = heads[name]
    wanted = {name: one.shape for name, one in _own_heads(model).items()}
    if wanted != {name: one.shape for name, one in tensors.items()}:
        raise ModelError(f"{folder / WEIGHTS}: does not fit {SETTINGS} in the same folder; copy the folder again")
    for name, tensor in tensors.items():
        set_parameter(model.heads, name, tensor)
    return AlignedModel(model.eval(), pooling)


def _own_heads(model: Decoder) -> dict[str, nn.Parameter]:
    """Returns the parameters of the heads without the vision tower, which has its own folder."""
    return {name: one for name, one in model.heads.named_parameters() if not name.startswith(_TOWER)}


def _tower(model: Decoder) -> VisionTower:
    tower = model.heads.get_submodule(f"{IMAGE}.tower")
    assert isinstance(tower, VisionTower)
    return tower
