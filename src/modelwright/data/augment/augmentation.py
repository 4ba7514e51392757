"""`Augmentation`: a method of changing documents; and how methods find and replace the words of a text.

A method is a function of a document and of its own random stream, so its result depends neither on the worker nor on
the other documents. `augmenter.py` decides which documents are changed, how often and with which stream.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import import_module
from random import Random
from typing import Any, Literal, TypeVar

from modelwright.core.config import ConfigError
from modelwright.data.document import Document, Kind, join_turns

Kept = Literal["words", "word_count", "letters", "lines", "syntax_tree"]
"""Property that a changed text shares with the original: the words apart from their order, the number of words, the
letters apart from their case, the number of lines, the syntax tree apart from the names of local variables."""
TextChange = Callable[[str, Random], str | None]
"""A changed text; None, or the same text, where nothing can be changed."""
BatchChange = Callable[[Sequence[Document], Sequence[Random]], list[Document | None]]
"""A changed copy of each document, None where nothing can be changed; each with its own random stream."""
T = TypeVar("T")
_LETTER = r"[^\W\d_]"
_SPANS = re.compile(
    r"`[^`\n]*`"  # code
    r"|https?://\S+|www\.\S+|\S+@\S+\.\w+|<[^<>\s]+>|[#@]\w+"  # addresses, tags
    rf"|(?:{_LETTER}\.){{2,}}"  # abbreviations with dots
    r"|[^\s\"'“”‘’()\[\],;:—-]*[\d_/\\][^\s\"'“”‘’()\[\],;:—-]*"  # figures, identifiers, paths
    rf"|({_LETTER}+(?:['’-]{_LETTER}+)*)"
)
_ENGLISH_WORDS = frozenset({"the", "of", "and", "to", "in", "is", "was", "that", "with", "for", "it", "on", "are"})
_MIN_ENGLISH = 0.06
"""Share of these words from which a text counts as English. In running English it is about 0.25."""
_PUNCTUATION = ".,;:!?)]\"'”’…—-"
_ARTICLE = re.compile(rf"\b([Aa]n?)( |\n)({_LETTER}[\w'’-]*)")


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


def text_augmentation(
    name: str, change: TextChange, *, keeps: Sequence[Kept] = (), kinds: Sequence[Kind] = ("prose", "qa")
) -> Augmentation:
    """Returns a method that changes one text at a time: by default prose and the questions of conversations."""

    def change_batch(documents: Sequence[Document], rngs: Sequence[Random]) -> list[Document | None]:
        pairs = zip(documents, rngs, strict=True)
        return [with_texts(document, [change(text, rng) for text in texts_of(document)]) for document, rng in pairs]

    return Augmentation(name=name, kinds=frozenset(kinds), keeps=frozenset(keeps), change=change_batch)


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


def check_fraction(config: Any) -> None:
    """Raises `ConfigError` unless the setting `fraction` is in (0, 1]; the `__post_init__` of most methods' configs."""
    if not 0 < config.fraction <= 1:
        raise ConfigError(f"fraction: {config.fraction} is not in (0, 1]; for example 0.1")


@dataclass(frozen=True)
class Span:
    """A part of a text: characters `start` to `end`, which are `text`."""

    start: int
    end: int
    text: str


def find_words(text: str) -> list[Span]:
    """Returns the words of a text; a contraction or hyphenated word is one word. Addresses, code in backticks, figures,
    paths, identifiers and dotted abbreviations are not words, and so are never changed.
    """
    # The other branches of the pattern match first and have no group, so the words inside of them are passed over.
    return [Span(match.start(1), match.end(1), match[1]) for match in _SPANS.finditer(text) if match[1]]


def draw(items: Sequence[T], fraction: float, rng: Random) -> list[T]:
    """Draws about `fraction` of the items, at least one of them, and returns these in their order."""
    if not items:
        return []
    places = sorted(rng.sample(range(len(items)), max(1, round(fraction * len(items)))))
    return [items[place] for place in places]


def replace_spans(text: str, edits: Iterable[Span]) -> str:
    """Returns the text with `Span.text` at the place of each edit. The edits must not overlap."""
    pieces, end = [], 0
    for edit in sorted(edits, key=lambda edit: edit.start):
        pieces += [text[end : edit.start], edit.text]
        end = edit.end
    return "".join([*pieces, text[end:]])


def match_case(word: str, like: str) -> str:
    """Returns a word in lower case, capitalized or in upper case, like another word."""
    if like.isupper() and len(like) > 1:  # "I" and "A" are no sign of upper case
        return word.upper()
    return word[:1].upper() + word[1:] if like[:1].isupper() else word


def is_english(text: str) -> bool:
    words = re.findall(r"[a-z]+", text.lower())
    return bool(words) and sum(word in _ENGLISH_WORDS for word in words) >= _MIN_ENGLISH * len(words)


def repair_articles(text: str, before: str) -> str:
    """Makes "a" and "an" agree with the words after them, in English texts. A pair that also occurs in the text
    `before` the change stays as its author wrote it.
    """
    if not is_english(before):
        return text
    written = {match[0].lower() for match in _ARTICLE.finditer(before)}

    # Authors may have a reason, as in "a historic" and "an historic".
    def agree(match: re.Match[str]) -> str:
        if match[0].lower() in written:
            return match[0]
        article = _inflect_articles()(match[3].lower()).partition(" ")[0]
        return match_case(article, match[1]) + match[2] + match[3]

    return _ARTICLE.sub(agree, text)


@cache
def _inflect_articles() -> Callable[[str], str]:
    """Returns a function that puts "a" or "an" before a word. It has a cache, since texts repeat words."""
    return lru_cache(maxsize=100_000)(import_extra("inflect").engine().a)


def import_extra(module: str) -> Any:
    """Imports a module of a package of the extra `augment`. Raises `ConfigError` if it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        raise missing_extra(module.partition(".")[0]) from None


def missing_extra(package: str) -> ConfigError:
    return ConfigError(
        f"augment: {package} is not installed; install what text augmentation needs: pip install 'modelwright[augment]'"
    )


def stands_free(text: str, word: Span) -> bool:
    """Returns True for a word after white space that is not between two punctuation marks."""
    before, after = text[: word.start].rstrip(), text[word.end : word.end + 1]
    if not before or before[-1] in '.!?:"”' or not text[word.start - 1].isspace():
        return False
    if not after.isspace() and after not in _PUNCTUATION:
        return False
    return after.isspace() or before[-1] not in _PUNCTUATION


def spans_of_sentences(text: str, language: str = "en") -> list[Span]:
    """Returns the sentences, each with the white space after it; joined they are the text."""
    spans, start = [], 0
    for sentence in import_extra("sentencex").segment(language, text):
        spans.append(Span(start, start + len(sentence), sentence))
        start += len(sentence)
    return spans
