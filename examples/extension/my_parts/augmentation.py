# An augmentation: words that hurried writers type twice ("in the the garden").
# modelwright augment notes/ copies.jsonl --augment.methods doubled_words --doubled_words.fraction 0.05
# A changed text is a function of the text and of its own random stream, so it does not depend on the worker.
from dataclasses import dataclass
from random import Random

from modelwright.data.augment import augmentation as aug
from modelwright.data.augment.methods import Method


@dataclass(frozen=True, kw_only=True)
class DoubledWordsConfig:
    fraction: float = 0.02
    """Fraction of the words."""

    __post_init__ = aug.check_fraction


def doubled(text: str, fraction: float, rng: Random) -> str:
    words = aug.draw(aug.find_words(text), fraction, rng)
    return aug.replace_spans(text, [aug.Span(word.start, word.end, f"{word.text} {word.text}") for word in words])


DOUBLED_WORDS = Method(
    "doubled_words",
    DoubledWordsConfig,
    lambda config, load_model: aug.text_augmentation(
        "doubled_words", lambda text, rng: doubled(text, config.fraction, rng), keeps=("lines",)
    ),
)
