"""vision: a classifier of images, a ResNet or a vision transformer, by the training loop of all stages.

A row is one image: two end tokens whose value is its number plus 1 in the store `images-<split>` next to the rows,
which has the classes, too. The class of an image is its field `label`, or without one its caption. Artifact: the
classifier (`objectives/image_classification.py`), with integer weights if it was trained for them. Facts:
`heldout_images`, its accuracy on held-out images next to logistic regression on pixels; `quantization`, what integers
save and cost.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelwright.compress.int8 import weight_bytes
from modelwright.core.artifacts import RunDir
from modelwright.core.config import ConfigError, DataError, derive_seed
from modelwright.data.clean.folder import read_kept
from modelwright.data.document import Split
from modelwright.data.images import store as stores
from modelwright.data.images.decode import KEY, StoredImage
from modelwright.data.rows.pack import TokenSequence
from modelwright.evaluate.scoring import log10_sign_test, wilson_interval
from modelwright.model.vision.classifier import ImageClassifier, forward_flops
from modelwright.objectives import image_classification as classification
from modelwright.pipeline.estimate.cost import StageEstimate
from modelwright.pipeline.report.blocks import Block, Fact, Note, Table, count, number, percent, size
from modelwright.pipeline.report.run_data import StageData
from modelwright.pipeline.stage import Rates, RowSet, RunConfig, StageInputs, StageSpec
from modelwright.pipeline.stages.align import MOST_IMAGES
from modelwright.pipeline.stages.pack import PACK
from modelwright.pipeline.stages.rows import PackJob, RowUse, Sequences
from modelwright.pipeline.stages.training import FurtherModels, TrainedModel, metric_charts, training_spec
from modelwright.train.techniques.fake_quantization import NEEDS as QUANTIZATION_NEEDS
from modelwright.train.techniques.fake_quantization import RANGES, fake_quantization

UNKNOWN = "class without a training image"
"""Reason for which a held-out image is left out."""


def open_labeled(rows: Path, split: str) -> stores.LabeledImages | None:
    """Opens the images of a split with their classes; None for a split without images. rows: folder of the rows."""
    store = stores.open_images(rows, split)
    return stores.LabeledImages(store) if store is not None else None


def _pack_labeled(job: PackJob, split: Split) -> None:
    if job.settings.mode == "length_buckets":
        raise ConfigError("pack.mode: length_buckets does not apply to images; choose best_fit or one_per_row")
    classes = training_classes(job.clean)
    folder = stores.images_folder(job.context.output.path / LABELED_ROWS.name, split)
    labels: list[int] = []
    unknown: list[str] = []
    with stores.write_images(folder) as images:

        def sequences() -> Sequences:
            places = {name: place for place, name in enumerate(classes)}
            for document in read_kept(job.clean, split=split, kinds=("image",)):
                name = stores.class_of(document)
                if name not in places:
                    unknown.append(name)
                    continue
                number = images.add(StoredImage.from_plain(document.meta[KEY]).data)
                if number > MOST_IMAGES:
                    raise DataError(f"pack: there are more than {MOST_IMAGES:,} images; pack them in several runs")
                labels.append(places[name])
                source, score = job.labels(document)
                yield TokenSequence(
                    np.full(2, job.tokenizer.eos_id), source=source, score=score, value=float(number + 1)
                )

        # Rows of one image each: `batch_tokens` then fixes the number of images of an update.
        rows = replace(job, settings=replace(job.settings, mode="one_per_row"))
        report = rows.pack(f"{LABELED_ROWS.name}/{split}", sequences())
    stores.write_labels(folder, labels, classes)
    if unknown and report:
        report["skipped"] = {**report["skipped"], UNKNOWN: len(unknown)}
    if unknown:
        job.context.progress.note(
            f"pack: {len(unknown):,} held-out images are left out because no training image has their class, such as "
            f"{unknown[0]!r}"
        )


def training_classes(clean: Path) -> list[str]:
    """Returns the names of the classes, sorted. Raises `DataError` if the images are not divided into classes."""
    names = [stores.class_of(document) for document in read_kept(clean, split="train", kinds=("image",))]
    classes = sorted(set(names))
    remedy = "give every record a field label, or every image a caption that is the name of its class"
    if names and len(classes) < 2:
        raise DataError(f"vision: all {len(names):,} training images have the class {classes[0]!r}; {remedy}")
    if len(classes) > len(names) / 2:
        raise DataError(f"vision: {len(names):,} training images have {len(classes):,} different classes; {remedy}")
    return classes


LABELED_ROWS = RowSet(
    name="labeled_images",
    title="images with classes",
    pack=_pack_labeled,
    documents="image with a class",
    learned="images",
    decides=lambda config: {"images": stores.FORMAT},
)


MOST_TRAINING_IMAGES = 10_000
"""Images from which logistic regression learns; with more it takes minutes."""
BASELINE_SIDE = 16
"""Pixels per side of its images."""
MOST_CLASSES_SHOWN = 20
MOST_ITERATIONS = 1000


def beside_rules(
    predicted: NDArray[np.int64],
    by_pixels: NDArray[np.int64],
    labels: NDArray[np.int64],
    training: stores.LabeledImages,
) -> dict[str, Any]:
    """Returns the accuracy with a 95% interval (Wilson), that of the rules, and the p-value of a paired sign test
    against logistic regression. by_pixels: predictions of `logistic_regression` for the same images.
    """
    most_frequent = int(np.bincount(training.labels).argmax())
    is_right, others = predicted == labels, by_pixels == labels
    better, worse = int((is_right & ~others).sum()), int((others & ~is_right).sum())
    return {
        "num_images": len(labels),
        "num_training_images": len(training),
        "accuracy": float(is_right.mean()),
        "interval": list(wilson_interval(int(is_right.sum()), len(labels))),
        "logistic_regression": float(others.mean()),
        "most_frequent_class": float((labels == most_frequent).mean()),
        "num_better": better,
        "num_worse": worse,
        "p_value": min(1.0, 10 ** log10_sign_test(better, worse)),
    }


def share_right(classifier: classification.TrainedClassifier, heldout: stores.LabeledImages) -> float:
    """Returns the held-out accuracy, without baselines or intervals."""
    return float((_predicted(classifier, heldout) == heldout.labels).mean())


def _predicted(classifier: classification.TrainedClassifier, images: stores.LabeledImages) -> NDArray[np.int64]:
    size = classifier.model.shape.image_size
    squares = list(images.store.squares(range(len(images)), size=size, fit=classifier.fit))
    return classifier.probabilities(squares).argmax(axis=1)


def accuracy_facts(title: str, facts: Mapping[str, Any] | None) -> Sequence[Fact]:
    """Returns an accuracy with that of the rules, for the top of the report; nothing without facts."""
    if not facts:
        return []
    hint = (
        f"of {count(facts['num_images'])} held-out images; logistic regression on pixels "
        f"{percent(facts['logistic_regression'], 1)}, the most frequent class "
        f"{percent(facts['most_frequent_class'], 1)}"
    )
    return [Fact(title, percent(facts["accuracy"], 1), hint)]


def accuracy_table(facts: Mapping[str, Any], *, method: str, title: str, remark: str = "") -> Table:
    """Returns a table of an accuracy and that of the rules. method: name of the first line; remark: further sentences
    of the caption.
    """
    low, high = facts["interval"]
    rows = [
        [method, percent(facts["accuracy"], 1)],
        ["logistic regression on pixels", percent(facts["logistic_regression"], 1)],
        ["the most frequent class", percent(facts["most_frequent_class"], 1)],
    ]
    sentences = (
        f"{count(facts['num_images'])} held-out images, none of which was trained on.",
        remark,
        f"95% interval of {method} {percent(low, 1)} to {percent(high, 1)} (Wilson).",
        f"On {count(facts['num_better'])} images logistic regression alone is wrong, on {count(facts['num_worse'])} it "
        f"alone is right: p = {number(facts['p_value'], 2)} in a sign test. It is scikit-learn's, and learned from the "
        f"labels of {count(min(facts['num_training_images'], MOST_TRAINING_IMAGES))} of "
        f"{count(facts['num_training_images'])} training images.",
    )
    caption = " ".join(sentence for sentence in sentences if sentence)
    return Table(["method", "accuracy"], rows, title, caption, numeric=(1,), strong=(0,))


def confusion(labels: NDArray[np.int64], predicted: NDArray[np.int64], num_classes: int) -> Sequence[Sequence[int]]:
    """Counts the images of each class (row) that were taken for each class (column); [] with many classes."""
    # A larger table is unreadable on the page.
    if num_classes > MOST_CLASSES_SHOWN:
        return []
    counts = np.zeros((num_classes, num_classes), dtype=np.int64)
    np.add.at(counts, (labels, predicted), 1)
    return counts.tolist()


def logistic_regression(training: stores.LabeledImages, heldout: stores.LabeledImages) -> NDArray[np.int64]:
    """Predicts the classes of held-out images by scikit-learn's multinomial logistic regression on standardized pixels,
    learned from at most `MOST_TRAINING_IMAGES` training images. These are drawn at random, because images may be sorted
    by class.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    # Sorted again after drawing, so that the store is read in its order.
    drawn = np.sort(np.random.default_rng(0).permutation(len(training))[:MOST_TRAINING_IMAGES])
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=MOST_ITERATIONS))
    model.fit(_pixels(training, drawn), training.labels[drawn])
    return np.asarray(model.predict(_pixels(heldout, np.arange(len(heldout)))), dtype=np.int64)


