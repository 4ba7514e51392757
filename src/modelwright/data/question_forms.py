"""Question/answer pairs about what a docstring documents, in several forms: what it does, which arguments it takes,
which error it raises, an example of it, and its name. Pure functions.

An answer names what was asked about. One pair is made of each docstring, so that no thing is asked about more often
than another; held-out ones are asked in one form and wording, so that figures of different corpora can be compared.
"""

import doctest
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from modelwright.core.seeds import derive_seed
from modelwright.data.docstrings import Docstring
from modelwright.data.questions import MAX_ANSWER_CHARS, answer, question

MAX_PARAMETERS = 8
"""More do not make a readable answer."""
PURPOSE_WEIGHT = 3
"""How often the question for the purpose is drawn, relative to the weights of the other forms that have an answer."""

_ERROR = r"`?(?P<error>[A-Z]\w*(?:Error|Exception|Warning|StopIteration|KeyboardInterrupt))`?"
_RAISES_SENTENCE = re.compile(rf"(?P<reason>[^.\n]*\b[Rr]aises?\s+(?:an?\s+|the\s+)?{_ERROR}[^.]*\.)")
_RAISES_SECTION = re.compile(
    rf"^[ \t]*Raises\s*:?[ \t]*\n(?:[ \t]*-+[ \t]*\n)?[ \t]*{_ERROR}[ \t]*:?[ \t]*\n?[ \t]*(?P<reason>[^\n]+)",
    re.MULTILINE,
)
_FIRST_SENTENCE = re.compile(r".*?[.!?](?=\s|$)|.*")


@dataclass(frozen=True)
class Pair:
    """A question with its answer. lead: the words with which the answer begins and that are none of the
    documentation's; "" if it has no such words.
    """

    question: str
    answer: str
    lead: str = ""


def pair(docstring: Docstring, *, canonical: bool) -> Pair | None:
    """The question/answer pair of a docstring, None for one that answers no question.

    canonical: what it does, in the canonical wording; else the name selects one of the forms that the docstring has an
    answer to.
    """
    summary = answer(docstring.text)
    if not summary:
        return None
    purpose = _purpose(docstring, summary, canonical=canonical)
    if canonical:
        return purpose
    drawn_from = [purpose] * PURPOSE_WEIGHT
    for form, weight in FORMS:
        if made := form(docstring, summary):
            drawn_from += [made] * weight
    return drawn_from[derive_seed(0, "form", docstring.name) % len(drawn_from)]


def _purpose(docstring: Docstring, summary: str, *, canonical: bool) -> Pair:
    lead = f"`{docstring.name}`:"
    return Pair(question(docstring, canonical=canonical), f"{lead} {summary}", lead)


def arguments_pair(docstring: Docstring, summary: str) -> Pair | None:
    """Which arguments it takes."""
    if not 1 <= len(docstring.parameters) <= MAX_PARAMETERS:
        return None
    shown = [_shown(parameter) for parameter in docstring.parameters]
    listed = " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
    return _within(Pair(f"Which arguments does `{docstring.name}` take?", f"`{docstring.name}` takes {listed}."))


def _shown(parameter: str) -> str:
    name, _, default = parameter.partition("=")
    return f"`{name}` (default `{default}`)" if default else f"`{name}`"


def error_pair(docstring: Docstring, summary: str) -> Pair | None:
    """Which error it raises, and when: the first one that the documentation names."""
    match = _RAISES_SECTION.search(docstring.text) or _RAISES_SENTENCE.search(docstring.text)
    if match is None:
        return None
    reason = " ".join(match["reason"].split())
    text = f"`{docstring.name}` raises `{match['error']}`: {reason}"
    return _within(Pair(f"Which error does `{docstring.name}` raise?", text))


def example_pair(docstring: Docstring, summary: str) -> Pair | None:
    """The documentation's example up to the first line that uses the name and prints a result."""
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
    """Which name belongs to the first sentence of the documentation."""
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
"""The forms beside the question for the purpose, each from a docstring and its summary, with its weight: few docstrings
have an error or an example."""


def _within(made: Pair) -> Pair | None:
    return made if len(made.answer) <= MAX_ANSWER_CHARS else None
