"""vision: a classifier of images, a ResNet or a vision transformer, by the training loop of all stages.

A row is one image: two end tokens whose value is its number plus 1 in the store `images-<split>` next to the rows,
which has the classes, too. The class of an image is its field `label`, or without one its caption. Artifact: the
classifier (`objectives/image_classifier.py`), with integer weights if it was trained for them. Facts:
`heldout_images`, its accuracy on held-out images next to logistic regression on pixels; `quantization`, what integers
save and cost.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from modelwright.compress.int8 import weight_bytes
from modelwright.core.errors import ConfigError, DataError
from modelwright.core.rundir import RunDir
from modelwright.core.seeds import derive_seed
from modelwright.data.clean.folder import read_kept
from modelwright.data.document import Split
from modelwright.data.images.decode import KEY, StoredImage
from modelwright.data.images.store import (
    FORMAT,
    LabeledImages,
    StoreWriter,
    class_of,
    images_folder,
    open_images,
    write_images,
    write_labels,
)
from modelwright.data.rows.pack import TokenSequence
from modelwright.model.vision.classifier import ImageClassifier, forward_flops
from modelwright.objectives.image_classification import (
    CLASSIFIER,
    ImageClassification,
    ImageTrainConfig,
    carrier,
    quantization_of,
    trained_grid,
)
from modelwright.objectives.image_classifier import TrainedClassifier, save_classifier
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.estimate.cost import StageEstimate
from modelwright.pipeline.report.blocks import Block, Note, Table, count, percent, size
from modelwright.pipeline.report.run_data import StageData
from modelwright.pipeline.stage import Rates, RowSet, StageInputs, StageSpec
from modelwright.pipeline.stages.align import MOST_IMAGES
from modelwright.pipeline.stages.alignment import metric_charts
from modelwright.pipeline.stages.image_accuracy import accuracy_facts, accuracy_table, measure_accuracy, share_right
from modelwright.pipeline.stages.pack import PACK
from modelwright.pipeline.stages.rows import PackJob, RowUse, Sequences
from modelwright.pipeline.stages.training import FurtherModels, TrainedModel, training_spec
from modelwright.train.techniques.fake_quantization import NEEDS as QUANTIZATION_NEEDS
from modelwright.train.techniques.fake_quantization import RANGES, fake_quantization

UNKNOWN = "class without a training image"
"""Reason for which a held-out image is left out."""


def open_labeled(rows: Path, split: str) -> LabeledImages | None:
    """Opens the images of a split with their classes; None for a split without images. rows: folder of the rows."""
    store = open_images(rows, split)
    return LabeledImages(store) if store is not None else None


def _pack_labeled(job: PackJob, split: Split) -> None:
    if job.settings.mode == "length_buckets":
        raise ConfigError("pack.mode: length_buckets does not apply to images; choose best_fit or one_per_row")
    classes = training_classes(job.clean)
    folder = images_folder(job.context.output.path / LABELED_ROWS.name, split)
    labels: list[int] = []
    unknown: list[str] = []
    with write_images(folder) as images:
        rows = replace(job, settings=replace(job.settings, mode="one_per_row"))
        report = rows.pack(f"{LABELED_ROWS.name}/{split}", _sequences(job, split, images, classes, labels, unknown))
    write_labels(folder, labels, classes)
    if unknown and report:
        report["skipped"] = {**report["skipped"], UNKNOWN: len(unknown)}
    if unknown:
        job.context.progress.note(
            f"pack: {len(unknown):,} held-out images are left out because no training image has their class, such as "
            f"{unknown[0]!r}"
        )


def training_classes(clean: Path) -> list[str]:
    """Returns the names of the classes, sorted. Raises `DataError` if the images are not divided into classes."""
    names = [class_of(document) for document in read_kept(clean, split="train", kinds=("image",))]
    classes = sorted(set(names))
    remedy = "give every record a field label, or every image a caption that is the name of its class"
    if names and len(classes) < 2:
        raise DataError(f"vision: all {len(names):,} training images have the class {classes[0]!r}; {remedy}")
    if len(classes) > len(names) / 2:
        raise DataError(f"vision: {len(names):,} training images have {len(classes):,} different classes; {remedy}")
    return classes


def _sequences(
    job: PackJob, split: Split, images: StoreWriter, classes: list[str], labels: list[int], unknown: list[str]
) -> Sequences:
    """Yields rows; fills the labels of the images that were written, and the classes that training does not have."""
    places = {name: place for place, name in enumerate(classes)}
    for document in read_kept(job.clean, split=split, kinds=("image",)):
        name = class_of(document)
        if name not in places:
            unknown.append(name)
            continue
        number = images.add(StoredImage.from_plain(document.meta[KEY]).data)
        if number > MOST_IMAGES:
            raise DataError(f"pack: there are more than {MOST_IMAGES:,} images; pack them in several runs")
        labels.append(places[name])
        source, score = job.labels(document)
        yield TokenSequence(np.full(2, job.tokenizer.eos_id), source=source, score=score, value=float(number + 1))


LABELED_ROWS = RowSet(
    name="labeled_images",
    title="images with classes",
    pack=_pack_labeled,
    documents="image with a class",
    learned="images",
    decides=lambda config: {"images": FORMAT},
)


PREFIX = f"heads.{CLASSIFIER}."
"""Prefix of the names of a classifier's layers in the model that is trained."""
USUAL_CLASSES = 10
"""Number of classes that an estimate assumes before the images are read."""


