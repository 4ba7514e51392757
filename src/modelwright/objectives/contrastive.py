"""Contrastive alignment of texts with images and with code: NT-Xent, its form with negatives of the other view alone
(CLIP), and SigLIP. The decoder reads texts and code, a vision tower reads images.

A pair is a text and its counterpart (an image, a piece of code). A process computes the losses of its own pairs against
the pairs of all processes; the sum over the processes is the loss of the whole batch. Pairs with the same text are
neither positives nor negatives of each other.

The rows are groups of two (`pipeline/stages/align.py`): the texts of some pairs, and their counterparts. A piece of the
second row is code, or a placeholder for an image; the value of the piece is the number of the image plus 1.

Legend: B rows, T tokens, G groups of two rows, S pieces of a row, P pairs of this rank, N of all ranks, D width of the
decoder, E width of the space, I images of a group.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelwright.core.compatibility import SYNCHRONOUS_UPDATES, WHOLE_BATCHES, WHOLE_ROWS, Feature, feature
from modelwright.core.errors import ConfigError
from modelwright.data.images.store import ImageStore
from modelwright.data.rows.ahead import PlannedRows
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.model.vision.config import VisionConfig
from modelwright.objectives.alignment_heads import CODE, IMAGE, SCALE, TEXT, alignment_heads
from modelwright.objectives.image_batches import fill_squares, image_batches, image_numbers
from modelwright.objectives.pairs import Pairs
from modelwright.ops.piece_sums import piece_ends, piece_keys, piece_means
from modelwright.parallel.mesh import World, gather_rows, single
from modelwright.train.config import TrainConfig
from modelwright.train.objective import ModelLayout, Objective, Terms

ContrastiveLoss = Literal["nt_xent", "clip", "siglip"]


class PairEmbeddings(NamedTuple):
    """Both sides of some pairs, [P, E] or [N, E] each, of length 1."""

    texts: Tensor
    others: Tensor


def contrastive_losses(
    loss: ContrastiveLoss,
    own: PairEmbeddings,
    everyone: PairEmbeddings,
    places_P: Tensor,
    is_same_PN: Tensor,
    *,
    scale: Tensor,
    bias: Tensor,
) -> Tensor:
    """Loss of each own pair [P], in FP32 at least, with gradients. places_P: positions of the own pairs among all;
    is_same_PN: true for pairs with the text of an own pair, itself included. scale: factor of cosines, 1 / temperature;
    bias: offset of cosines in `siglip`.

    `nt_xent` (Chen et al. 2020, section 2.1): both sides of a pair are anchors in turn, and both sides of all other
    pairs their negatives; the mean of the two cross-entropies. `clip` (Radford et al. 2021, section 2.3): the negatives
    are the other side's alone. `siglip` (Zhai et al. 2023, section 3.2): a logistic loss of every text with every other
    side.
    """
    own, everyone = _widened(own), _widened(everyone)
    if loss == "siglip":
        logits_PN = scale * (own.texts @ everyone.others.T) + bias
        is_positive_PN = places_P[:, None] == torch.arange(len(everyone.others), device=places_P.device)
        losses_PN = -F.logsigmoid(torch.where(is_positive_PN, logits_PN, -logits_PN))
        return torch.where(is_same_PN & ~is_positive_PN, 0.0, losses_PN).sum(dim=1)
    within = loss == "nt_xent"
    of_texts = _cross_entropies(own.texts, everyone.others, everyone.texts, places_P, is_same_PN, scale, within)
    of_others = _cross_entropies(own.others, everyone.texts, everyone.others, places_P, is_same_PN, scale, within)
    return (of_texts + of_others) / 2


def _cross_entropies(
    anchors_PE: Tensor, across_NE: Tensor, beside_NE: Tensor, places_P: Tensor, is_same_PN: Tensor, scale: Tensor,
    within: bool,
) -> Tensor:  # fmt: skip
    """Cross-entropies of anchors [P] with the other side and, if `within`, the anchors' own side as negatives."""
    across_PN = scale * (anchors_PE @ across_NE.T)
    is_positive_PN = places_P[:, None] == torch.arange(len(across_NE), device=places_P.device)
    # Other pairs with the same text are left out of the softmax
    logits_PK = across_PN.masked_fill(is_same_PN & ~is_positive_PN, -torch.inf)
    if within:
        beside_PN = scale * (anchors_PE @ beside_NE.T)
        logits_PK = torch.cat([logits_PK, beside_PN.masked_fill(is_same_PN, -torch.inf)], dim=1)
    return logits_PK.logsumexp(dim=1) - across_PN.gather(1, places_P[:, None])[:, 0]


