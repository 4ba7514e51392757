"""Contrastive alignment of texts with images and with code: NT-Xent, its form with negatives of the other view alone
(CLIP), and SigLIP. The decoder reads texts and code, a vision tower reads images; `AlignedModel` is the result.

A pair is a text and its counterpart (an image, a piece of code). A process computes the losses of its own pairs against
the pairs of all processes; the sum over the processes is the loss of the whole batch. Pairs with the same text are
neither positives nor negatives of each other.

The rows are groups of two (`pipeline/stages/align.py`): the texts of some pairs, and their counterparts. A piece of the
second row is code, or a placeholder for an image; the value of the piece is the number of the image plus 1.

Legend: B rows, T tokens, G groups of two rows, S pieces of a row or pixels of a side, P pairs of this rank, N of all
ranks, D width of the decoder, E width of the space, I images of a group.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from modelwright.core.artifacts import write_atomic
from modelwright.core.compatibility import SYNCHRONOUS_UPDATES, WHOLE_BATCHES, WHOLE_ROWS, Feature, feature
from modelwright.core.config import ConfigError, ModelError, constant
from modelwright.data.images.decode import square_pixels
from modelwright.data.images.store import ImageStore
from modelwright.data.rows.ahead import PlannedRows
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.model.hf import load_model, read_json, read_tensors, save_tensors, set_parameter
from modelwright.model.vision.config import VisionConfig
from modelwright.model.vision.folders import load_vision_tower, save_vision_tower
from modelwright.model.vision.vit import VisionTower
from modelwright.objectives.image_batches import fill_squares, image_batches, image_numbers
from modelwright.objectives.preference import Pairs
from modelwright.ops.piece_sums import piece_ends, piece_keys, piece_means
from modelwright.parallel.mesh import World, gather_rows, single
from modelwright.train.config import TrainConfig
from modelwright.train.objective import ModelLayout, Objective, Terms, forward

TEXT, CODE, IMAGE, SCALE = "text", "code", "image", "scale"
"""Names in `Decoder.heads`."""
MAX_SCALE = 100.0
"""Largest scale of cosines; a larger one makes training unstable (Radford et al. 2021, section 2.5)."""


class Projection(nn.Module):
    """A linear map without bias that computes in the format of its weight."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_outputs, num_inputs) / math.sqrt(num_inputs))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.to(self.weight.dtype), self.weight)


class ImageEncoder(nn.Module):
    """A vision tower with its projection."""

    def __init__(self, tower: VisionTower, embed_dim: int) -> None:
        super().__init__()
        self.tower = tower
        self.projection = Projection(tower.config.model_dim, embed_dim)

    def forward(self, pixels_NCSS: Tensor) -> Tensor:
        """Maps images to vectors [N, E]."""
        return self.projection(self.tower(pixels_NCSS))


