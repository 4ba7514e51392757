"""What a model writes about held-out images, for the facts of the stage caption."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modelwright.data.images.labeled import LABELS, LabeledImages
from modelwright.data.images.store import ImageStore, images_folder
from modelwright.data.rows.loader import PackedRows
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.evaluate.statistics import log10_sign_test, wilson_interval
from modelwright.infer.engine import EngineConfig
from modelwright.infer.generate import generate
from modelwright.infer.sequence import SamplingParams
from modelwright.model.decoder import Decoder
from modelwright.model.vision.config import VisionConfig
from modelwright.pipeline.stages.cached_rows import TrainingData
from modelwright.pipeline.stages.captioned_rows import ImagePrompt, read_image_prompts
from modelwright.pipeline.stages.image_accuracy import logistic_regression
from modelwright.pipeline.stages.thumbnails import thumbnail

MOST_IMAGES = 500
"""Held-out images that are described; longer lists take minutes."""
NUM_SHOWN = 12
ENOUGH_NAMED = 0.95
"""Share of the held-out references that must name the right class for the accuracy of captions to mean anything."""
_WORDS = re.compile(r"\w+")


@dataclass(frozen=True)
class ClassWords:
    """The class that a text names, by words that training captions of no other class have."""

    classes: Mapping[str, int]
    """The class of each such word."""

    def named(self, text: str) -> int:
        """The number of the class that the words of a text name; -1 for none and for several."""
        found = {self.classes[word] for word in _words(text) if word in self.classes}
        return found.pop() if len(found) == 1 else -1


def class_words(captions: Sequence[str], labels: Sequence[int]) -> ClassWords:
    """The words that occur in captions of one class only, and in at least two of them."""
    seen: dict[str, list[int]] = {}
    for caption, label in zip(captions, labels, strict=True):
        for word in _words(caption):
            seen.setdefault(word, []).append(label)
    return ClassWords({word: found[0] for word, found in seen.items() if len(found) > 1 and len(set(found)) == 1})


def _words(text: str) -> set[str]:
    return set(_WORDS.findall(text.casefold()))


def measure_captions(
    model: Decoder, training: TrainingData, rows: Path, tokenizer: Tokenizer, shape: VisionConfig, *, max_tokens: int
) -> dict[str, Any]:
    """The share of exact captions, examples, and where images have classes that captions name, `classes`. training:
    what the model learned from; rows: the folder of the set of rows.
    """
    store = ImageStore(images_folder(rows, "heldout"))
    prompts = list(read_image_prompts(PackedRows(rows / "heldout")))[:MOST_IMAGES]
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
    classes = _named_classes(training, store, tokenizer, prompts, written, references)
    return facts | ({"classes": classes} if classes else {})


def _named_classes(
    data: TrainingData, store: ImageStore, tokenizer: Tokenizer, prompts: Sequence[ImagePrompt],
    written: Sequence[str], references: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """How often captions name the right class; {} where images have no classes, or captions do not name them. store:
    has the held-out images.
    """
    if data.images is None or not (data.images.folder / LABELS).is_file():
        return {}
    training, heldout = LabeledImages(data.images), LabeledImages(store)
    known = list(read_image_prompts(data.rows))
    captions = [tokenizer.decode(one.answer_ids).strip() for one in known]
    words = class_words(captions, [int(training.labels[one.image]) for one in known])
    labels = np.array([heldout.labels[one.image] for one in prompts])
    is_named = np.array([words.named(text) for text in references]) == labels
    if is_named.mean() < ENOUGH_NAMED:
        return {}
    named = np.array([words.named(text) for text in written])
    by_pixels = logistic_regression(training, heldout)[[one.image for one in prompts]]
    is_right, others = named == labels, by_pixels == labels
    better, worse = int((is_right & ~others).sum()), int((others & ~is_right).sum())
    most_frequent = int(np.bincount(training.labels).argmax())
    return {
        "num_images": len(labels),
        "num_training_images": len(training),
        "accuracy": float(is_right.mean()),
        "interval": list(wilson_interval(int(is_right.sum()), len(labels))),
        "nothing_named": float((named < 0).mean()),
        "logistic_regression": float(others.mean()),
        "most_frequent_class": float((labels == most_frequent).mean()),
        "num_better": better,
        "num_worse": worse,
        "p_value": min(1.0, 10 ** log10_sign_test(better, worse)),
    }