def _widened(pairs: PairEmbeddings) -> PairEmbeddings:
    dtype = torch.promote_types(pairs.texts.dtype, torch.float32)
    return PairEmbeddings(pairs.texts.to(dtype), pairs.others.to(dtype))


CONTRASTIVE = "contrastive"
"""Name of the loss term."""
PIXELS = "pixels_BICSS"
NEEDS = frozenset({WHOLE_ROWS, WHOLE_BATCHES, SYNCHRONOUS_UPDATES})
"""Requirements on layout and settings: the pairs of a batch are each other's negatives."""
SIGLIP_BIAS = -10.0
"""Initial bias: at first nearly all pairs are negatives (Zhai et al. 2023, section 3.2)."""


@dataclass(frozen=True, kw_only=True)
class AlignConfig(TrainConfig):
    """Contrastive alignment of texts, code and images in one space."""

    learning_rate: float = 5e-4
    """Peak learning rate."""
    loss: ContrastiveLoss = "nt_xent"
    """`nt_xent` (Chen et al. 2020): negatives are both sides of all other pairs of the batch; `clip` (Radford et al.
    2021): the other sides alone; `siglip` (Zhai et al. 2023): a logistic loss of every text with every other side."""
    temperature: float = 0.07
    """Initial temperature, which is learned: 0.07 is CLIP's, 0.1 SigLIP's."""
    embed_dim: int = 128
    """Width of the common space."""
    pooling: Literal["mean", "last"] = "mean"
    """Representation of a text or of code: the mean of its hidden states, or the last one."""
    vision: VisionConfig = field(default_factory=VisionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.temperature <= 1:
            raise ConfigError(f"temperature: must be in (0, 1], got {self.temperature}; 0.07 is usual")
        if self.embed_dim < 1:
            raise ConfigError(f"embed_dim: must be at least 1, got {self.embed_dim}")
        if self.gradient_accumulation_steps != 1:
            raise ConfigError(
                f"gradient_accumulation_steps: {self.gradient_accumulation_steps} microbatches would not see each "
                "other's pairs, which are the negatives; set it to 1"
            )
        if self.batch_selection.signal != "none":
            raise ConfigError(
                "batch_selection.signal: judges rows alone, but pairs are each other's negatives; set none"
            )

    def features(self) -> list[Feature]:
        """Requirements on the layout, which is refused before anything is read if it cannot work."""
        return [*super().features(), feature("loss", self.loss, needs=NEEDS)]


@dataclass
class Contrastive(Objective):
    """Loss of pairs with equal weights. images, heldout_images: None for rows without images."""

    needs = NEEDS
    metric_names = ("accuracy/image", "accuracy/code", "scale")
    source: PlannedRows
    config: AlignConfig
    images: ImageStore | None = None
    heldout_images: ImageStore | None = None
    data_ranks: World = field(default_factory=single)
    """Ranks whose pairs are each other's negatives."""
    num_groups: int = 0
    """Number of groups of this rank's newest batch."""

    def own_modules(self, config: ModelConfig) -> Mapping[str, nn.Module]:
        return alignment_heads(
            self.config.vision,
            model_dim=config.model_dim,
            embed_dim=self.config.embed_dim,
            temperature=self.config.temperature,
            bias=SIGLIP_BIAS if self.config.loss == "siglip" else 0.0,
        )

    def begin(self, layout: ModelLayout) -> None:
        self.data_ranks = layout.mesh.data

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        for batch in image_batches(self.source, self.images, first=first, rank=rank, world_size=world_size):
            self.num_groups = batch.num_groups
            yield with_pixels(batch, self.images, vision_shape(model, self.config))

    def prepare(self, batch: TokenBatch, model: Decoder) -> TokenBatch:
        return with_pixels(batch, self.heldout_images, vision_shape(model, self.config))

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        return {CONTRASTIVE: Pairs.of(batch).count}

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        """Raises `ConfigError` for a part of a batch that was divided because memory ran out."""
        if model.training and batch.num_groups < self.num_groups:
            raise ConfigError(
                "batch_tokens: the batch does not fit into memory whole, but its pairs are each other's negatives; "
                "lower batch_tokens, or spread it over more processes"
            )
        # Held-out batches have negatives of this rank only, so that their loss does not depend on the number of ranks
        pairs, axis = Pairs.of(batch), self.data_ranks if model.training else single(output.device)
        own, is_image_P = embed_pairs(model, output, batch, pairs, self.config.pooling)
        gathered_NE2, first = gather_rows(torch.cat(own, dim=1), axis)
        everyone = PairEmbeddings(*gathered_NE2.chunk(2, dim=1))
        # Texts are compared by a hash of their tokens: ranks exchange one number for each pair instead of rows
        keys_BS = piece_keys(batch.input_ids_BT, batch.positions_BT, batch.segments_BT, pairs.num_pieces)
        keys_P = keys_BS.unflatten(0, (-1, 2))[:, 0][pairs.is_pair_GS]
        keys_N, _ = gather_rows(keys_P, axis)
        places_P = first + torch.arange(len(keys_P), device=output.device)
        is_same_PN = keys_P[:, None] == keys_N
        scale, bias = model.head_output(SCALE, output).unbind()
        losses_P = contrastive_losses(
            self.config.loss, own, everyone, places_P, is_same_PN, scale=scale, bias=bias
        )  # fmt: skip
        # Strictly nearer than all others: in a space that has collapsed into one point, no text finds its own side
        cosines_PN = own.texts.detach() @ everyone.others.detach().T
        is_right_P = ((cosines_PN < cosines_PN.gather(1, places_P[:, None])) | is_same_PN).all(dim=1)
        count = pairs.count
        metrics = {
            "accuracy/image": ((is_right_P & is_image_P).sum(), is_image_P.sum()),
            "accuracy/code": ((is_right_P & ~is_image_P).sum(), (~is_image_P).sum()),
            "scale": (scale.detach() * count, count),
        }
        return Terms({CONTRASTIVE: losses_P.sum()}, metrics)


def vision_shape(model: Decoder, config: AlignConfig) -> VisionConfig:
    """Returns the shape of the vision tower, which its folder decides if it comes from one."""
    tower = model.heads.get_submodule(f"{IMAGE}.tower") if IMAGE in model.heads else None
    shape = getattr(tower, "config", config.vision)
    assert isinstance(shape, VisionConfig)
    return shape


def embed_pairs(
    model: Decoder, output: Tensor, batch: TokenBatch, pairs: Pairs, pooling: Literal["mean", "last"]
) -> tuple[PairEmbeddings, Tensor]:
    """Both sides of the pairs [P, E], and a mask of those with images [P], from hidden states [B, T, D]."""
    pooled_G2SD = pooled(output, batch.segments_BT, pairs.num_pieces, pooling).unflatten(0, (-1, 2))
    texts_PD, others_PD = (pooled_G2SD[:, side][pairs.is_pair_GS] for side in range(2))
    numbers_GS = image_numbers(batch).unflatten(0, (-1, 2))[:, 1]
    is_image_P = numbers_GS[pairs.is_pair_GS] >= 0
    others_PE = model.head_output(CODE, others_PD)
    if PIXELS in batch.extras:
        pixels_GICSS = batch.extras[PIXELS].unflatten(0, (-1, 2)).flatten(1, 2)
        places_I = torch.arange(pixels_GICSS.shape[1], device=output.device)
        is_there_GI = places_I < ((numbers_GS >= 0) & pairs.is_pair_GS).sum(dim=1, keepdim=True)
        # One blank image more: every rank has a gradient of the tower, whatever pairs it got.
        pixels_KCSS = torch.cat([pixels_GICSS[is_there_GI], torch.zeros_like(pixels_GICSS[:1, 0])])
        images_KE = model.head_output(IMAGE, pixels_KCSS)[:-1]
        others_PE = others_PE.index_put((is_image_P.nonzero()[:, 0],), images_KE)
    texts_PE = model.head_output(TEXT, texts_PD)
    return PairEmbeddings(F.normalize(texts_PE, dim=1), F.normalize(others_PE, dim=1)), is_image_P


def pooled(hidden_BTD: Tensor, segments_BT: Tensor, num_pieces: int, pooling: Literal["mean", "last"]) -> Tensor:
    """Pools hidden states to vectors of pieces [B, S, D]."""
    if pooling == "last":
        segments_BT = torch.where(piece_ends(segments_BT), segments_BT, -1)
    return piece_means(hidden_BTD, segments_BT, num_pieces)


def with_pixels(batch: TokenBatch, store: ImageStore | None, shape: VisionConfig) -> TokenBatch:
    """Adds images to a batch, uint8 [B, I / 2, 3, S, S]: those of a group in order, divided among its two rows."""
    numbers_GS = image_numbers(batch).unflatten(0, (-1, 2))[:, 1]
    of_groups = [[number for number in row if number >= 0] for row in numbers_GS.tolist()]
    # At least one image wide, so that all ranks run the tower
    room, size = max(1, -(-max(map(len, of_groups), default=0) // 2)), shape.image_size
    pixels = np.zeros((batch.num_groups, 2 * room, 3, size, size), dtype=np.uint8)
    fill_squares(pixels, of_groups, store, shape)
    flat = torch.from_numpy(pixels).unflatten(1, (2, room)).flatten(0, 1)
    return replace(batch, extras={**batch.extras, PIXELS: flat.to(batch.input_ids_BT.device)})