class LearnedScale(nn.Module):
    """Factor of cosines, at most `MAX_SCALE`, and the bias that is added."""

    def __init__(self, temperature: float, bias: float) -> None:
        super().__init__()
        # One dimension each, because FSDP cannot shard scalars
        self.log_scale = nn.Parameter(torch.tensor([-math.log(temperature)]))
        self.bias = nn.Parameter(torch.tensor([bias]))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the scale and the bias, [2]; x is ignored, since heads are called with an input."""
        return torch.cat([_Cap.apply(self.log_scale, math.log(MAX_SCALE)).exp(), self.bias])  # type: ignore[union-attr]


class _Cap(torch.autograd.Function):
    """min(x, most), with the gradient of values beyond the limit that descent would lower."""

    @staticmethod
    def forward(ctx, x, most):
        ctx.save_for_backward(x > most)
        return x.clamp(max=most)

    @staticmethod
    def backward(ctx, grad):
        # With `clamp`, a value that an update has moved past the limit would stay there forever
        (is_beyond,) = ctx.saved_tensors
        return torch.where(is_beyond, grad.clamp(min=0.0), grad), None


def alignment_heads(
    vision: VisionConfig, *, model_dim: int, embed_dim: int, temperature: float, bias: float
) -> Mapping[str, nn.Module]:
    """Returns the heads by name. Raises `ModelError` if the folder of the vision tower cannot be read."""
    # Initial values come from PyTorch's default generator, in this order, unless the tower has a folder
    tower = load_vision_tower(Path(vision.init_from)) if vision.init_from else VisionTower(vision)
    return {
        TEXT: Projection(model_dim, embed_dim),
        CODE: Projection(model_dim, embed_dim),
        IMAGE: ImageEncoder(tower, embed_dim),
        SCALE: LearnedScale(temperature, bias),
    }


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
    own, everyone = (
        PairEmbeddings(*(one.to(torch.promote_types(pairs.texts.dtype, torch.float32)) for one in pairs))
        for pairs in (own, everyone)
    )
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
    pooling: Literal["mean", "last"] = constant("mean")
    """Representation of a text or of code: the mean of its hidden states, or the last one."""
    vision_tower: VisionConfig = field(default_factory=VisionConfig)

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
            self.config.vision_tower,
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
            yield self.with_pixels(batch, self.images, model)

    def prepare(self, batch: TokenBatch, model: Decoder) -> TokenBatch:
        return self.with_pixels(batch, self.heldout_images, model)

    def with_pixels(self, batch: TokenBatch, store: ImageStore | None, model: Decoder) -> TokenBatch:
        """Adds images to a batch, uint8 [B, I / 2, 3, S, S]: those of a group in order, divided among its two rows."""
        # The shape is that of the tower, which its folder decides if it comes from one
        tower = model.heads.get_submodule(f"{IMAGE}.tower") if IMAGE in model.heads else None
        shape = getattr(tower, "config", self.config.vision_tower)
        assert isinstance(shape, VisionConfig)
        numbers_GS = image_numbers(batch).unflatten(0, (-1, 2))[:, 1]
        of_groups = [[number for number in row if number >= 0] for row in numbers_GS.tolist()]
        # At least one image wide, so that all ranks run the tower
        room, size = max(1, -(-max(map(len, of_groups), default=0) // 2)), shape.image_size
        pixels = np.zeros((batch.num_groups, 2 * room, 3, size, size), dtype=np.uint8)
        fill_squares(pixels, of_groups, store, shape)
        # Extras have one entry for each row, and are split between its rows where a batch is divided
        flat = torch.from_numpy(pixels).unflatten(1, (2, room)).flatten(0, 1)
        return replace(batch, extras={**batch.extras, PIXELS: flat.to(batch.input_ids_BT.device)})

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
        # Both sides of the pairs, from hidden states, and a mask of those with images
        pooled_G2SD = pooled(output, batch.segments_BT, pairs.num_pieces, self.config.pooling).unflatten(0, (-1, 2))
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
        own = PairEmbeddings(F.normalize(texts_PE, dim=1), F.normalize(others_PE, dim=1))
        gathered_NE2, first = gather_rows(torch.cat(own, dim=1), axis)
        everyone = PairEmbeddings(*gathered_NE2.chunk(2, dim=1))
        # Texts are compared by a hash of their tokens: ranks exchange one number for each pair instead of rows
        keys_BS = piece_keys(batch.input_ids_BT, batch.positions_BT, batch.segments_BT, pairs.num_pieces)
        keys_P = keys_BS.unflatten(0, (-1, 2))[:, 0][pairs.is_pair_GS]
        keys_N, _ = gather_rows(keys_P, axis)
        places_P = first + torch.arange(len(keys_P), device=output.device)
        is_same_PN = keys_P[:, None] == keys_N
        scale, bias = model.head_output(SCALE, output).unbind()
        losses_P = contrastive_losses(self.config.loss, own, everyone, places_P, is_same_PN, scale=scale, bias=bias)
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


def pooled(hidden_BTD: Tensor, segments_BT: Tensor, num_pieces: int, pooling: Literal["mean", "last"]) -> Tensor:
    """Pools hidden states to vectors of pieces [B, S, D]."""
    if pooling == "last":
        segments_BT = torch.where(piece_ends(segments_BT), segments_BT, -1)
    return piece_means(hidden_BTD, segments_BT, num_pieces)


VISION_FOLDER, WEIGHTS, SETTINGS = "vision", "alignment.safetensors", "alignment.json"
ROWS_AT_ONCE = 32
_TOWER = f"{IMAGE}.tower."


@dataclass(frozen=True)
class AlignedModel:
    """A decoder with the heads of an alignment."""

    model: Decoder
    pooling: Literal["mean", "last"]

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
    def embed_tokens(
        self, head: Literal["text", "code"], sequences: Sequence[NDArray[np.integer]]
    ) -> NDArray[np.float32]:
        """Maps token ids of texts or pieces of code to unit vectors [N, E]."""
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
