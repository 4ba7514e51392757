"""Makes question/answer pairs of docstrings: the first paragraphs as plain sentences, the question in varied wording
and in several forms (its purpose, its arguments, the error that it raises, an example, its name). Pure functions.

An answer repeats the name in the question. Each docstring gives one pair, so that all names are equally frequent;
held-out pairs have one form and wording, so that figures of different corpora can be compared."""

import doctest
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from modelwright.core.seeds import derive_seed
from modelwright.data.sources.docstrings import Docstring, NameKind

MAX_ANSWER_CHARS = 600
MIN_ANSWER_CHARS = 20
MIN_ANSWER_WORDS = 3
ENOUGH_CHARS = 120
"""Minimum length of an answer that ends with the first paragraph; a shorter one gets the next paragraph, too."""

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
MAX_PARAMETERS = 8
"""Maximum number of parameters of a readable answer."""
PURPOSE_WEIGHT = 3
"""Weight of the question for the purpose, relative to those of the other forms with an answer."""

_ERROR = r"`?(?P<error>[A-Z]\w*(?:Error|Exception|Warning|StopIteration|KeyboardInterrupt))`?"
_RAISES_SENTENCE = re.compile(rf"(?P<reason>[^.\n]*\b[Rr]aises?\s+(?:an?\s+|the\s+)?{_ERROR}[^.]*\.)")
_RAISES_SECTION = re.compile(
    rf"^[ \t]*Raises\s*:?[ \t]*\n(?:[ \t]*-+[ \t]*\n)?[ \t]*{_ERROR}[ \t]*:?[ \t]*\n?[ \t]*(?P<reason>[^\n]+)",
    re.MULTILINE,
)
_FIRST_SENTENCE = re.compile(r".*?[.!?](?=\s|$)|.*")


def question(docstring: Docstring, *, canonical: bool) -> str:
    """Returns the question about a name: canonical, or for half of the names in a wording that a hash selects."""
    variants = _VARIANTS[docstring.kind]
    pick = derive_seed(0, "question", docstring.name) % (2 * len(variants))
    template = CANONICAL if canonical or pick >= len(variants) else variants[pick]
    return template.format(docstring.name)


def answer(text: str) -> str:
    """Returns the first paragraphs of a docstring as plain sentences, at most `MAX_ANSWER_CHARS`; "" without any.

    Signatures at the start are skipped; sections (Args, Returns), lists, code and tables end the answer; markup of
    reStructuredText is reduced to its names.
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
    result = " ".join(parts)
    if result.endswith(":"):  # a last sentence that announces omitted content ("For example:")
        result = _whole_sentences(result)
    enough = len(result) >= MIN_ANSWER_CHARS and len(result.split()) >= MIN_ANSWER_WORDS
    return result if enough and not result.lower().startswith(("see ", "alias ", "same as ")) else ""


def _prose(paragraph: str) -> tuple[str, bool]:
    """Returns the sentences at the start of a paragraph, on one line, and True if something else follows them."""
    indented = paragraph.splitlines()
    indents = [len(line) - len(line.lstrip()) for line in indented]
    lines = [line.strip() for line in indented]
    for number, line in enumerate(lines):
        has_next = number + 1 < len(lines)
        underlined = has_next and re.fullmatch(r"[-=~^*]{3,}", lines[number + 1])
        # A short line above an indented one is a term with its definition (`sep` / ` The separator ...`).
        is_term = has_next and len(line.split()) <= 3 and indents[number + 1] > indents[number]
        if underlined or _SECTION.match(line) or _NOT_PROSE.match(line) or is_term:
            before = _plain(" ".join(lines[:number]))
            return before if before.endswith(_ENDS) else _whole_sentences(before), True
    return _plain(" ".join(lines)), False


def _plain(text: str) -> str:
    for pattern in (_ROLE, _LINK, _LITERAL):
        text = pattern.sub(r"`\1`", text)
    return " ".join(text.split())


def _whole_sentences(text: str) -> str:
    end = max(f"{text} ".rfind(mark, 0, MAX_ANSWER_CHARS + 1) for mark in (". ", "! ", "? "))
    return text[: end + 1]


@dataclass(frozen=True)
class Pair:
    """A question with its answer. lead: the first words of the answer, if they are not from the documentation."""

    question: str
    answer: str
    lead: str = ""


def pair(docstring: Docstring, *, canonical: bool) -> Pair | None:
    """Returns the question/answer pair of a docstring, None without an answer. canonical: asks for the purpose, in the
    canonical wording; otherwise a hash of the name selects one of the forms to which the docstring has an answer.
    """
    summary = answer(docstring.text)
    if not summary:
        return None
    lead = f"`{docstring.name}`:"
    purpose = Pair(question(docstring, canonical=canonical), f"{lead} {summary}", lead)
    if canonical:
        return purpose
    drawn_from = [purpose] * PURPOSE_WEIGHT
    for form, weight in FORMS:
        if made := form(docstring, summary):
            drawn_from += [made] * weight
    return drawn_from[derive_seed(0, "form", docstring.name) % len(drawn_from)]


def arguments_pair(docstring: Docstring, summary: str) -> Pair | None:
    """Asks for the arguments."""
    if not 1 <= len(docstring.parameters) <= MAX_PARAMETERS:
        return None
    shown: list[str] = []
    for parameter in docstring.parameters:
        name, _, default = parameter.partition("=")
        shown.append(f"`{name}` (default `{default}`)" if default else f"`{name}`")
    listed = " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
    return _within(Pair(f"Which arguments does `{docstring.name}` take?", f"`{docstring.name}` takes {listed}."))


def error_pair(docstring: Docstring, summary: str) -> Pair | None:
    """Asks for the first error that the documentation names, with its reason."""
    match = _RAISES_SECTION.search(docstring.text) or _RAISES_SENTENCE.search(docstring.text)
    if match is None:
        return None
    reason = " ".join(match["reason"].split())
    text = f"`{docstring.name}` raises `{match['error']}`: {reason}"
    return _within(Pair(f"Which error does `{docstring.name}` raise?", text))


def example_pair(docstring: Docstring, summary: str) -> Pair | None:
    """Asks for the documentation's example, up to the first line that uses the name and prints a result."""
    try:
        examples = doctest.DocTestParser().get_examples(docstring.text)
    except ValueError:  # prompts that are not indented alike
        return None
    own_name, shown = docstring.name.rpartition(".")[2], [f"An example of `{docstring.name}`:", ""]
    for example in examples:
        first, *rest = example.source.splitlines()
        shown += [f">>> {first}", *(f"... {line}" for line in rest), *example.want.splitlines()]
        if example.want and own_name in example.source:
            return _within(Pair(f"Give an example of `{docstring.name}`.", "\n".join(shown)))
    return None


def name_pair(docstring: Docstring, summary: str) -> Pair | None:
    """Asks for the name that the first sentence of the documentation describes."""
    match = _FIRST_SENTENCE.match(summary)
    sentence = match[0] if match else summary
    if docstring.name.rpartition(".")[2].lower() in sentence.lower():
        return None
    asked = f"Which {docstring.kind} is this? {sentence}"
    return Pair(asked, f"That is `{docstring.name}`.")


FORMS: Sequence[tuple[Callable[[Docstring, str], Pair | None], int]] = (
    (arguments_pair, 1),
    (error_pair, 3),
    (example_pair, 3),
    (name_pair, 1),
)
"""The forms other than the question for the purpose, each from a docstring and its summary, with its weight: few
docstrings have an error or an example."""


def _within(made: Pair) -> Pair | None:
    return made if len(made.answer) <= MAX_ANSWER_CHARS else None
