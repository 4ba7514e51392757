"""Twenty examples of each method, in a file that people have read; and what the methods promise.

Where a method has a model, the answers of the model are written down (`golden/augment_answers.yaml`) and come in where
the model would: over HTTP, from a language model, from a masked model. `MODELWRIGHT_WRITE_GOLDEN=1` writes the file
anew, and the part of WordNet that it needs where the machine has WordNet; read the difference.
"""

import ast
import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random

import pytest
import yaml

import augment_texts
import wordnet_subset
from augment_promises import ANSWERS, check_promises, renamed
from modelwright.core.config import derive_seed
from modelwright.data.augment import masked_replacement, related_words
from modelwright.data.augment.augmentation import Augmentation, find_words
from modelwright.data.augment.back_translation import EndpointConfig
from modelwright.data.augment.methods import AUGMENTATIONS, Method
from modelwright.data.augment.related_words import DEFAULT_FOLDER
from modelwright.data.document import Document
from recorded_models import RecordedFills, RecordedWriter, serve_translations, translations

FOLDER = Path(__file__).parent
GOLDEN, WORDNET = FOLDER / "golden" / "augment_examples.yaml", FOLDER / "wordnet"
METHODS = {method.name: method for method in AUGMENTATIONS}
FRACTIONS = {
    "identifier_renaming": 0.7, "comment_dropping": 0.7, "back_translation": 0.5, "span_infilling": 0.05,
    "masked_replacement": 0.17,
}  # fmt: skip
NUM_EXAMPLES = 20
LINE_CHARS = 60
WRITE = bool(os.environ.get("MODELWRIGHT_WRITE_GOLDEN"))


def build(method: Method, **settings: object) -> Augmentation:
    if hasattr(method.config, "fraction"):
        settings["fraction"] = FRACTIONS.get(method.name, 0.15)
    if hasattr(method.config, "wordnet"):
        settings["wordnet"] = WORDNET
    if hasattr(method.config, "model"):
        settings["model"] = Path("recorded")
    return method.build(method.config(**settings), lambda folder: RecordedWriter(ANSWERS["span_infilling"]))


@pytest.fixture(scope="module")
def augmentations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Augmentation]]:
    """All methods by name, those with a model on recorded answers."""
    with (
        pytest.MonkeyPatch.context() as patch,
        serve_translations(translations(ANSWERS["back_translation"])) as endpoint,
    ):
        patch.setattr(masked_replacement, "MaskedModel", lambda folder: RecordedFills(ANSWERS["masked_replacement"]))
        settings = {
            "back_translation": {
                "endpoint": EndpointConfig(url=endpoint.url, model="m"),
                "cache": tmp_path_factory.mktemp("translations"),
            }
        }
        yield {name: build(method, **settings.get(name, {})) for name, method in METHODS.items()}


def documents(augmentation: Augmentation, *, in_lines: bool = False) -> list[Document]:
    """The texts of the golden file. in_lines: prose in lines of a width."""
    kind = "code" if "code" in augmentation.kinds else "prose"
    texts = augment_texts.CODE if kind == "code" else augment_texts.PROSE
    if in_lines and kind == "prose":
        texts = [textwrap.fill(text, LINE_CHARS, break_long_words=False, break_on_hyphens=False) for text in texts]
    return [Document(id=str(n), text=text, kind=kind, split="train", source="test") for n, text in enumerate(texts)]


def changed(augmentation: Augmentation, seed: int = 0, *, in_lines: bool = False) -> list[str]:
    given = documents(augmentation, in_lines=in_lines)
    rngs = [Random(derive_seed(seed, augmentation.name, document.id)) for document in given]
    return [copy.text if copy else "" for copy in augmentation.change(given, rngs)]


def write_wordnet(monkeypatch: pytest.MonkeyPatch) -> None:
    wordnet = wordnet_subset.RecordingWordNet(DEFAULT_FOLDER)
    for method in AUGMENTATIONS:
        if hasattr(method.config, "wordnet"):
            with monkeypatch.context() as patch:
                patch.setattr(related_words, "open_wordnet", lambda folder: wordnet)
                recording = build(method)
            for seed in range(3):
                changed(recording, seed)
                changed(recording, seed, in_lines=True)
    wordnet_subset.write_subset(wordnet, WORDNET)
    related_words.open_wordnet.cache_clear()


@pytest.fixture(scope="module")
def golden(augmentations: Mapping[str, Augmentation]) -> dict[str, list[str]]:
    if WRITE:
        if DEFAULT_FOLDER.is_dir():
            with pytest.MonkeyPatch.context() as monkeypatch:
                write_wordnet(monkeypatch)
        examples = {name: changed(augmentation) for name, augmentation in augmentations.items()}
        GOLDEN.write_text(yaml.safe_dump(examples, sort_keys=False, allow_unicode=True, width=110), encoding="utf-8")
    return yaml.safe_load(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_examples(name: str, augmentations: Mapping[str, Augmentation], golden: dict[str, list[str]]) -> None:
    texts = changed(augmentations[name])
    assert len(texts) == NUM_EXAMPLES
    assert all(texts), "each example changes"
    assert texts == golden[name], "run with MODELWRIGHT_WRITE_GOLDEN=1 and read the difference"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", METHODS)
def test_promises_length_and_alphabet(name: str, seed: int, augmentations: Mapping[str, Augmentation]) -> None:
    """On texts of several lines, letter by letter."""
    augmentation = augmentations[name]
    keeps, num_changed = augmentation.keeps, 0
    for document, after in zip(
        documents(augmentation, in_lines=True), changed(augmentation, seed, in_lines=True), strict=True
    ):
        before = document.text
        if not after:
            continue
        num_changed += 1
        check_promises(name, before, after)
        if "word_count" in keeps:
            assert len(before.split()) == len(after.split())
        if "lines" in keeps:
            assert before.count("\n") == after.count("\n")
        if "code" not in augmentation.kinds:
            assert not re.search(r"  | [,.;:!?]|,,", after), after
            for kept in re.findall(r"https?://\S+|\S+@\S+\.\w+|`[^`]+`", before):
                assert kept in after
    assert num_changed >= NUM_EXAMPLES * 0.75


@pytest.mark.parametrize("name", METHODS)
def test_the_promises_find_a_strange_letter_and_a_lost_word(
    name: str, augmentations: Mapping[str, Augmentation], golden: dict[str, list[str]]
) -> None:
    rng = Random(0)
    for document, after in zip(documents(augmentations[name]), golden[name], strict=True):
        check_promises(name, document.text, after)
        word = rng.choice(find_words(after))
        with pytest.raises((AssertionError, SyntaxError)):
            check_promises(name, document.text, f"{after[: word.start]}ß{after[word.start + 1 :]}")
        if name != "random_deletion":
            with pytest.raises((AssertionError, SyntaxError)):
                check_promises(name, document.text, after[: word.start] + after[word.end :])


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
