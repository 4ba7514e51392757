"""Classification of images: cross-entropy of a ResNet or a vision transformer with distributions over classes, which
MixUp, CutMix and label smoothing produce; and the trained classifier with its folder.

The training loop trains a decoder; here the classifier is the objective's own module, and the decoder that carries it
(`carrier`) is frozen and has next to no weights. A row is one image with a single token, so the loop's tokens are
images.

In quantization-aware training, weights have a symmetric step for each output channel. A batch norm multiplies a
channel, and so its step, and leaves the codes. Training therefore rounds to the codes of the matrix with the norm
folded in (Jacob et al. 2018, section 3.2), for any running statistics.

Legend: B rows, T tokens, N images (of this rank), C colors, S pixels of a side, K classes.
"""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from modelwright.compress.fold import fold_batch_norms
from modelwright.compress.int8 import GridLinear, TrainedGrid
from modelwright.core import compatibility
from modelwright.core.artifacts import write_atomic
from modelwright.core.config import ConfigError, ModelError, dump, only_for, parse
from modelwright.data.images.decode import square_pixels
from modelwright.data.images.store import LabeledImages
from modelwright.data.rows.ahead import PlannedRows, images_of, own_images
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.decoder import Decoder, Linear, ModelConfig
from modelwright.model.hf import read_json, read_tensors, save_tensors
from modelwright.model.vision.classifier import ImageClassifier, Shape, forward_flops, has_batch_norm, statistics_over
from modelwright.model.vision.config import ResNetConfig, VisionConfig
from modelwright.model.vision.folders import load_vision_tower
from modelwright.model.vision.vit import VisionTower
from modelwright.objectives.image_batches import Augmented, ImageAugmentation, ImageAugmentationConfig, image_batches
from modelwright.ops.image_augment import soft_target
from modelwright.ops.int_grid import WeightGrid
from modelwright.parallel.mesh import World, gather_rows, single
from modelwright.train.config import TrainConfig
from modelwright.train.objective import ModelLayout, Objective, Terms
from modelwright.train.techniques.fake_quantization import QuantizationAwareConfig

ImageQuantization = Literal["none", "int8", "int4", "int8_static", "int4_static"]
OBSERVED_SHARE = 0.1
"""Share of the steps in which static ranges of activations are observed, before anything is rounded."""


def quantization_of(name: ImageQuantization, num_steps: int) -> QuantizationAwareConfig:
    """Returns the grids and the first step of rounding for a setting other than `none`."""
    grid = WeightGrid(bits=4 if name.startswith("int4") else 8)
    if name.endswith("static"):
        start_step = max(1, round(OBSERVED_SHARE * num_steps))
        return QuantizationAwareConfig(weights=grid, activations="tensor_moving_average", start_step=start_step)
    return QuantizationAwareConfig(weights=grid)


def trained_grid(settings: QuantizationAwareConfig, ranges: Mapping[str, tuple[float, float]]) -> TrainedGrid:
    """Returns the final grid of a training. ranges: input ranges of layers, by their names in the classifier."""
    activations = "tensor" if settings.has_observers else "token"
    return TrainedGrid(weights=settings.weights, activations=activations, ranges=ranges)


CLASSIFIER = "classifier"
"""Name in `Decoder.heads`."""
CROSS_ENTROPY = "cross_entropy"
"""Name of the loss term."""
PIXELS, TARGETS = "pixels_BCSS", "targets_BK"
MEAN, STD = 0.5, 0.5
"""Mean and standard deviation for a ResNet's colors in [0, 1]."""
NEEDS = frozenset({
    compatibility.WHOLE_LAYERS, compatibility.WHOLE_ROWS, compatibility.SYNCHRONOUS_UPDATES,
    compatibility.EQUAL_REPLICAS, compatibility.SAME_UNITS, compatibility.TRAINED_WEIGHTS,
})  # fmt: skip
"""Requirements on the layout and the settings of a training."""
_CARRIER = ModelConfig(
    vocab_size=8, num_layers=1, model_dim=8, num_heads=1, num_kv_heads=1, head_dim=8, ffn_dim=8, max_seq_len=8
)


