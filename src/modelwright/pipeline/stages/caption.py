"""caption: the decoder learns to answer questions about images, which it reads by a vision tower and a projector.

Rows are conversations and captions, with a loss mask as in fine-tuning; an image is as many image tokens as its tower
has patches, at the beginning of the first question; the value of a sequence is the number of its image plus 1 in the
store `images-<split>` next to the rows, which has the classes, too, where all images have a label. Artifact: a folder
of `LlavaForConditionalGeneration` with its tokenizer (`model/vision/llava.py`). Facts: `captions`, descriptions that
the model writes of held-out images, and how good they are.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from modelwright.core.config import ConfigError, DataError, dump
from modelwright.data.clean.folder import read_kept
from modelwright.data.document import SPLITS, Message, Split
from modelwright.data.images import store as stores
from modelwright.data.images.decode import KEY, StoredImage
from modelwright.data.images.read import LABEL_FIELD
from modelwright.data.rows.batch import IGNORED
from modelwright.data.rows.examples import template_variables
from modelwright.data.rows.loader import PackedRows
from modelwright.data.rows.pack import TokenSequence
from modelwright.data.tokenizer.chat import IMAGE_MARK
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.infer.engine import EngineConfig
from modelwright.infer.generate import generate
from modelwright.infer.sequence import SamplingParams
from modelwright.model.decoder import Decoder
from modelwright.model.vision.config import VisionConfig
from modelwright.model.vision.folders import vision_config
from modelwright.model.vision.llava import image_prefix, save_llava
from modelwright.objectives.captioning import CaptionConfig, Captioning
from modelwright.objectives.contrastive import VISION_FOLDER
from modelwright.pipeline.report.blocks import Block, Samples, TextSample, count, percent
from modelwright.pipeline.report.run_data import StageData
from modelwright.pipeline.stage import RowSet, RunConfig, StageInputs
from modelwright.pipeline.stages import rows as row_sets
from modelwright.pipeline.stages.align import ALIGN, MOST_IMAGES, ROWS_READ_AT_ONCE, thumbnail
from modelwright.pipeline.stages.init import save_model_folder
from modelwright.pipeline.stages.pack import PACK, needed_start, tokenizer_stage
from modelwright.pipeline.stages.training import FurtherModels, TrainedModel, training_spec
from modelwright.pipeline.stages.vision import accuracy_facts, accuracy_table, beside_rules, logistic_regression

NAME = "caption"
"""Stage whose settings decide the rows."""


def tower_folder(run: RunConfig) -> str:
    """Returns the folder of the tower that caption starts from; "" for a tower of the run's own."""
    folder: str = run.section(NAME).vision_tower.init_from
    # A run with align continues with what align made of that folder.
    return "" if run.has(ALIGN) and folder == run.section(ALIGN).vision_tower.init_from else folder


def tower_shape(run: RunConfig) -> VisionConfig:
    """Returns the shape of the vision tower: that of a folder, of the tower that align trains, or as configured. Raises
    `ModelError` for a folder that cannot be read, `ConfigError` for a random tower that is never trained.
    """
    own: VisionConfig = run.section(NAME if tower_folder(run) or not run.has(ALIGN) else ALIGN).vision_tower
    if own.init_from:
        return vision_config(Path(own.init_from))
    if not run.has(ALIGN) and not run.section(NAME).train_tower:
        raise ConfigError(
            "caption.train_tower: is false, and the vision tower has random weights; set it to true, give a CLIP or "
            "SigLIP folder (vision_tower.init_from), or train a tower by the stage align before"
        )
    return own


def image_token_id(tokenizer: Tokenizer, config: CaptionConfig) -> int:
    """Returns the id of the image token. Raises `ConfigError` if the tokenizer has no such token."""
    found = tokenizer.id_of(config.image_token)
    # Not 0 either, which is the token of padding: each padded position would be read as an image.
    if not found:
        raise ConfigError(
            f"caption.image_token: the tokenizer lacks the special token {config.image_token!r}; name one that it has, "
            f"or let a new tokenizer have it: --tokenizer.special_tokens '[\"{config.image_token}\"]'"
        )
    return found


@dataclass
class _Labels:
    """Labels of the images that are written. classes: names in both splits; empty if not all images have one."""

    classes: list[str]
    numbers: list[int] = field(default_factory=list[int])


