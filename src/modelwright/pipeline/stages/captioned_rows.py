"""The rows that the stage caption learns from: conversations about images, and captions as answers to one question.

A row is tokens with a loss mask, as in fine-tuning. An image is as many image tokens as its tower has patches, at the
beginning of the first question; the value of a sequence is the number of its image plus 1 in the store `images-<split>`
beside the rows. Where all images have a label, the store has their classes, too.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from modelwright.core.config import dump
from modelwright.core.errors import ConfigError, DataError
from modelwright.data.clean.folder import read_kept
from modelwright.data.document import SPLITS, Document, Message, Split
from modelwright.data.images.labeled import write_labels
from modelwright.data.images.read import LABEL_FIELD
from modelwright.data.images.store import FORMAT, StoreWriter, images_folder, write_images
from modelwright.data.images.stored import KEY, StoredImage
from modelwright.data.rows.batch import IGNORED
from modelwright.data.rows.fit import ConversationFit
from modelwright.data.rows.loader import PackedRows
from modelwright.data.rows.pack import TokenSequence
from modelwright.data.tokenizer.chat import IMAGE_MARK
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.model.vision.config import VisionConfig
from modelwright.model.vision.folders import vision_config
from modelwright.objectives.captioning import CaptionConfig
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.stage import RowSet
from modelwright.pipeline.stages.align import ALIGN
from modelwright.pipeline.stages.aligned_rows import MOST_IMAGES, ROWS_READ_AT_ONCE
from modelwright.pipeline.stages.rows import PackJob, Sequences, num_empty_answers, suggest_row_len, tell_empty_answers

CAPTION = "caption"
"""The stage whose settings decide the rows."""


def tower_shape(run: RunConfig) -> VisionConfig:
    """The shape of the vision tower: of a folder, of the one that align trains, or as configured. Raises `ModelError`
    for a folder that cannot be read, `ConfigError` for a tower that would never learn anything.
    """
    own: VisionConfig = run.section(CAPTION).vision
    if run.has(ALIGN) and not own.init_from:
        own = run.section(ALIGN).vision
    if own.init_from:
        return vision_config(Path(own.init_from))
    if not run.has(ALIGN) and not run.section(CAPTION).train_tower:
        raise ConfigError(
            "caption.train_tower: is false, and the vision tower has random weights; set it to true, give a CLIP or "
            "SigLIP folder (caption.vision.init_from), or train a tower by the stage align before"
        )
    return own


def image_token_id(tokenizer: Tokenizer, config: CaptionConfig) -> int:
    """The id of the image token. Raises `ConfigError` if the tokenizer has none."""
    found = tokenizer.id_of(config.image_token)
    if not found:  # rows of padding hold token 0
        raise ConfigError(
            f"caption.image_token: the tokenizer has no special token {config.image_token!r}; name one of its own, or "
            f"let a new tokenizer have it: --tokenizer.special_tokens '[\"{config.image_token}\"]'"
        )
    return found


def turns_about(document: Document, question: str) -> list[Message]:
    """The conversation of a document with the mark of its image at the beginning of the first question."""
    turns = document.messages if document.has_turns else _captioned(document.text, question)
    turns = [{**turn, "content": turn["content"].replace(IMAGE_MARK, "")} for turn in turns]
    first = next(number for number, turn in enumerate(turns) if turn["role"] == "user")
    marked = {**turns[first], "content": f"{IMAGE_MARK}\n{turns[first]['content']}"}
    return [*turns[:first], marked, *turns[first + 1 :]]


def _captioned(caption: str, question: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": caption}]


@dataclass
class _Labels:
    """The labels of the images that are written. classes: of both splits; empty if not all images have one."""

    classes: list[str]
    numbers: list[int] = field(default_factory=list[int])


def _pack(job: PackJob, split: Split) -> None:
    config: CaptionConfig = job.config.section(CAPTION)
    image_token_id(job.tokenizer, config)
    if job.settings.chat_loss == "all":
        raise ConfigError(
            "pack.chat_loss: all would make image tokens targets, which no model can predict; choose assistant or "
            "last_answer, or leave out the stage caption"
        )
    overlong = "skip" if job.settings.long_documents == "skip" else "split"
    fit = ConversationFit(seq_len=job.settings.seq_len, overlong=overlong)
    labels = _Labels(_classes(job.clean))
    folder = images_folder(job.context.output.path / CAPTION_ROWS.name, split)
    with write_images(folder) as images:
        report = job.pack(f"{CAPTION_ROWS.name}/{split}", _sequences(job, config, split, images, labels, fit))
    if labels.classes:
        write_labels(folder, labels.numbers, labels.classes)
    if report and fit.num_dropped:
        report["skipped"] = {**report["skipped"], "no room for an answer": fit.num_dropped}
    if split == "train":
        tell_empty_answers(job, fit)
        if fit.num_overlong:
            _tell_overlong(job, fit)


def _sequences(
    job: PackJob, config: CaptionConfig, split: Split, images: StoreWriter, labels: _Labels, fit: ConversationFit
) -> Sequences:
    image_text = config.image_token * tower_shape(job.config).num_patches
    for document in read_kept(job.clean, split=split, kinds=("image",)):
        turns = turns_about(document, config.question)
        fit.num_empty_answers += num_empty_answers(turns)
        try:
            chats = job.tokenizer.encode_training_chats(
                turns,
                tools=document.tools,
                loss=job.settings.chat_loss,
                image_text=image_text,
            )
        except DataError as error:
            raise DataError(f"{document.id}: {error}") from None
        fitted = [one for ids, mask in chats if (one := fit.fit(ids, mask, stop_ids=job.tokenizer.stop_ids))]
        if not fitted:
            continue
        number = images.add(StoredImage.from_plain(document.meta[KEY]).data)
        if number > MOST_IMAGES:
            raise DataError(f"pack: there are more than {MOST_IMAGES:,} images; pack them in several runs")
        if labels.classes:
            labels.numbers.append(labels.classes.index(str(document.meta[LABEL_FIELD])))
        source, score = job.labels(document)
        for ids, mask in fitted:
            yield TokenSequence(ids, mask, source=source, score=score, value=float(number + 1))


def _classes(clean: Path) -> list[str]:
    """The labels of all images, sorted; [] where some have none, or nearly each its own."""
    labels = [
        document.meta.get(LABEL_FIELD)
        for split in SPLITS
        for document in read_kept(clean, split=split, kinds=("image",))
    ]
    names = sorted({str(label) for label in labels if label})
    return names if all(labels) and 1 < len(names) <= len(labels) / 2 else []


def _tell_overlong(job: PackJob, fit: ConversationFit) -> None:
    """Report the conversations that are longer than a row. Raises `DataError` if none is left."""
    text = (
        f"pack: {fit.num_overlong:,} of {fit.num_conversations:,} conversations about images are longer than a row "
        f"(pack.seq_len {fit.seq_len}); {suggest_row_len(job.config, fit)}"
    )
    if fit.num_dropped == fit.num_conversations:
        raise DataError(f"{text}; no answer fits beside an image")
    job.context.progress.note(text)


def _decides(run: RunConfig) -> dict[str, Any]:
    """What decides the rows besides the settings of packing."""
    config: CaptionConfig = run.section(CAPTION)
    shape = dump(tower_shape(run))
    patches = {name: shape[name] for name in ("image_size", "patch_size")}
    return {"question": config.question, "image_token": config.image_token, **patches, "images": FORMAT}


@dataclass(frozen=True)
class ImagePrompt:
    """A conversation about an image as it was packed, up to its first answer, and that answer. image: its number."""

    image: int
    prompt_ids: list[int]
    answer_ids: list[int]


def read_image_prompts(rows: PackedRows) -> Iterator[ImagePrompt]:
    """The conversations of packed rows by the numbers of their images, each image once."""
    found: dict[int, ImagePrompt] = {}
    for batch in rows.batches(ROWS_READ_AT_ONCE):
        whole = (batch.input_ids_BT, batch.segments_BT, batch.labels_BT, batch.extras["values_BT"])
        for tokens, segments, labels, values in zip(*(one.numpy() for one in whole), strict=True):
            for piece in range(int(segments.max()) + 1):
                places = np.flatnonzero(segments == piece)
                is_target = labels[places] != IGNORED
                first = int(np.flatnonzero(is_target)[0])
                length = int(np.argmin([*is_target[first:], False]))
                image, ids = round(float(values[places[0]])) - 1, tokens[places].tolist()
                answer = ids[first + 1 : first + 1 + length]
                found.setdefault(image, ImagePrompt(image, ids[: first + 1], answer))
    return iter(found[image] for image in sorted(found))


CAPTION_ROWS = RowSet(
    name="captions",
    title="conversations about images",
    pack=_pack,
    documents="image with a caption or a conversation",
    learned="images",
    decides=_decides,
)
