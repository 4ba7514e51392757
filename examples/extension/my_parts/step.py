# A cleaning step with settings: documents that have one of some words are dropped.
# modelwright clean texts.jsonl --out cleaned --clean.steps '[{banned_words: {words: [viagra], lists: [words.txt]}}]'
# A step in a file, which settings name by path, is in examples/python/cleaning_step.py.
import re
from dataclasses import dataclass
from pathlib import Path

from modelwright.core.config import ConfigError
from modelwright.data.clean.steps.step import Drop, StepSpec
from modelwright.data.document import Document


@dataclass(frozen=True, kw_only=True)
class BannedWordsConfig:
    words: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    """Files with a word a line. A change of one of them cleans again."""

    def __post_init__(self) -> None:
        if not self.words and not self.lists:
            raise ConfigError("words: names no word; name one, or a file in lists")


@dataclass(frozen=True)
class BannedWords:
    """A dataclass, because its fields identify the result of the step."""

    words: tuple[str, ...]
    name: str = "banned_words"

    def __call__(self, document: Document) -> Document | Drop:
        found = {*self.words}.intersection(re.findall(r"\w+", document.text.lower()))
        return Drop("banned word", min(found)) if found else document


def build(config: BannedWordsConfig, seed: int) -> BannedWords:
    of_lists = (word for path in config.lists for word in Path(path).read_text(encoding="utf-8").split())
    return BannedWords(tuple(sorted({word.lower() for word in (*config.words, *of_lists)})))


BANNED_WORDS = StepSpec(name="banned_words", build=build, config=BannedWordsConfig, files=("lists",))
