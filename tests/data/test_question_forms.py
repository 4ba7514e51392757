"""Question/answer pairs from docstrings in their forms, and the parameters that one form asks for."""

import ast
from collections import Counter
from dataclasses import replace

import pytest

from modelwright.data.clean.fingerprints import fingerprints
from modelwright.data.document import Document
from modelwright.data.sources.stdlib_corpus import (
    Docstring,
    Pair,
    arguments_pair,
    docstrings_of_compiled,
    docstrings_of_source,
    error_pair,
    example_pair,
    name_pair,
    pair,
    parameters_of,
    parameters_of_signature,
)

COPY = Docstring(
    "shutil", "shutil.copytree", "function", "Recursively copy a directory tree.", ("src", "dst", "deep=True")
)


def test_held_out_pairs_have_one_form_and_wording() -> None:
    text = "`shutil.copytree`: Recursively copy a directory tree."
    assert pair(COPY, canonical=True) == Pair("What does `shutil.copytree` do?", text, "`shutil.copytree`:")
    assert pair(replace(COPY, text="See below."), canonical=True) is None


def test_all_forms_occur_and_every_answer_names_what_was_asked_about() -> None:
    text = "Put things in order.\n\nRaises ValueError for an empty list.\n\n>>> sort([2, 1])\n[1, 2]\n"
    starts: Counter[str] = Counter()
    for number in range(300):
        name = f"m.n{number}.sort"
        made = pair(Docstring("m", name, "function", text, ("items",)), canonical=False)
        assert made is not None
        assert f"`{name}`" in made.answer
        assert made.answer.startswith(made.lead)
        starts[made.answer.replace(name, "X")[:14]] += 1
    assert {"`X`: Put thing", "`X` takes `ite", "`X` raises `Va", "An example of ", "That is `X`."} == set(starts)
    assert min(starts.values()) > 15


def test_arguments() -> None:
    made = arguments_pair(COPY, "")
    assert made == Pair(
        "Which arguments does `shutil.copytree` take?",
        "`shutil.copytree` takes `src`, `dst` and `deep` (default `True`).",
    )
    one = arguments_pair(replace(COPY, parameters=("*rest",)), "")
    assert one is not None
    assert one.answer == "`shutil.copytree` takes `*rest`."
    assert arguments_pair(replace(COPY, parameters=()), "") is None
    assert arguments_pair(replace(COPY, parameters=tuple("abcdefghi")), "") is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (
            "Pop an item. Raises KeyError if it is empty. More.",
            "`f` raises `KeyError`: Raises KeyError if it is empty.",
        ),
        ("Invert.\n\nRaises\n------\nLinAlgError\n    If it fails.\n", "`f` raises `LinAlgError`: If it fails."),
        ("Invert.\n\nRaises:\n    ValueError: if it fails\n", "`f` raises `ValueError`: if it fails"),
        ("Raise the power of something.", ""),
    ],
)
def test_errors(text: str, answer: str) -> None:
    made = error_pair(Docstring("m", "f", "function", text), "")
    assert (made.answer if made else "") == answer


def test_examples_come_with_the_lines_that_they_need() -> None:
    text = "Add up.\n\n>>> a = [1,\n...      2]\n>>> total(a)\n3\n>>> total([])\n0\n"
    made = example_pair(Docstring("m", "m.total", "function", text), "")
    assert made is not None
    assert made.answer == "An example of `m.total`:\n\n>>> a = [1,\n...      2]\n>>> total(a)\n3"
    assert example_pair(Docstring("m", "m.other", "function", text), "") is None
    assert example_pair(Docstring("m", "m.total", "function", "  >>> total(a)\n>>> 1\n 2"), "") is None


def test_names_are_asked_for_unless_the_sentence_gives_them_away() -> None:
    made = name_pair(COPY, "Recursively copy a tree. With all files.")
    assert made == Pair("Which function is this? Recursively copy a tree.", "That is `shutil.copytree`.")
    assert name_pair(COPY, "What copytree does.") is None


@pytest.mark.parametrize(
    ("definition", "expected"),
    [
        ("self, a: int, /, b=2, *rest: str, c, d='x', **more", ("a", "b=2", "*rest", "c", "d='x'", "**more")),
        ("cls", ()),
        ("a, *, b=None", ("a", "b=None")),
        ("", ()),
    ],
)
def test_parameters_of_a_definition(definition: str, expected: tuple[str, ...]) -> None:
    (node,) = ast.parse(f"def f({definition}): pass").body
    assert isinstance(node, ast.FunctionDef)
    assert parameters_of(node.args) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("add(input, other, *, out=None) -> Tensor", ("input", "other", "out=None")),
        ("($module, obj, /)", ("obj",)),
        ("($self, /)", ()),
        ("range(stop) -> range object", ("stop",)),
        ("fill(value, [size]) -> Tensor", ()),
        ("Return a list.", ()),
    ],
)
def test_parameters_of_a_signature(text: str, expected: tuple[str, ...]) -> None:
    assert parameters_of_signature(text) == expected


def test_sources_and_compiled_functions_tell_their_parameters() -> None:
    source = 'class A:\n    def f(self, x=1):\n        """Say something about it."""\n'
    assert [docstring.parameters for docstring in docstrings_of_source("m", source)] == [("x=1",)]
    known = {docstring.name: docstring.parameters for docstring in docstrings_of_compiled("builtins", "builtins")}
    assert known["builtins.len"] == ("obj",)


def test_what_names_a_thing_does_not_make_two_answers_different() -> None:
    """A copy of a module under another name is the same to deduplication."""

    def document(name: str, answer: str, lead: str) -> Document:
        meta = {"question": "?", "answer": answer, "title": lead, "summary": "Copies a whole tree of files."}
        return Document(id=name, text=answer, kind="qa", split="train", source="s", meta=meta)

    answers = [f"`{name}`: Copies a whole tree of files." for name in ("a.copy", "b.copy")]
    prints = fingerprints([document(text[1:7], text, text[:9]) for text in answers])
    assert prints.own[0] == prints.own[1]
    assert (prints.shingles[:2] == prints.shingles[2:]).all()
    assert (prints.keys[:, 0] == prints.keys[:, 1]).all(), "the body is the summary"
