"""The built-in corpus: questions from docstrings, and a split by module through which nothing leaks."""

import hashlib
import os
import subprocess
import sys
from collections import Counter

import pytest

from modelwright.data.document import Document
from modelwright.data.sources.stdlib_corpus import (
    MAX_ANSWER_CHARS,
    Docstring,
    answer,
    docstrings_of_compiled,
    docstrings_of_source,
    machine_corpus,
    question,
    split_of,
)

FRACTION = 0.01


@pytest.fixture(scope="module")
def corpus() -> list[Document]:
    skipped: list[str] = []
    documents = list(machine_corpus(fraction=FRACTION, skip=lambda reason, file: skipped.append(file)))
    assert not skipped
    return documents


def test_three_kinds_of_text(corpus: list[Document]) -> None:
    kinds = Counter(document.kind for document in corpus)
    assert min(kinds[kind] for kind in ("prose", "code", "qa")) > 0
    assert len({document.id for document in corpus}) == len(corpus)
    for document in corpus:
        if document.kind == "qa":
            assert 10 <= len(document.body) <= MAX_ANSWER_CHARS
            asked, answered = document.meta["question"], document.meta["answer"]
            assert f"`{document.meta['name']}`" in answered
            assert document.split == "train" or asked == f"What does `{document.meta['name']}` do?"
            assert answered.startswith(document.meta["title"])
        if document.kind == "prose":
            assert document.text.startswith(document.meta["title"] + "\n\n")
    assert not any("test" in document.meta["module"].split(".") for document in corpus)


def test_a_module_is_on_one_side(corpus: list[Document]) -> None:
    for document in corpus:
        assert document.split == split_of(document.meta["module"])
    modules = [f"package{i}.module" for i in range(4000)]
    assert 0.04 < sum(split_of(module) == "heldout" for module in modules) / len(modules) < 0.06


def test_held_out_questions_have_the_canonical_wording() -> None:
    docstring = Docstring("shutil", "shutil.copytree", "function", "x")
    assert question(docstring, canonical=True) == "What does `shutil.copytree` do?"
    asked = {question(Docstring("m", f"m.f{i}", "function", ""), canonical=False).split("`")[0] for i in range(200)}
    assert len(asked) > 4


def test_corpus_does_not_depend_on_the_hash_seed(corpus: list[Document]) -> None:
    code = (
        "import hashlib; from modelwright.data.sources.stdlib_corpus import machine_corpus; d = hashlib.sha256();"
        f"corpus = machine_corpus(fraction={FRACTION}, skip=print);"
        "[d.update(x.to_json().encode()) for x in corpus]; print(d.hexdigest())"
    )
    environment = os.environ | {"PYTHONHASHSEED": "11"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    own = hashlib.sha256("".join(document.to_json() for document in corpus).encode()).hexdigest()
    assert run.stdout.strip() == own


def test_docstrings_of_source() -> None:
    source = '''"""The module's own description."""
if True:
    def first():
        """What the first function does."""
        def inner():
            """What nobody can call from outside."""
class Box:
    """A box that holds things in it."""
    async def open(self):
        """Open the box, if it is not open."""
    def short(self):
        """Too short."""
'''
    found = [(d.name, d.kind, d.text) for d in docstrings_of_source("m", source)]
    assert found == [
        ("m", "module", "The module's own description."),
        ("m.first", "function", "What the first function does."),
        ("m.Box", "class", "A box that holds things in it."),
        ("m.Box.open", "function", "Open the box, if it is not open."),
    ]
    assert list(docstrings_of_source("m", '"""unclosed')) == []
    assert list(docstrings_of_source("m", '"""nul\0"""')) == []


def test_docstrings_of_compiled_modules() -> None:
    names = {d.name: d.text for d in docstrings_of_compiled("builtins", "builtins")}
    assert names["builtins.len"].startswith("Return the number of items")
    assert "builtins.str.split" in names
    assert list(docstrings_of_compiled("no_such_module_at_all", "x")) == []


@pytest.mark.parametrize(("text", "expected"), [
    ("Copy a tree.\n\nMore about it here.\n\nArgs:\n    src: where from", "Copy a tree. More about it here."),
    ("abs(x) -> Tensor\n\nComputes the magnitude of :attr:`x`.\n\n.. math:: x", "Computes the magnitude of `x`."),
    ("Return ``x`` as a\n:class:`~nn.Linear` of\n:func:`this <that>`.", "Return `x` as a `nn.Linear` of `this`."),
    ("Add all the things up\n\nParameters\n----------\nx : int", "Add all the things up"),
    ("Split the string well.\n\n  sep\n    The separator.", "Split the string well."),
    ("Make a list of these. For example:\n\n>>> f()", "Make a list of these."),
    ("This sentence is long enough. This one ends in a list of\n- a\n- b", "This sentence is long enough."),
    ("Without a full stop\n\nThe second paragraph.", "Without a full stop. The second paragraph."),
    ("See :func:`torch.abs`", ""),
    (">>> f(1)\n2", ""),
    ("Short.", ""),
    ("Is the first sentence. " + "word " * 200, "Is the first sentence."),
])  # fmt: skip
def test_answers(text: str, expected: str) -> None:
    assert answer(text) == expected
