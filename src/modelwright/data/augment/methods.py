"""The list of augmentation methods. A new one is a file with a config and a builder, and a line here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelwright.core.config import ConfigError, did_you_mean
from modelwright.core.extensions import installed
from modelwright.data.augment.augmentation import Augmentation
from modelwright.data.augment.back_translation import BackTranslationConfig, back_translation
from modelwright.data.augment.case_noise import CaseNoiseConfig, case_noise
from modelwright.data.augment.comment_dropping import CommentDroppingConfig, comment_dropping
from modelwright.data.augment.hypernym_replacement import HypernymReplacementConfig, hypernym_replacement
from modelwright.data.augment.identifier_renaming import IdentifierRenamingConfig, identifier_renaming
from modelwright.data.augment.keyboard_typos import KeyboardTyposConfig, keyboard_typos
from modelwright.data.augment.masked_replacement import MaskedReplacementConfig, masked_replacement
from modelwright.data.augment.ocr_confusions import OcrConfusionsConfig, ocr_confusions
from modelwright.data.augment.random_deletion import RandomDeletionConfig, random_deletion
from modelwright.data.augment.random_insertion import RandomInsertionConfig, random_insertion
from modelwright.data.augment.random_swap import RandomSwapConfig, random_swap
from modelwright.data.augment.sentence_shuffle import SentenceShuffleConfig, sentence_shuffle
from modelwright.data.augment.span_infilling import LoadLanguageModel, SpanInfillingConfig, span_infilling
from modelwright.data.augment.synonym_replacement import SynonymReplacementConfig, synonym_replacement


@dataclass(frozen=True)
class Method:
    """A method in the list. config: dataclass of its settings; build: from settings and a loader of language models."""

    name: str
    config: type
    build: Callable[[Any, LoadLanguageModel], Augmentation]


def without_model(build: Callable[[Any], Augmentation]) -> Callable[[Any, LoadLanguageModel], Augmentation]:
    """Adapts a builder that needs the config alone to `Method.build`."""
    return lambda config, load: build(config)


AUGMENTATIONS: tuple[Method, ...] = (
    Method("synonym_replacement", SynonymReplacementConfig, without_model(synonym_replacement)),
    Method("hypernym_replacement", HypernymReplacementConfig, without_model(hypernym_replacement)),
    Method("random_insertion", RandomInsertionConfig, without_model(random_insertion)),
    Method("random_swap", RandomSwapConfig, without_model(random_swap)),
    Method("random_deletion", RandomDeletionConfig, without_model(random_deletion)),
    Method("sentence_shuffle", SentenceShuffleConfig, without_model(sentence_shuffle)),
    Method("back_translation", BackTranslationConfig, without_model(back_translation)),
    Method("keyboard_typos", KeyboardTyposConfig, without_model(keyboard_typos)),
    Method("ocr_confusions", OcrConfusionsConfig, without_model(ocr_confusions)),
    Method("case_noise", CaseNoiseConfig, without_model(case_noise)),
    Method("span_infilling", SpanInfillingConfig, span_infilling),
    Method("masked_replacement", MaskedReplacementConfig, without_model(masked_replacement)),
    Method("identifier_renaming", IdentifierRenamingConfig, without_model(identifier_renaming)),
    Method("comment_dropping", CommentDroppingConfig, without_model(comment_dropping)),
)

GROUP = "modelwright.augmentations"
"""Entry points of other packages: each a `Method`, under its name."""


def known_methods() -> tuple[Method, ...]:
    """Returns the methods of this package and of installed packages. Raises `ConfigError` for an entry point that is
    not a `Method` or has another name than its method.
    """
    added = installed(GROUP, Method, taken=tuple(method.name for method in AUGMENTATIONS))
    for name, method in added.items():
        if method.name != name:
            raise ConfigError(f"entry point {name} of {GROUP}: the method's name is {method.name!r}; make them equal")
    return (*AUGMENTATIONS, *added.values())


def build_methods(
    names: Sequence[str], configs: Mapping[str, Any], load_language_model: LoadLanguageModel
) -> list[Augmentation]:
    """Builds methods by name. configs: settings by name, else defaults. Raises `ConfigError` for an unknown name."""
    by_name = {method.name: method for method in known_methods()}
    for name in names:
        if name not in by_name:
            raise ConfigError(
                f"methods: {name!r} is unknown{did_you_mean(name, by_name)} (known: {', '.join(by_name)})"
            )
    # A name that is given twice is one method.
    chosen = [by_name[name] for name in dict.fromkeys(names)]
    return [method.build(configs.get(method.name, method.config()), load_language_model) for method in chosen]