@dataclass(frozen=True, kw_only=True)
class ImageTrainConfig(TrainConfig):
    """Image classification; a row is one image, so `batch_tokens` is images per update times `pack.seq_len`."""

    learning_rate: float = 1e-3
    """Peak learning rate."""
    architecture: Literal["resnet", "vit"] = "resnet"
    """A residual network with batch norm, or a vision transformer."""
    resnet: ResNetConfig = field(default_factory=ResNetConfig, metadata=only_for("architecture", "resnet"))
    vision_tower: VisionConfig = field(default_factory=VisionConfig, metadata=only_for("architecture", "vit"))
    augment: ImageAugmentationConfig = field(default_factory=ImageAugmentationConfig)
    label_smoothing: float = 0.0
    """Share of a label that is spread over all classes (Szegedy et al. 2016); 0.1 is usual."""
    quantization: ImageQuantization = "none"
    """Train for integer weights of all layers but the first and the last one, and end with them. `int8` and `int4`
    round activations by the largest magnitude of each patch, or each token, at run time; `int8_static` and
    `int4_static` by one range for each layer, which is observed in the first tenth of the steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(f"label_smoothing: must be in [0, 1), got {self.label_smoothing}; 0.1 is usual")
        if self.gradient_accumulation_steps != 1 and has_batch_norm(self.shape):
            raise ConfigError(
                f"gradient_accumulation_steps: batch norm takes the statistics of a whole batch, which "
                f"{self.gradient_accumulation_steps} microbatches would not see; set it to 1, or architecture to vit"
            )
        if self.batch_selection.signal != "none":
            raise ConfigError("batch_selection.signal: judges tokens of text, which images lack; set none")
        of_blocks = {
            "compile": self.compile is True,
            "activation_checkpointing.mode": self.activation_checkpointing.mode != "none",
            "activation_checkpointing.offload": self.activation_checkpointing.offload != "none",
            "neftune_noise_alpha": self.neftune_noise_alpha > 0,
        }
        for name, is_on in of_blocks.items():
            if is_on:
                raise ConfigError(f"{name}: acts on a decoder's layers, which an image classifier lacks; remove it")

    def features(self) -> list[compatibility.Feature]:
        return [*super().features(), compatibility.feature("architecture", self.architecture, needs=NEEDS)]

    @property
    def shape(self) -> Shape:
        """Shape of the classifier, unless a folder decides it."""
        return self.resnet if self.architecture == "resnet" else self.vision_tower


def carrier(dtype: torch.dtype = torch.float32) -> Decoder:
    """Returns the decoder that the loop runs on one token for each image and never changes."""
    model = Decoder(_CARRIER)
    model.init_weights(0)
    return model.to(dtype)


@dataclass(kw_only=True)
class ImageClassification(Objective):
    """Cross-entropy of images with equal weights. heldout_images: None without held-out rows."""

    needs = NEEDS
    trains_decoder = False
    metric_names = ("accuracy",)
    source: PlannedRows
    config: ImageTrainConfig
    images: LabeledImages
    heldout_images: LabeledImages | None = None
    seed: int = 0
    data_ranks: World = field(default_factory=single)
    """Ranks that share a batch and its statistics."""
    num_groups: int = 0
    """Number of groups of this rank's newest batch."""

    @cached_property
    def shape(self) -> Shape:
        """Shape of the classifier; the folder of initial weights decides it, if there is one."""
        return self._tower.config if self._tower else self.config.shape

    @cached_property
    def _tower(self) -> VisionTower | None:
        is_from_folder = self.config.architecture == "vit" and self.config.vision_tower.init_from
        return load_vision_tower(Path(self.config.vision_tower.init_from)) if is_from_folder else None

    @property
    def num_classes(self) -> int:
        return len(self.images.classes)

    def own_modules(self, config: ModelConfig) -> Mapping[str, nn.Module]:
        classifier = ImageClassifier(self.shape, self.num_classes)
        if self._tower:
            classifier.tower.load_state_dict(self._tower.state_dict())
        return {CLASSIFIER: classifier}

    def own_flops(self, batch: TokenBatch) -> float:
        # Backward costs twice as much as forward
        return 3.0 * float(_is_image(batch).sum()) * self._flops_of_image

    @cached_property
    def _flops_of_image(self) -> int:
        return forward_flops(self.shape, self.num_classes)

    def begin(self, layout: ModelLayout) -> None:
        self.data_ranks = layout.mesh.data

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        rows = image_batches(
            self.source, self.images.store, first=first, rank=rank, world_size=world_size, needed=self._needed
        )
        for step, batch in enumerate(rows, start=first):
            own = everyone = image_numbers(batch)
            if self.config.augment.mixes and world_size > 1:
                loader = self.source.fork()
                everyone = images_of(loader.rows, loader.share(step).groups)
            self.num_groups = batch.num_groups
            yield self.with_images(batch, self._augmentation(step)(own, everyone))

    def _augmentation(self, step: int) -> ImageAugmentation:
        return ImageAugmentation(
            config=self.config.augment,
            seed=self.seed,
            step=step,
            num_classes=self.num_classes,
            smoothing=self.config.label_smoothing,
            image=lambda number: colors(self.images, number, self.shape),
            label=lambda number: int(self.images.labels[number]),
        )

    def _needed(self, loader: PlannedRows, step: int, rank: int, world_size: int) -> list[int]:
        """Returns the images of a rank's rows and their partners, which other ranks may have."""
        own = own_images(loader, step, rank, world_size)
        if not self.config.augment.mixes or world_size == 1:
            return own
        partners = self._augmentation(step).partners(images_of(loader.rows, loader.share(step).groups))
        return list(dict.fromkeys([*own, *(partners[number] for number in own)]))

    def prepare(self, batch: TokenBatch, model: Decoder) -> TokenBatch:
        images = self.heldout_images
        assert images is not None, "held-out rows come with their images"
        numbers = image_numbers(batch)
        found = Augmented(
            torch.stack([colors(images, number, self.shape) for number in numbers]),
            torch.stack([soft_target(self.num_classes, int(images.labels[number])) for number in numbers]),
        )
        return self.with_images(batch, found)

    def with_images(self, batch: TokenBatch, found: Augmented) -> TokenBatch:
        """Returns rows of one token for each image, on the device of the batch. Rows of padding come last."""
        none_BT = batch.input_ids_BT.new_zeros(len(found.images_BCSS), 1)
        pixels_BCSS = normalized(found.images_BCSS, self.shape).to(none_BT.device)
        rows = TokenBatch(
            input_ids_BT=none_BT,
            labels_BT=none_BT.clone(),
            positions_BT=none_BT.clone(),
            segments_BT=none_BT.int(),
            extras={PIXELS: pixels_BCSS, TARGETS: found.targets_BK.to(none_BT.device)},
        )
        return rows.padded(batch.num_rows)

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        return {CROSS_ENTROPY: _is_image(batch).sum()}

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        """Raises `ConfigError` with batch norm for a part of a batch that was divided because memory ran out."""
        if model.training and batch.num_groups < self.num_groups and has_batch_norm(self.shape):
            raise ConfigError(
                "batch_tokens: the batch does not fit into memory whole, but batch norm takes its statistics from all "
                "of it; lower batch_tokens, or spread it over more processes"
            )
        is_image_B = _is_image(batch)
        pixels_NCSS, targets_NK = batch.extras[PIXELS][is_image_B], batch.extras[TARGETS][is_image_B]
        statistics = nullcontext()
        if self.data_ranks.size > 1:  # one process keeps batch norm's faster operator
            head = model.heads[CLASSIFIER]
            statistics = statistics_over(head, lambda own_E: gather_rows(own_E[None], self.data_ranks)[0])
        with statistics:
            logits_NK = model.head_output(CLASSIFIER, pixels_NCSS)
        is_right_N = logits_NK.argmax(dim=1) == targets_NK.argmax(dim=1)
        # Cross-entropy with distributions over classes, in nats, in FP32 at least
        wide_NK = logits_NK.to(torch.promote_types(logits_NK.dtype, torch.float32))
        loss = -(targets_NK.to(wide_NK.dtype) * wide_NK.log_softmax(dim=1)).sum()
        return Terms({CROSS_ENTROPY: loss}, {"accuracy": (is_right_N.sum(), is_image_B.sum())})


