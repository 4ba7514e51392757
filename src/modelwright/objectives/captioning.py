"""Captioning by prefix (Liu et al. 2023, "Visual Instruction Tuning"): the decoder reads the patches of an image in
place of image tokens, and learns to write the answers.

The rows are those of conversations (`pipeline/stages/caption.py`); the value of a piece is the number of its image
plus 1.

Legend: B rows, T tokens, S pieces of a row, I images of a row at most, C colors, H pixels of a side.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from modelwright.core.compatibility import WHOLE_LAYERS, WHOLE_ROWS, Feature, feature
from modelwright.core.config import ConfigError, DataError, constant
from modelwright.data.images.store import ImageStore
from modelwright.data.rows.ahead import PlannedRows
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.model.vision.config import VisionConfig
from modelwright.model.vision.folders import load_vision_tower
from modelwright.model.vision.llava import IMAGES, PIXELS, ImagePrefix
from modelwright.model.vision.vit import VisionTower
from modelwright.objectives.image_batches import fill_squares, image_batches, image_numbers
from modelwright.objectives.next_token import num_targets
from modelwright.ops.cross_entropy import CHUNK_TOKENS
from modelwright.train.config import TrainConfig
from modelwright.train.objective import Objective, Terms

NEEDS = frozenset({WHOLE_LAYERS, WHOLE_ROWS})
"""Requirements on the layout: images replace embeddings of whole rows, before the first layer."""
LOSS = "loss"
"""Name of the loss term."""


@dataclass(frozen=True, kw_only=True)
class CaptionConfig(TrainConfig):
    """Training of a decoder to answer about images."""

    learning_rate: float = 1e-3
    """Peak learning rate."""
    question: str = "What does the image show?"
    """Question that captions answer. Conversations have their own questions."""
    image_token: str = "<|image|>"
    """Special token of the tokenizer that a patch of an image replaces; its own embedding is never used. A new
    tokenizer gets it by `tokenizer.special_tokens`."""
    train_tower: bool = False
    """Train the vision tower, too; the projector and the decoder are always trained."""
    feature_layer: int = -2
    """Block of the tower whose output is read: -1 is the last one, -2 the one before, as in LLaVA."""
    vision_tower: VisionConfig = field(default_factory=VisionConfig)
    """A run with the stage align uses the tower that align has trained, unless caption names another folder."""
    max_answer_tokens: int = constant(48)
    """Maximum tokens of the caption of a held-out image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.question.strip():
            raise ConfigError("question: is empty; give the question that captions answer")
        if not self.image_token:
            raise ConfigError("image_token: is empty; name a special token of the tokenizer")
        if self.max_answer_tokens < 1:
            raise ConfigError(f"max_answer_tokens: must be at least 1, got {self.max_answer_tokens}")
        if self.batch_selection.signal != "none":
            raise ConfigError("batch_selection.signal: judges rows without their images; set none")

    def features(self) -> list[Feature]:
        return [*super().features(), feature("image_token", self.image_token, needs=NEEDS)]


@dataclass(kw_only=True)
class Captioning(Objective):
    """Cross-entropy of answers, every token with equal weight. tower: folder of the vision tower that training starts
    from, None for random weights of `shape`; image_token: its id; images, heldout_images: None for rows without images.
    """

    needs = NEEDS
    source: PlannedRows
    config: CaptionConfig
    shape: VisionConfig
    tower: Path | None
    image_token: int
    images: ImageStore | None = None
    heldout_images: ImageStore | None = None
    flops_of_image: int = field(init=False, default=0)
    """FLOPs of tower and projector for one image, forward and backward."""

    def own_modules(self, config: ModelConfig) -> Mapping[str, nn.Module]:
        from torch.utils.flop_counter import FlopCounterMode

        tower = load_vision_tower(self.tower) if self.tower else VisionTower(self.shape)
        layer = self.config.feature_layer
        prefix = ImagePrefix(tower, config.model_dim, feature_layer=layer, token_id=self.image_token)
        prefix.freeze(whole_tower=not self.config.train_tower)
        # Counted by a backward pass of a copy without values: frozen parts need none, which a formula would miss
        size, width = self.shape.image_size, config.model_dim
        with torch.device("meta"):
            empty = ImagePrefix(VisionTower(self.shape), width, feature_layer=layer, token_id=self.image_token)
            empty.freeze(whole_tower=not self.config.train_tower)
            pixels = torch.zeros(1, 3, size, size)
        with FlopCounterMode(display=False) as counter, torch.enable_grad():
            empty(pixels).sum().backward()
        self.flops_of_image = counter.get_total_flops()
        return {IMAGES: prefix}

    def own_flops(self, batch: TokenBatch) -> float:
        return float((image_numbers(batch) >= 0).sum()) * self.flops_of_image

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        for batch in image_batches(self.source, self.images, first=first, rank=rank, world_size=world_size):
            yield self.with_images(batch, self.images)

    def prepare(self, batch: TokenBatch, model: Decoder) -> TokenBatch:
        return self.with_images(batch, self.heldout_images)

    def with_images(self, batch: TokenBatch, store: ImageStore | None) -> TokenBatch:
        """Adds the images of its rows to a batch, uint8 [B, I, 3, H, H], in the order of their pieces. Raises
        `DataError` for rows of a tower with other patches.
        """
        num_tokens = int((batch.input_ids_BT == self.image_token).sum())
        num_images = int((image_numbers(batch) >= 0).sum())
        if num_tokens != num_images * self.shape.num_patches:
            raise DataError(
                f"caption: the rows have {num_tokens} image tokens for {num_images} images of {self.shape.num_patches} "
                "patches: they were packed for another vision tower or another image token; pack them again"
            )
        numbers = [[number for number in row if number >= 0] for row in image_numbers(batch).tolist()]
        # At least one image wide, so that all ranks run the tower
        room, size = max(1, *map(len, numbers)), self.shape.image_size
        pixels = np.zeros((batch.num_rows, room, 3, size, size), dtype=np.uint8)
        fill_squares(pixels, numbers, store, self.shape)
        return replace(batch, extras={**batch.extras, PIXELS: torch.from_numpy(pixels).to(batch.input_ids_BT.device)})

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        return {LOSS: num_targets(batch)}

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        return Terms({LOSS: model.cross_entropy(output, batch.labels_BT, chunk_tokens=CHUNK_TOKENS)})