def _pack(job: row_sets.PackJob, split: Split) -> None:
    config: CaptionConfig = job.config.section(NAME)
    image_token_id(job.tokenizer, config)
    if job.settings.chat_loss == "all":
        raise ConfigError(
            "pack.chat_loss: all would make image tokens targets, which no model can predict; choose assistant or "
            "last_answer, or leave out the stage caption"
        )
    fit = row_sets.new_fit(job)
    # All images need a label, and most labels several images: else these are not classes that could be learned.
    fields = [
        document.meta.get(LABEL_FIELD)
        for each in SPLITS
        for document in read_kept(job.clean, split=each, kinds=("image",))
    ]
    names = sorted({str(label) for label in fields if label})
    labels = _Labels(names if all(fields) and 1 < len(names) <= len(fields) / 2 else [])
    folder = stores.images_folder(job.context.output.path / CAPTION_ROWS.name, split)
    with stores.write_images(folder) as images:

        def sequences() -> row_sets.Sequences:
            image_text = config.image_token * tower_shape(job.config).num_patches
            for document in read_kept(job.clean, split=split, kinds=("image",)):
                # A caption answers the question of the settings. Marks in the text would be rendered as further images.
                captioned: list[Message] = [
                    {"role": "user", "content": config.question}, {"role": "assistant", "content": document.text}
                ]  # fmt: skip
                turns = document.messages if document.has_turns else captioned
                turns = [{**turn, "content": turn["content"].replace(IMAGE_MARK, "")} for turn in turns]
                asked = next(number for number, turn in enumerate(turns) if turn["role"] == "user")
                turns[asked] = {**turns[asked], "content": f"{IMAGE_MARK}\n{turns[asked]['content']}"}
                fit.num_empty_answers += row_sets.num_empty_answers(turns)
                try:
                    chats = job.tokenizer.chat.encode_training_chats(
                        turns,
                        tools=document.tools,
                        loss=job.settings.chat_loss,
                        image_text=image_text,
                        variables=template_variables(document),
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

        report = job.pack(f"{CAPTION_ROWS.name}/{split}", sequences())
    if labels.classes:
        stores.write_labels(folder, labels.numbers, labels.classes)
    if report and fit.num_dropped:
        report["skipped"] = {**report["skipped"], "no room for an answer": fit.num_dropped}
    if split == "train":
        row_sets.tell_empty_answers(job, fit)
        if fit.num_overlong:
            text = (
                f"pack: {fit.num_overlong:,} of {fit.num_conversations:,} conversations about images are longer than a "
                f"row (pack.seq_len {fit.seq_len}); {row_sets.suggest_row_len(job.config, fit)}"
            )
            if fit.num_dropped == fit.num_conversations:
                raise DataError(f"{text}; no answer fits into a row with its image")
            job.context.progress.note(text)


@dataclass(frozen=True)
class ImagePrompt:
    """A packed conversation about an image, up to its first answer, and that answer. image: its number."""

    image: int
    prompt_ids: list[int]
    answer_ids: list[int]


def read_image_prompts(rows: PackedRows) -> Iterator[ImagePrompt]:
    """Reads the conversations of packed rows by the numbers of their images, each image once."""
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
    decides=lambda run: {
        "question": run.section(NAME).question,
        "image_token": run.section(NAME).image_token,
        **{name: dump(tower_shape(run))[name] for name in ("image_size", "patch_size")},
        "images": stores.FORMAT,
    },
)


MOST_DESCRIBED = 500
"""Number of held-out images that are described; longer lists take minutes."""
NUM_SHOWN = 12
ENOUGH_NAMED = 0.95
"""Share of the held-out references that must name the right class; below it the accuracy of captions means nothing."""
_WORDS = re.compile(r"\w+")


@dataclass(frozen=True)
class ClassWords:
    """Finds the class that a text names, by words that occur in training captions of one class only."""

    classes: Mapping[str, int]
    """Class of each such word."""

    def named(self, text: str) -> int:
        """Returns the number of the class that the words of a text name; -1 for none and for several."""
        found = {self.classes[word] for word in _words(text) if word in self.classes}
        return found.pop() if len(found) == 1 else -1


def class_words(captions: Sequence[str], labels: Sequence[int]) -> ClassWords:
    """Collects the words that occur in captions of one class only, and in at least two of them."""
    seen: dict[str, list[int]] = {}
    for caption, label in zip(captions, labels, strict=True):
        for word in _words(caption):
            seen.setdefault(word, []).append(label)
    return ClassWords({word: found[0] for word, found in seen.items() if len(found) > 1 and len(set(found)) == 1})


def _words(text: str) -> set[str]:
    return set(_WORDS.findall(text.casefold()))


