"""Length: what is too short to teach anything, or too long to be a text."""

from collections.abc import Iterator
from dataclasses import dataclass

from modelwright.core.errors import ConfigError
from modelwright.data.document import Document
from modelwright.data.steps.step import Drop


@dataclass(frozen=True, kw_only=True)
class LengthConfig:
    """Length limits in characters."""

    min_chars: int = 20
    """Shortest document, other than question/answer pairs."""
    min_answer_chars: int = 1
    """Shortest answer of a question/answer pair."""
    max_chars: int = 2_000_000
    """Longest document."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_chars <= self.max_chars:
            raise ConfigError(f"min_chars: {self.min_chars} is not between 0 and max_chars ({self.max_chars})")


@dataclass(frozen=True)
class Length:
    config: LengthConfig
    name: str = "length"

    def __call__(self, documents: Iterator[Document], drop: Drop) -> Iterator[Document]:
        for document in documents:
            shortest = self.config.min_answer_chars if document.kind == "qa" else self.config.min_chars
            if not document.body.strip():
                drop(document, "empty")
            elif len(document.body) < shortest:
                drop(document, "too short")
            elif len(document.text) > self.config.max_chars:
                drop(document, "too long")
            else:
                yield document