def image_numbers(batch: TokenBatch) -> list[int]:
    """Returns the image numbers of packed rows, without padding."""
    values_B = batch.extras["values_BT"][:, 0]
    is_image_B = batch.segments_BT[:, 0] >= 0
    return [round(float(value)) - 1 for value in values_B[is_image_B].cpu()]


def colors(images: LabeledImages, number: int, shape: Shape) -> Tensor:
    """Reads an image [C, S, S] in [0, 1]."""
    fit = "crop" if isinstance(shape, ResNetConfig) else shape.fit
    return torch.from_numpy(images.pixels(number, size=shape.image_size, fit=fit).copy()).float() / 255.0


def normalized(images_BCSS: Tensor, shape: Shape) -> Tensor:
    """Normalizes images by the means and deviations of their classifier."""
    if isinstance(shape, ResNetConfig):
        return (images_BCSS - MEAN) / STD
    mean_C11, std_C11 = (torch.tensor(one)[:, None, None] for one in (shape.pixel_mean, shape.pixel_std))
    return (images_BCSS - mean_C11) / std_C11


def _is_image(batch: TokenBatch) -> Tensor:
    """Returns the rows with images, bool [B]; rows of padding lack a target."""
    return batch.extras[TARGETS].sum(dim=1) > 0


def quantize_classifier(model: ImageClassifier, grid: TrainedGrid) -> ImageClassifier:
    """Returns a new classifier for inference; `model` is not changed. grid: has ranges by names of layers."""
    result = copy.deepcopy(model).eval()
    # Folded first: the codes are those of the weights with the norms in them
    fold_batch_norms(result)
    for name, one in list(result.named_modules()):
        if isinstance(one, Linear):
            layer = GridLinear(grid.codes(name, one.weight), grid.weights, grid.inputs(name))
            layer.bias = nn.Parameter(one.bias.detach(), requires_grad=False) if one.has_bias else None
            parent, _, leaf = name.rpartition(".")
            setattr(result.get_submodule(parent), leaf, layer)
    return result.requires_grad_(False)