def measure_captions(
    model: Decoder,
    training: row_sets.TrainingData,
    rows: Path,
    tokenizer: Tokenizer,
    shape: VisionConfig,
    *,
    max_tokens: int,
) -> dict[str, Any]:
    """Returns the share of exact captions, examples, and, for images with classes that captions name, `classes`.
    training: training data of the model; rows: folder of the set of rows.
    """
    store = stores.ImageStore(stores.images_folder(rows, "heldout"))
    prompts = list(read_image_prompts(PackedRows(rows / "heldout")))[:MOST_DESCRIBED]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_ids=tokenizer.stop_ids)
    numbers = [one.image for one in prompts]
    images = [[square] for square in store.squares(numbers, size=shape.image_size, fit=shape.fit)]
    engine = EngineConfig(kv_cache_tokens=max(EngineConfig().kv_cache_tokens, model.config.max_seq_len))
    found = generate(model, [one.prompt_ids for one in prompts], [params] * len(prompts), engine, images=images)
    written = [tokenizer.decode(one.token_ids).strip() for one in found]
    references = [tokenizer.decode(one.answer_ids).strip() for one in prompts]
    shown: list[int] = np.unique(np.linspace(0, len(prompts) - 1, NUM_SHOWN).astype(int)).tolist()
    facts: dict[str, Any] = {
        "num_images": len(prompts),
        "exact": float(np.mean([ours == theirs for ours, theirs in zip(written, references, strict=True)])),
        "examples": [
            {"image": thumbnail(store.data(prompts[one].image)), "written": written[one], "reference": references[one]}
            for one in shown
        ],
    }
    # The share of captions that name the right class, if images have classes and captions name them.
    if training.images is None or not (training.images.folder / stores.LABELS).is_file():
        return facts
    labeled, heldout = stores.LabeledImages(training.images), stores.LabeledImages(store)
    known = list(read_image_prompts(training.rows))
    captions = [tokenizer.decode(one.answer_ids).strip() for one in known]
    words = class_words(captions, [int(labeled.labels[one.image]) for one in known])
    labels = np.array([heldout.labels[one.image] for one in prompts])
    is_named = np.array([words.named(text) for text in references]) == labels
    # If references do not name their class, the accuracy of captions measures their wording.
    if is_named.mean() < ENOUGH_NAMED:
        return facts
    named = np.array([words.named(text) for text in written])
    by_pixels = logistic_regression(labeled, heldout)[[one.image for one in prompts]]
    classes = {**beside_rules(named, by_pixels, labels, labeled), "nothing_named": float((named < 0).mean())}
    return facts | {"classes": classes}


def _objective(inputs: StageInputs) -> Captioning:
    config: CaptionConfig = inputs.training
    rows = inputs.parents[PACK.name] / CAPTION_ROWS.name
    tower = Path(folder) if (folder := tower_folder(inputs.config)) else None
    if tower is None and ALIGN.name in inputs.parents:
        tower = inputs.parents[ALIGN.name] / VISION_FOLDER
    tokenizer = Tokenizer.load(inputs.parents[tokenizer_stage(inputs.config)])
    return Captioning(
        source=inputs.plan,
        config=config,
        shape=tower_shape(inputs.config),
        tower=tower,
        image_token=image_token_id(tokenizer, config),
        images=inputs.images,
        heldout_images=stores.open_images(rows, "heldout"),
    )


def _save(trained: TrainedModel) -> Mapping[str, Any]:
    config: CaptionConfig = trained.config.section(NAME)
    tokenizer, model = trained.tokenizer, trained.model
    save_model_folder(model, tokenizer, trained.folder, save=partial(save_llava, image_token=config.image_token))
    if not trained.heldout.is_dir():
        return {}
    prefix = image_prefix(model)
    assert prefix is not None
    assert trained.data is not None
    trained.context.progress.note("caption: describing held-out images")
    return {
        "captions": measure_captions(
            model.eval(),
            trained.data,
            trained.heldout.parent,
            tokenizer,
            prefix.tower.config,
            max_tokens=config.max_answer_tokens,
        )
    }


def _blocks(stage: StageData) -> Sequence[Block]:
    captions = stage.facts.get("captions")
    if not captions:
        return []
    items = [
        TextSample(one["written"], one["reference"], "above what the model wrote, below the reference", one["image"])
        for one in captions["examples"]
    ]
    title = f"Held-out images; {percent(captions['exact'], 1)} of {count(captions['num_images'])} captions are exact"
    blocks: list[Block] = [Samples(items, title)]
    if classes := captions.get("classes"):
        remark = (
            "A caption names a class by words that training captions of no other class have; "
            f"{percent(classes['nothing_named'], 1)} of the captions name none or several, and count as wrong."
        )
        table = accuracy_table(
            classes, method="the captions of this model", title="The class that is named", remark=remark
        )
        blocks.insert(0, table)
    return blocks


CAPTION = training_spec(
    name=NAME,
    title="Learning to describe images",
    report_title="Captions of images",
    model_title="",  # not a language model that later stages continue
    objective=_objective,
    rows=CAPTION_ROWS,
    run_needs=Captioning.needs,
    needs=lambda run: (PACK.name, *needed_start(run, NAME), *([ALIGN.name] if run.has(ALIGN) else [])),
    config=CaptionConfig,
    headline=lambda data, stage: accuracy_facts(
        "Captions that name the right class", stage.facts.get("captions", {}).get("classes")
    ),
    only_if_named=True,
    reads_images=True,
    blocks=_blocks,
    further=lambda run, config: FurtherModels(
        folders={"vision_tower.init_from": folder} if (folder := tower_folder(run)) else {}
    ),
    row_use=row_sets.RowUse(learns_by_heart=False),
    save=_save,
)