def _pixels(images: stores.LabeledImages, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
    """Colors in [0, 1], one row for each image."""
    squares = images.store.squares(numbers.tolist(), size=BASELINE_SIDE, fit="crop")
    return np.stack(list(squares)).reshape(len(numbers), -1) / 255.0


PREFIX = f"heads.{classification.CLASSIFIER}."
"""Prefix of the names of a classifier's layers in the model that is trained."""
USUAL_CLASSES = 10
"""Number of classes that an estimate assumes before the images are read."""


def _objective(inputs: StageInputs) -> classification.ImageClassification:
    assert inputs.images is not None
    rows = inputs.parents[PACK.name] / LABELED_ROWS.name
    return classification.ImageClassification(
        source=inputs.plan,
        config=inputs.training,
        images=stores.LabeledImages(inputs.images),
        heldout_images=open_labeled(rows, "heldout"),
        seed=derive_seed(inputs.config.seed, VISION.name, "augment"),
    )


def _save(trained: TrainedModel) -> Mapping[str, Any]:
    assert trained.data is not None
    assert trained.data.images is not None
    training, heldout = stores.LabeledImages(trained.data.images), open_labeled(trained.heldout.parent, "heldout")
    model = trained.model.heads[classification.CLASSIFIER]
    assert isinstance(model, ImageClassifier)
    before = classification.TrainedClassifier(model.eval(), training.classes)
    classifier, config = before, trained.config.section(VISION)
    assert isinstance(config, classification.ImageTrainConfig)
    if config.quantization != "none":
        stored = json.loads((trained.context.folder.path / RANGES).read_text(encoding="utf-8"))
        own = {name.removeprefix(PREFIX): ends for name, ends in stored.items() if name.startswith(PREFIX)}
        ranges = {name: (float(least), float(most)) for name, (least, most) in own.items()}
        # The number of steps only decides when rounding began, which no longer matters.
        classifier = before.quantized(
            classification.trained_grid(classification.quantization_of(config.quantization, num_steps=1), ranges)
        )
    classification.save_classifier(classifier, trained.folder)
    facts: dict[str, Any] = {"num_parameters": sum(one.numel() for one in model.parameters())}
    if heldout is not None:
        trained.context.progress.note("vision: measuring accuracy on held-out images")
        labels, predicted = heldout.labels.astype(np.int64), _predicted(classifier, heldout)
        started = time.perf_counter()
        by_pixels = logistic_regression(training, heldout)
        facts["heldout_images"] = {
            **beside_rules(predicted, by_pixels, labels, training),
            "logistic_regression_s": time.perf_counter() - started,
            "classes": list(heldout.classes),
            "confusion": confusion(labels, predicted, len(heldout.classes)),
        }
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
    assert isinstance(training, classification.ImageTrainConfig)
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
    run_needs=classification.ImageClassification.needs | QUANTIZATION_NEEDS,
    needs=lambda config: (PACK.name,),
    extras=lambda config: {"vision": "images"},
    config=classification.ImageTrainConfig,
    headline=lambda data, stage: accuracy_facts("Image classification", stage.facts.get("heldout_images")),
    only_if_named=True,
    loss_unit="nats per image",
    blocks=_blocks,
    further=lambda run, config: FurtherModels(
        folders={"vision_tower.init_from": config.vision_tower.init_from}
        if config.architecture == "vit" and config.vision_tower.init_from
        else {}
    ),
    start=lambda config, stage: "",
    row_use=RowUse(learns_by_heart=False),
    techniques=lambda inputs: (
        []
        if (kind := inputs.training.quantization) == "none"
        else [lambda run: fake_quantization(classification.quantization_of(kind, run.num_steps), run)]
    ),
    save=_save,
    fresh=lambda config: classification.carrier(),
)
VISION: StageSpec = replace(_SPEC, estimate=_estimate)