def _objective(inputs: StageInputs) -> ImageClassification:
    assert inputs.images is not None
    rows = inputs.parents[PACK.name] / LABELED_ROWS.name
    return ImageClassification(
        source=inputs.plan,
        config=inputs.training,
        images=LabeledImages(inputs.images),
        heldout_images=open_labeled(rows, "heldout"),
        seed=derive_seed(inputs.config.seed, VISION.name, "augment"),
    )


def _save(trained: TrainedModel) -> Mapping[str, Any]:
    assert trained.data is not None
    assert trained.data.images is not None
    training, heldout = LabeledImages(trained.data.images), open_labeled(trained.heldout.parent, "heldout")
    model = trained.model.heads[CLASSIFIER]
    assert isinstance(model, ImageClassifier)
    before = TrainedClassifier(model.eval(), training.classes)
    classifier, config = before, trained.config.section(VISION)
    assert isinstance(config, ImageTrainConfig)
    if config.quantization != "none":
        stored = json.loads((trained.context.folder.path / RANGES).read_text(encoding="utf-8"))
        own = {name.removeprefix(PREFIX): ends for name, ends in stored.items() if name.startswith(PREFIX)}
        ranges = {name: (float(least), float(most)) for name, (least, most) in own.items()}
        # The number of steps only decides when rounding began, which no longer matters.
        classifier = before.quantized(trained_grid(quantization_of(config.quantization, num_steps=1), ranges))
    save_classifier(classifier, trained.folder)
    facts: dict[str, Any] = {"num_parameters": sum(one.numel() for one in model.parameters())}
    if heldout is not None:
        trained.context.progress.note("vision: measuring accuracy on held-out images")
        facts["heldout_images"] = measure_accuracy(classifier, training, heldout)
    if classifier.grid is not None:
        sizes = (weight_bytes(one.model) for one in (before, classifier))
        quantization: dict[str, float] = dict(zip(("float_bytes", "integer_bytes"), sizes, strict=True))
        facts["quantization"] = quantization
        if heldout is not None:
            quantization["float_accuracy"] = share_right(before, heldout)
    return facts


def _blocks(stage: StageData) -> Sequence[Block]:
    blocks: list[Block] = []
    if facts := stage.facts.get("heldout_images"):
        blocks.append(accuracy_table(facts, method="this classifier", title="Accuracy"))
        if facts["confusion"]:
            classes = facts["classes"]
            cells = [[name, *map(count, counts)] for name, counts in zip(classes, facts["confusion"], strict=True)]
            numeric = tuple(range(1, len(classes) + 1))
            caption = "How many held-out images of the class of a row were taken for the class of a column."
            blocks.append(Table(["class", *classes], cells, "Classes taken for each other", caption, numeric=numeric))
    if quantization := stage.facts.get("quantization"):
        text = (
            f"Convolutions and projections are integers, with batch norms folded into them: "
            f"{size(quantization['integer_bytes'])} instead of {size(quantization['float_bytes'])}."
        )
        if "float_accuracy" in quantization:
            right = percent(quantization["float_accuracy"], 1)
            text += f" Without any rounding the same weights are right on {right}."
        blocks.append(Note(text))
    return [*blocks, *metric_charts(stage, {"Share of images in the right class": {"accuracy": "accuracy"}})]


def _estimate(config: RunConfig, run: RunDir, rates: Rates) -> StageEstimate:
    # The common estimate counts the operations of the run's decoder; here an image is one row.
    estimate, training = _SPEC.estimate(config, run, rates), config.section(VISION)
    assert isinstance(training, ImageTrainConfig)
    flops = 3.0 * forward_flops(training.shape, USUAL_CLASSES) * estimate.tokens / config.section(PACK).seq_len
    rate = rates.flops_per_s[training.precision.planned_as]
    seconds = estimate.overhead_s + flops / rate / rates.num_hosts if rate else estimate.seconds
    return replace(estimate, flops=flops, seconds=seconds)


_SPEC = training_spec(
    name="vision",
    title="Training an image classifier",
    report_title="Image classifier",
    model_title="",  # not a model that later stages continue
    objective=_objective,
    rows=LABELED_ROWS,
    run_needs=ImageClassification.needs | QUANTIZATION_NEEDS,
    needs=lambda config: (PACK.name,),
    config=ImageTrainConfig,
    headline=lambda data, stage: accuracy_facts("Image classification", stage.facts.get("heldout_images")),
    only_if_named=True,
    loss_unit="nats per image",
    blocks=_blocks,
    further=lambda run, config: FurtherModels(
        folders={"vit.init_from": config.vit.init_from} if config.architecture == "vit" and config.vit.init_from else {}
    ),
    start=lambda config, stage: "",
    row_use=RowUse(learns_by_heart=False),
    techniques=lambda inputs: (
        []
        if (kind := inputs.training.quantization) == "none"
        else [lambda run: fake_quantization(quantization_of(kind, run.num_steps), run)]
    ),
    save=_save,
    fresh=lambda config: carrier(),
)
VISION: StageSpec = replace(_SPEC, estimate=_estimate)
