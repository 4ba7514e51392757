"""Docstrings to question/answer pairs: the first paragraphs as plain sentences, the question in varied wording. Pure
functions.
"""

import re

from modelwright.core.seeds import derive_seed
from modelwright.data.docstrings import Docstring, NameKind

MAX_ANSWER_CHARS = 600
MIN_ANSWER_CHARS = 20
MIN_ANSWER_WORDS = 3
ENOUGH_CHARS = 120
"""A first paragraph shorter than this takes the next one along."""

CANONICAL = "What does `{}` do?"
_VARIANTS: dict[NameKind, tuple[str, ...]] = {
    "function": (
        "Explain `{}`.",
        "What is `{}` for?",
        "Describe what `{}` does.",
        "How would you describe `{}`?",
        "Tell me about `{}`.",
        "When would I use `{}`?",
    ),
    "class": (
        "What is `{}`?",
        "Explain the class `{}`.",
        "What is the class `{}` for?",
        "Describe `{}`.",
        "Tell me about `{}`.",
        "When would I use `{}`?",
    ),
    "module": (
        "What is the module `{}` for?",
        "Explain the module `{}`.",
        "What is in `{}`?",
        "Describe the module `{}`.",
        "Tell me about `{}`.",
    ),
}

_ROLE = re.compile(r":[\w:+-]+:`~?([^`<]*?)(?:\s*<[^>`]*>)?`")
_LITERAL = re.compile(r"``([^`]+)``")
_LINK = re.compile(r"`([^`<]+?)\s*<[^>`]+>`_{1,2}")
_SECTION = re.compile(
    r"(args|arguments|parameters|params|returns?|raises|yields?|examples?|usage|notes?|warnings?|see also|references"
    r"|attributes|keyword arguments|inputs?|outputs?|shape|methods|options|caveats?|todo)\s*:*$|"
    r"(args|arguments|parameters|returns|raises|example|examples|note|keyword arguments|usage)\s*:",
    re.IGNORECASE,
)
_NOT_PROSE = re.compile(
    r">>>|\.\. |:(param|type|returns?|rtype|raises?|arg|keyword|cvar|ivar|var)\b|@\w+"
    r"|[-*+|#=•] |\(?\d+[.)] |[-=~^*]{3,}|\$"
)
_ENDS = (".", "!", "?", ":")
_SIGNATURE = re.compile(r"[\w.]+\s*\(.*\)\s*(->.*|:)?$|[\w.]+\s*\(.*->.*$|[\w.]+\s*=\s*[\w.]+\(.*$", re.DOTALL)


def question(docstring: Docstring, *, canonical: bool) -> str:
    """The question about a name: the canonical wording, or one that the name selects (every second one is
    canonical).
    """
    variants = _VARIANTS[docstring.kind]
    pick = derive_seed(0, "question", docstring.name) % (2 * len(variants))
    template = CANONICAL if canonical or pick >= len(variants) else variants[pick]
    return template.format(docstring.name)


def answer(text: str) -> str:
    """The first paragraphs of a docstring as plain sentences, at most `MAX_ANSWER_CHARS`; "" when it has none.

    Signatures at the start are skipped; sections (Args, Returns), lists, code and tables end the answer; markup of
    reStructuredText is reduced to the names that it holds.
    """
    parts: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        prose, ended = _prose(paragraph)
        if not parts and not ended and _SIGNATURE.fullmatch(prose):
            continue
        if parts and prose and not parts[-1].endswith(_ENDS):
            parts[-1] += "."
        if prose and len(" ".join([*parts, prose])) <= MAX_ANSWER_CHARS:
            parts.append(prose)
        elif prose and not parts:
            parts.append(_whole_sentences(prose))
            break
        if ended or len(" ".join(parts)) >= ENOUGH_CHARS or (prose and prose not in parts):
            break
    result = _without_announcement(" ".join(parts))
    enough = len(result) >= MIN_ANSWER_CHARS and len(result.split()) >= MIN_ANSWER_WORDS
    return result if enough and not result.lower().startswith(("see ", "alias ", "same as ")) else ""


def _prose(paragraph: str) -> tuple[str, bool]:
    """The sentences at the start of a paragraph, on one line, and whether something else follows."""
    lines = [line.strip() for line in paragraph.splitlines()]
    for number, line in enumerate(lines):
        underlined = number + 1 < len(lines) and re.fullmatch(r"[-=~^*]{3,}", lines[number + 1])
        if underlined or _SECTION.match(line) or _NOT_PROSE.match(line) or _is_term(number, paragraph):
            before = _plain(" ".join(lines[:number]))
            return before if before.endswith(_ENDS) else _whole_sentences(before), True
    return _plain(" ".join(lines)), False


def _is_term(number: int, paragraph: str) -> bool:
    """Whether a line is a term whose definition is indented below it (`sep` / ` The separator ...`)."""
    line, *below = paragraph.splitlines()[number : number + 2]
    return bool(below) and len(line.split()) <= 3 and _indent(below[0]) > _indent(line)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _plain(text: str) -> str:
    for pattern in (_ROLE, _LINK, _LITERAL):
        text = pattern.sub(r"`\1`", text)
    return " ".join(text.split())


def _whole_sentences(text: str) -> str:
    end = max(f"{text} ".rfind(mark, 0, MAX_ANSWER_CHARS + 1) for mark in (". ", "! ", "? "))
    return text[: end + 1]


def _without_announcement(text: str) -> str:
    """Remove a last sentence that announces omitted content ("For example:")."""
    return _whole_sentences(text) if text.endswith(":") else text
