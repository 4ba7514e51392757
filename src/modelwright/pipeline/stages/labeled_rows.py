"""The rows that the stage vision learns from: images with classes.

A row is one image: two end tokens whose value is its number plus 1 in the store `images-<split>` beside the rows, which
has the classes, too. The class of an image is its field `label`, or without one its caption.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from modelwright.core.errors import ConfigError, DataError
from modelwright.data.clean.folder import read_kept
from modelwright.data.document import Document, Split
from modelwright.data.images.labeled import LabeledImages, class_of, write_labels
from modelwright.data.images.store import FORMAT, StoreWriter, images_folder, open_images, write_images
from modelwright.data.images.stored import KEY, StoredImage
from modelwright.data.rows.pack import TokenSequence
from modelwright.pipeline.stage import RowSet
from modelwright.pipeline.stages.aligned_rows import MOST_IMAGES
from modelwright.pipeline.stages.rows import PackJob, Sequences

UNKNOWN = "class without a training image"
"""Why a held-out image is left out."""


def open_labeled(rows: Path, split: str) -> LabeledImages | None:
    """The images of a split with their classes, None if it has none. rows: the folder of this set of rows."""
    store = open_images(rows, split)
    return LabeledImages(store) if store is not None else None


def _pack_labeled(job: PackJob, split: Split) -> None:
    if job.settings.mode == "length_buckets":
        raise ConfigError("pack.mode: images have no length to make buckets of; choose best_fit or one_per_row")
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
    """The names of the classes, sorted. Raises `DataError` where the images have no classes to learn."""
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
    """Rows; fills the labels of the images that were written, and the classes that training does not have."""
    places = {name: place for place, name in enumerate(classes)}
    for document in _images(job.clean, split):
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


def _images(clean: Path, split: Split) -> Iterator[Document]:
    return read_kept(clean, split=split, kinds=("image",))


LABELED_ROWS = RowSet(
    name="labeled_images",
    title="images with classes",
    pack=_pack_labeled,
    documents="image with a class",
    learned="images",
    decides=lambda config: {"images": FORMAT},
)
