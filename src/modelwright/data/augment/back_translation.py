"""Back translation: paraphrases by a pivot language (Sennrich et al. 2016, https://arxiv.org/abs/1511.06709)."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from modelwright.core.config import digest
from modelwright.core.errors import ConfigError
from modelwright.data.augment.augmentation import Augmentation, check_fraction, texts_of, with_texts
from modelwright.data.augment.translators import (
    EndpointConfig,
    EndpointTranslator,
    MarianTranslator,
    Translate,
    TranslationCache,
)
from modelwright.data.augment.word_spans import Span, draw, replace_spans, spans_of_sentences
from modelwright.data.document import Document

_LENGTHS = (0.5, 2.0)
"""Length of a paraphrase, relative to the original; beyond these limits the model omitted or repeated something."""
_MIN_WORDS = 3
"""Minimum words of a sentence that is translated."""
_FIXED = re.compile(r"`[^`\n]*`|https?://\S*\w|\S+@\S+\.\w+")
"""Code and addresses, which a paraphrase must repeat."""


@dataclass(frozen=True, kw_only=True)
class BackTranslationConfig:
    """Paraphrases by translation into a pivot language and back: by two models on disk or by an endpoint."""

    forward: Path = Path()
    """Folder of a Marian-type model of Hugging Face that translates into the pivot language."""
    backward: Path = Path()
    """Folder of the model that translates back."""
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    """A language model that translates both ways, instead of the two folders."""
    language: str = "English"
    """Language of the documents, for the endpoint."""
    pivot: str = "German"
    """Pivot language, for the endpoint."""
    fraction: float = 0.5
    """Fraction of the sentences that are translated."""
    cache: Path = Path("~/.cache/modelwright")
    """Folder that keeps translations for later runs."""

    def __post_init__(self) -> None:
        check_fraction("fraction", self.fraction)
        has_models = self.forward != Path() and self.backward != Path()
        if bool(self.endpoint.url) and has_models:
            raise ConfigError("back_translation: set either endpoint.url or forward and backward, not both")


def back_translation(config: BackTranslationConfig) -> Augmentation:
    if config.endpoint.url:
        there = EndpointTranslator(config.endpoint, source=config.language, target=config.pivot)
        back = EndpointTranslator(config.endpoint, source=config.pivot, target=config.language)
        model = [config.endpoint.url, config.endpoint.model, config.endpoint.api]
        # Both directions share one file, so their names must differ.
        names = [digest([*model, config.language, config.pivot, way]) for way in "tb"]
        return translate_and_back(
            TranslationCache(there, name=names[0], folder=config.cache.expanduser()),
            TranslationCache(back, name=names[1], folder=config.cache.expanduser()),
            fraction=config.fraction,
            failures=lambda: there.num_failed + back.num_failed,
        )
    if config.forward == Path() or config.backward == Path():
        raise ConfigError(
            "back_translation: names no translator; set forward and backward to the folders of two models, or "
            "endpoint.url and endpoint.model"
        )
    return translate_and_back(
        _cached_model(config.forward, "back_translation.forward", config.cache.expanduser()),
        _cached_model(config.backward, "back_translation.backward", config.cache.expanduser()),
        fraction=config.fraction,
    )


def _cached_model(folder: Path, setting: str, cache: Path) -> Translate:
    """Returns a model's translator with a cache, which is a new one whenever the files of the model change."""
    translate = MarianTranslator(folder, setting=setting)
    # Size and time identify the files, because hashing a model takes seconds.
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.iterdir())]
    return TranslationCache(translate, name=digest([str(folder.resolve()), files]), folder=cache)


def translate_and_back(
    there: Translate, back: Translate, *, fraction: float, failures: Callable[[], int] = lambda: 0
) -> Augmentation:
    """Returns the method, given its two translators. The sentences of all documents are translated together."""
    counts: Counter[str] = Counter()

    def change(documents: Sequence[Document], rngs: Sequence[Random]) -> list[Document | None]:
        chosen: dict[tuple[int, int], list[Span]] = {}
        for number, (document, rng) in enumerate(zip(documents, rngs, strict=True)):
            for place, text in enumerate(texts_of(document)):
                sentences: list[Span] = []
                for span in spans_of_sentences(text):  # without the white space around them
                    sentence = span.text.strip()
                    start = span.start + len(span.text) - len(span.text.lstrip())
                    if len(sentence.split()) >= _MIN_WORDS:
                        sentences.append(Span(start, start + len(sentence), sentence))
                chosen[number, place] = draw(sentences, fraction, rng)
        originals = list(dict.fromkeys(span.text for spans in chosen.values() for span in spans))
        # One line each, because `completions` ends a translation at a line break.
        pivots = there([" ".join(original.split()) for original in originals])
        translated = [(original, pivot) for original, pivot in zip(originals, pivots, strict=True) if pivot]
        paraphrases: dict[str, str] = {}
        for (original, _), paraphrase in zip(translated, back([pivot for _, pivot in translated]), strict=True):
            if problem := problem_of(paraphrase, original):
                counts[problem] += 1
            else:
                paraphrases[original] = paraphrase
        changed: list[Document | None] = []
        for number, document in enumerate(documents):
            texts = texts_of(document)
            for place, text in enumerate(texts):
                spans = [span for span in chosen[number, place] if span.text in paraphrases]
                texts[place] = replace_spans(text, [Span(one.start, one.end, paraphrases[one.text]) for one in spans])
            changed.append(with_texts(document, texts))
        return changed

    return Augmentation(
        name="back_translation",
        kinds=frozenset({"prose", "qa"}),
        keeps=frozenset(),
        change=change,
        counts=lambda: dict(counts) | ({"failed requests": failures()} if failures() else {}),
    )


def problem_of(paraphrase: str, original: str) -> str:
    """Returns the reason for which a paraphrase cannot replace the original; "" if it can."""
    low, high = _LENGTHS
    if not low * len(original) <= len(paraphrase) <= high * len(original):
        return "unlike in length"
    if re.findall(r"\w+", paraphrase.lower()) == re.findall(r"\w+", original.lower()):
        return "copies"
    if sorted(re.findall(r"\d+", paraphrase)) != sorted(re.findall(r"\d+", original)):
        return "other figures"
    if not all(part in paraphrase for part in _FIXED.findall(original)):
        return "other code or addresses"
    # One mark may replace another at the end, but a sentence must not lose its mark, nor a heading get one.
    if paraphrase[-1] != original[-1] and not (paraphrase[-1] in ".!?" and original[-1] in ".!?"):
        return "another end"
    return ""
