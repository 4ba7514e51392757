"""`Augmentation`: a method of changing documents, and its construction from a change of one text.

A method is a function of a document and of its own random stream, so its result depends neither on the worker nor on
the other documents. `augmenter.py` decides which documents are changed, how often and with which stream.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

from modelwright.core.errors import ConfigError
from modelwright.data.document import Document, Kind, join_turns

Kept = Literal["words", "word_count", "letters", "lines", "syntax_tree"]
"""Property that a changed text shares with the original: the words apart from their order, the number of words, the
letters apart from their case, the number of lines, the syntax tree apart from the names of local variables."""

TextChange = Callable[[str, Random], str | None]
"""A changed text; None, or the same text, where nothing can be changed."""
BatchChange = Callable[[Sequence[Document], Sequence[Random]], list[Document | None]]
"""A changed copy of each document, None where nothing can be changed; each with its own random stream."""


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """A method of augmentation.

    name: recorded with every changed document. kinds: kinds of documents that it accepts. keeps: properties that it
    preserves, which the tests check. change: changes several documents at once, so that a model computes them together.
    counts: number of texts that the method left unchanged since it was built, by reason.
    """

    name: str
    kinds: frozenset[Kind]
    keeps: frozenset[Kept]
    change: BatchChange
    counts: Callable[[], Mapping[str, int]] = dict

    def __call__(self, document: Document, rng: Random) -> Document | None:
        return self.change([document], [rng])[0]


def prose_augmentation(name: str, change: TextChange, *, keeps: Sequence[Kept] = ()) -> Augmentation:
    """Returns a method for prose and for the questions of conversations, from a change of one text."""
    kinds: frozenset[Kind] = frozenset({"prose", "qa"})
    return Augmentation(name=name, kinds=kinds, keeps=frozenset(keeps), change=one_by_one(change))


def code_augmentation(name: str, change: TextChange, *, keeps: Sequence[Kept] = ()) -> Augmentation:
    """Returns a method for source code, from a change of one text."""
    return Augmentation(name=name, kinds=frozenset({"code"}), keeps=frozenset(keeps), change=one_by_one(change))


def one_by_one(change: TextChange) -> BatchChange:
    def change_batch(documents: Sequence[Document], rngs: Sequence[Random]) -> list[Document | None]:
        pairs = zip(documents, rngs, strict=True)
        return [with_texts(document, [change(text, rng) for text in texts_of(document)]) for document, rng in pairs]

    return change_batch


def texts_of(document: Document) -> list[str]:
    """Returns the texts that may change: the body of a document without its title, or the user's turns of a
    conversation. The assistant's turns stay, because training learns them. Lone surrogates, which the libraries here
    cannot encode, become question marks, as in documents that are read from files.
    """
    texts = [document.body]
    if document.kind == "qa":
        texts = [turn["content"] for turn in document.messages if turn["role"] == "user"]
    return [text.encode("utf-8", "replace").decode("utf-8") for text in texts]


def with_texts(document: Document, texts: Sequence[str | None]) -> Document | None:
    """Replaces `texts_of(document)`, where None keeps a text. Returns None if nothing changes or a text gets blank."""
    before = texts_of(document)
    after = [old if new is None else new for old, new in zip(before, texts, strict=True)]
    if after == before or not all(text.strip() for text in after):
        return None
    if document.kind != "qa":
        # The body is the end of the text, and a question mark for a surrogate leaves its length as it was.
        start = len(document.text) - len(before[0])
        return replace(document, text=document.text[:start] + after[0])
    left = iter(after)
    turns = [{**turn, "content": next(left)} if turn["role"] == "user" else turn for turn in document.messages]
    meta: dict[str, Any] = dict(document.meta)
    if "messages" in meta:
        meta["messages"] = turns
    else:
        meta["question"] = after[0]
    return replace(document, text=join_turns(turns), meta=meta)


def check_fraction(name: str, fraction: float) -> None:
    """Raises `ConfigError` unless the fraction is in (0, 1]."""
    if not 0 < fraction <= 1:
        raise ConfigError(f"{name}: {fraction} is not in (0, 1]; for example 0.1")
