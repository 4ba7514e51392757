"""Twenty examples of each method that needs no model, in a file that people have read; and what the methods promise.

`MODELWRIGHT_WRITE_GOLDEN=1` writes the file anew, and the part of WordNet that it needs; read the difference.
"""

import ast
import os
import re
from collections import Counter
from functools import cache
from pathlib import Path
from random import Random

import pytest
import yaml

import augment_texts
import wordnet_subset
from modelwright.core.seeds import derive_seed
from modelwright.data.augment import related_words
from modelwright.data.augment.augmentation import Augmentation
from modelwright.data.augment.methods import AUGMENTATIONS, Method, no_language_model
from modelwright.data.augment.word_spans import find_words
from modelwright.data.augment.wordnet import DEFAULT_FOLDER
from modelwright.data.document import Document

FOLDER = Path(__file__).parent
GOLDEN, WORDNET = FOLDER / "golden" / "augment_examples.yaml", FOLDER / "wordnet"
NEED_A_MODEL = ("back_translation", "span_infilling", "masked_replacement")
METHODS = [method for method in AUGMENTATIONS if method.name not in NEED_A_MODEL]
FRACTIONS = {"identifier_renaming": 0.7, "comment_dropping": 0.7}
NUM_EXAMPLES = 20
WRITE = bool(os.environ.get("MODELWRIGHT_WRITE_GOLDEN"))


@cache
def build(method: Method) -> Augmentation:
    settings = {}
    if hasattr(method.config, "fraction"):
        settings["fraction"] = FRACTIONS.get(method.name, 0.15)
    if hasattr(method.config, "wordnet"):
        settings["wordnet"] = WORDNET
    return method.build(method.config(**settings), no_language_model)


def documents(augmentation: Augmentation) -> list[Document]:
    kind = "code" if "code" in augmentation.kinds else "prose"
    texts = augment_texts.CODE if kind == "code" else augment_texts.PROSE
    return [Document(id=str(n), text=text, kind=kind, split="train", source="test") for n, text in enumerate(texts)]


def changed(augmentation: Augmentation, seed: int = 0) -> list[str]:
    given = documents(augmentation)
    rngs = [Random(derive_seed(seed, augmentation.name, document.id)) for document in given]
    return [copy.text if copy else "" for copy in augmentation.change(given, rngs)]


def write_golden(monkeypatch: pytest.MonkeyPatch) -> None:
    wordnet = wordnet_subset.RecordingWordNet(DEFAULT_FOLDER)
    for seed in range(3):
        for method in METHODS:
            if hasattr(method.config, "wordnet"):
                with monkeypatch.context() as patch:
                    module = f"modelwright.data.augment.{method.name}.open_wordnet"
                    patch.setattr(module, lambda folder: wordnet)
                    changed(build.__wrapped__(method), seed)
    wordnet_subset.write_subset(wordnet, WORDNET)
    related_words.open_wordnet.cache_clear()
    examples = {method.name: changed(build(method)) for method in METHODS}
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(yaml.safe_dump(examples, sort_keys=False, allow_unicode=True, width=110), encoding="utf-8")


@pytest.fixture(scope="module")
def golden() -> dict[str, list[str]]:
    if WRITE:
        with pytest.MonkeyPatch.context() as monkeypatch:
            write_golden(monkeypatch)
    return yaml.safe_load(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_examples(method: Method, golden: dict[str, list[str]]) -> None:
    texts = changed(build(method))
    assert len(texts) == NUM_EXAMPLES
    assert all(texts), "each example changes"
    assert texts == golden[method.name], "run with MODELWRIGHT_WRITE_GOLDEN=1 and read the difference"


def renamed(tree: ast.AST) -> str:
    """The dump of a tree with each name replaced by the number of its first use."""
    numbers: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = str(numbers.setdefault(node.id, len(numbers)))
    return ast.dump(tree)


def check_promises(augmentation: Augmentation, before: str, after: str) -> None:
    keeps = augmentation.keeps
    if "words" in keeps:
        assert Counter(before.split()) == Counter(after.split())
    if "word_count" in keeps:
        assert len(before.split()) == len(after.split())
    if "letters" in keeps:
        assert re.sub(r"\W", "", before.lower()) == re.sub(r"\W", "", after.lower())
    if "lines" in keeps:
        assert before.count("\n") == after.count("\n")
    if "syntax_tree" in keeps:
        assert renamed(ast.parse(before)) == renamed(ast.parse(after))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_promises_length_and_alphabet(method: Method, seed: int, golden: dict[str, list[str]]) -> None:
    augmentation = build(method)
    alphabet = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_ ")
    for document, after in zip(documents(augmentation), changed(augmentation, seed), strict=True):
        if not after:
            continue
        check_promises(augmentation, document.text, after)
        assert 0.5 < len(after) / len(document.text) < 1.5 or augmentation.name == "comment_dropping"
        assert set(after) <= set(document.text) | alphabet
        if "code" not in augmentation.kinds:
            assert not re.search(r"  | [,.;:!?]|,,", after), after
            for kept in re.findall(r"https?://\S+|\S+@\S+\.\w+|`[^`]+`", document.text):
                assert kept in after


def test_words_of_a_text_leave_out_what_must_not_change() -> None:
    text = "Don't e-mail bob@example.org or run `rm -rf`; see https://a.org/b, e.g. v2.0, src/main_file.py."
    assert [word.text for word in find_words(text)] == ["Don't", "e-mail", "or", "run", "see"]


def test_code_that_looks_at_its_names_or_is_not_python_stays() -> None:
    from modelwright.data.augment.identifier_renaming import rename_identifiers

    assert rename_identifiers("def f():\n    a = 1\n    return locals()\n", 1.0, Random(0)) is None
    assert rename_identifiers("int main() { return 0; }", 1.0, Random(0)) is None
    assert rename_identifiers("def f(a):\n    global b\n    b = a\n", 1.0, Random(0)) is None


def test_renaming_keeps_what_others_can_see() -> None:
    from modelwright.data.augment.identifier_renaming import rename_identifiers

    source = (
        "from os import path\n\ndef f(key, *rest, flag=None):\n    found = path.join(key, flag=key)\n"
        "    shown = 'found'\n    other = f'{shown}'\n"
        "    def inner(found_too=found):\n        return found + found_too\n"
        "    found.found = [found for key in rest]\n    return inner(found_too=other)\n"
    )
    after = rename_identifiers(source, 1.0, Random(0))
    assert after is not None
    assert renamed(ast.parse(source)) == renamed(ast.parse(after))
    for kept in (
        "from os import path",
        "def f(key, *rest, flag=None)",
        "'found'",
        "f'{shown}'",
        ".found =",
        "found_too=",
    ):
        assert kept in after
    assert "found = path" not in after