WEIGHTS, SETTINGS = "classifier.safetensors", "classifier.json"
IMAGES_AT_ONCE = 64
_SHAPES: dict[str, type[ResNetConfig] | type[VisionConfig]] = {"resnet": ResNetConfig, "vit": VisionConfig}


@dataclass(frozen=True)
class TrainedClassifier:
    """A classifier with the names of its classes. grid: grid of its integers, None in floating point."""

    model: ImageClassifier
    classes: Sequence[str]
    grid: TrainedGrid | None = None

    def quantized(self, grid: TrainedGrid) -> "TrainedClassifier":
        """Returns a quantized copy, with batch norms folded into the integer weights."""
        return replace(self, model=quantize_classifier(self.model, grid), grid=grid)

    @property
    def fit(self) -> Literal["crop", "stretch"]:
        """Conversion of an image to a square."""
        return self.model.shape.fit if isinstance(self.model.shape, VisionConfig) else "crop"

    def classify(self, files: Sequence[bytes]) -> NDArray[np.float64]:
        """Probabilities of all classes for image files [N, K]. Raises `ImageFault` for one that cannot be used."""
        size = self.model.shape.image_size
        return self.probabilities([square_pixels(one, size=size, fit=self.fit) for one in files])

    @torch.no_grad()
    def probabilities(self, squares: Sequence[NDArray[np.uint8]]) -> NDArray[np.float64]:
        """Probabilities of all classes for images as pixels [3, S, S], [N, K]."""
        self.model.eval()
        device = self.model.head.weight.device
        found = [np.zeros((0, len(self.classes)))]
        for first in range(0, len(squares), IMAGES_AT_ONCE):
            pixels = torch.from_numpy(np.stack(squares[first : first + IMAGES_AT_ONCE])).float() / 255.0
            logits = self.model(normalized(pixels, self.model.shape).to(device))
            found.append(logits.double().softmax(dim=1).cpu().numpy())
        return np.concatenate(found)


def save_classifier(classifier: TrainedClassifier, folder: Path) -> None:
    """Write a classifier into a folder."""
    shape: Shape = classifier.model.shape
    kind = next(name for name, one in _SHAPES.items() if isinstance(shape, one))
    weights = {name: one.detach().cpu().contiguous() for name, one in classifier.model.state_dict().items()}
    save_tensors(folder / WEIGHTS, weights)
    if classifier.grid is not None:
        classifier.grid.save(folder)
    settings = {"architecture": kind, "shape": dump(shape, constants=True), "classes": list(classifier.classes)}
    write_atomic(folder / SETTINGS, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def load_classifier(folder: Path) -> TrainedClassifier:
    """Read the classifier that the stage `vision` wrote. Raises `ModelError` for a folder of another kind."""
    settings = read_json(folder / SETTINGS)
    try:
        shape = parse(_SHAPES[settings["architecture"]], settings["shape"], constants=True)
        classes = [str(name) for name in settings["classes"]]
    except (KeyError, TypeError, ConfigError) as error:
        path = folder / SETTINGS
        raise ModelError(f"{path}: is not that of an image classifier ({error}); copy the folder again") from None
    weights, _ = read_tensors(folder / WEIGHTS)
    grid, model = TrainedGrid.load(folder), ImageClassifier(shape, len(classes))
    if grid is not None:
        # Random weights, for the names and shapes of a quantized classifier's tensors
        model = quantize_classifier(model, grid)
    wanted = {name: one.shape for name, one in model.state_dict().items()}
    if wanted != {name: one.shape for name, one in weights.items()}:
        raise ModelError(f"{folder / WEIGHTS}: does not fit {SETTINGS} in the same folder; copy the folder again")
    model.load_state_dict(weights)
    return TrainedClassifier(model.eval(), classes, grid)
