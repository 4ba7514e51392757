"""Which documents are augmented: deterministic whatever the batch, never held-out ones; methods from outside join."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

import augment_texts
from added_package import add_package
from modelwright.core.config import DataError
from modelwright.data.augment.augmentation import repair_articles
from modelwright.data.augment.augmenter import Augmenter
from modelwright.data.augment.keyboard_typos import KeyboardTyposConfig, keyboard_typos, neighbors
from modelwright.data.augment.methods import AUGMENTATIONS, build_methods
from modelwright.data.augment.random_deletion import RandomDeletionConfig, random_deletion
from modelwright.data.augment.sentence_shuffle import shuffle_sentences
from modelwright.data.augment.synonym_replacement import SynonymReplacementConfig, synonym_replacement
from modelwright.data.document import Document
from modelwright.pipeline.stage import AugmentationConfig
from refusals import config_error

METHODS = [keyboard_typos(KeyboardTyposConfig(fraction=0.2)), random_deletion(RandomDeletionConfig(fraction=0.2))]


def no_language_model(folder: Path) -> Any:
    raise AssertionError(f"{folder}: no method here needs a language model")


def document(number: int, **changes: Any) -> Document:
    text = augment_texts.PROSE[number % len(augment_texts.PROSE)]
    fields: dict[str, Any] = {"id": f"a:{number}", "text": text, "kind": "prose", "split": "train", "source": "a"}
    return Document(**{**fields, **changes})


DOCUMENTS = [document(number) for number in range(40)]


@pytest.mark.slow
def test_a_copy_depends_on_seed_epoch_and_document_alone() -> None:
    together = Augmenter(METHODS, seed=1)(DOCUMENTS, epoch=2, strength=0.7)
    backwards = [Augmenter(METHODS, seed=1)([one], epoch=2, strength=0.7)[0] for one in reversed(DOCUMENTS)]
    assert together == backwards[::-1]
    assert Augmenter(METHODS, seed=1)(DOCUMENTS, epoch=3, strength=0.7) != together
    assert Augmenter(METHODS, seed=2)(DOCUMENTS, epoch=2, strength=0.7) != together


def test_strength_is_the_probability_and_more_strength_keeps_what_less_had() -> None:
    many = [document(number, text="Some plain words stand here.") for number in range(1000)]
    augmenter = Augmenter(METHODS, seed=0)
    copies = {strength: augmenter(many, epoch=0, strength=strength) for strength in (0.0, 0.3, 0.6, 1.0)}
    shares = [sum(copy is not None for copy in found) / 1000 for found in copies.values()]
    assert shares == pytest.approx([0.0, 0.3, 0.6, 1.0], abs=0.05)
    assert all(b == a for a, b in zip(copies[0.3], copies[0.6], strict=True) if a is not None)
    assert augmenter.costs["keyboard_typos"].num_documents + augmenter.costs["random_deletion"].num_documents > 1800
    assert augmenter.costs["keyboard_typos"].documents_per_s > 0
    with config_error("strength"):
        augmenter(many, epoch=0, strength=1.5)


def test_a_copy_says_where_it_comes_from_and_held_out_documents_stay() -> None:
    heldout = document(1, split="heldout")
    copy, none, code = Augmenter(METHODS, seed=0)(
        [document(0, meta={"url": "x"}), heldout, document(2, kind="code")], epoch=4, strength=1.0
    )
    assert copy is not None
    assert copy.meta == {"url": "x", "augmented_from": "a:0", "augmentation": copy.id.split("~")[1]}
    assert copy.id.startswith("a:0~")
    assert copy.split == "train"
    assert none is None
    assert code is None, "no method for code was given"


def test_only_questions_of_a_conversation_change_and_a_title_stays() -> None:
    (method,) = METHODS[:1]
    turns = [
        {"role": "user", "content": "Where are the bigger boxes?"},
        {"role": "assistant", "content": "In the cellar."},
    ]
    talk = document(0, kind="qa", text="", meta={"messages": [*turns, *turns]})
    changed = method(talk, Random(0))
    assert changed is not None
    assert [turn["content"] for turn in changed.messages][1::2] == ["In the cellar."] * 2
    assert changed.messages[0]["content"] != turns[0]["content"]
    assert changed.text == "\n\n".join(turn["content"] for turn in changed.messages)
    titled = document(0, text="Great Expectations\n\nSome words follow here.", meta={"title": "Great Expectations"})
    after = method(titled, Random(0))
    assert after is not None
    assert after.text.startswith("Great Expectations\n\n")
    assert after.text != titled.text


SHOUTING = """
from dataclasses import dataclass
from modelwright.data.augment.augmentation import text_augmentation
from modelwright.data.augment.methods import Method

@dataclass(frozen=True)
class ShoutConfig:
    pass

SHOUT = Method("shout", ShoutConfig, lambda config, load: text_augmentation("shout", lambda text, rng: text.upper()))
"""


def test_a_method_of_an_installed_package_joins_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_package(tmp_path, monkeypatch, "shouting", SHOUTING, {"modelwright.augmentations": {"shout": "SHOUT"}})
    assert AugmentationConfig(methods=("shout",)).is_on
    methods = build_methods(["shout", "random_swap"], {}, no_language_model)
    copies = Augmenter(methods, seed=0)(DOCUMENTS, epoch=0, strength=1.0)
    assert any(copy and copy.meta["augmentation"] == "shout" and copy.text.isupper() for copy in copies)


def test_names_of_the_list_are_those_of_the_methods_and_wrong_ones_are_refused(tmp_path: Path) -> None:
    free = [m for m in AUGMENTATIONS if not {"model", "forward", "wordnet"} & {*m.config.__dataclass_fields__}]
    assert len(free) == 8
    assert [method.build(method.config(), no_language_model).name for method in free] == [m.name for m in free]
    with config_error("methods", match="did you mean 'random_swap'"):
        build_methods(["random_swop"], {}, no_language_model)
    with config_error("fraction"):
        KeyboardTyposConfig(fraction=0.0)
    with pytest.raises(DataError, match="apt install wordnet-base"):
        synonym_replacement(SynonymReplacementConfig(wordnet=tmp_path))
    with config_error("methods", match="is empty"):
        Augmenter([], seed=0)


def test_keys_touch_their_neighbors_on_each_layout() -> None:
    assert set(neighbors("qwerty")["g"]) == set("tyfhvb")
    assert "y" in neighbors("qwertz")["a"]
    assert "z" in neighbors("azerty")["a"]
    assert all(key in neighbors("jcuken")[other] for key in "йфя" for other in neighbors("jcuken")[key])


def test_articles_agree_only_where_english_changed() -> None:
    english = "It is a test of the rule that the word has in it."
    assert repair_articles(english.replace("a test", "a exam"), english) == english.replace("a test", "an exam")
    assert repair_articles(
        "An union is the test of a hour and it is in the x.", "An union is the test of it."
    ).startswith("An union is the test of an hour")
    french = "Il a une maison et elle a un chat."
    assert repair_articles(french, "") == french


def test_shuffling_leaves_lists_and_open_quotations_alone() -> None:
    listing = "- One is first. Two is second.\n- Three is third. Four is last."
    assert shuffle_sentences(listing, "en", Random(0)) == listing
    quoted = "He said: “This is one. And this is two.” Then he left."
    assert shuffle_sentences(quoted, "en", Random(0)) in (
        quoted,
        "Then he left. He said: “This is one. And this is two.”",
    )


@pytest.mark.parametrize("name", ["random_swap", "random_deletion", "sentence_shuffle", "keyboard_typos"])
def test_lone_surrogates_are_question_marks(name: str) -> None:
    text = "The quick brown fox \ud800 jumps over the lazy dog. It was a very nice day, and all is well again."
    (method,) = build_methods([name], {}, no_language_model)
    document = Document(id="1", text=text, kind="prose", split="train", source="s")
    copies = [copy for seed in range(9) if (copy := method(document, Random(seed)))]
    assert copies
    for copy in copies:
        copy.text.encode("utf-8")


def test_chinese_sentences_are_shuffled() -> None:
    sentences = ["今天天气很好。", "我们去公园吗？", "公园里有很多花！"]
    shuffled = shuffle_sentences("".join(sentences), "zh", Random(1))
    assert shuffled is not None
    assert shuffled != "".join(sentences)
    assert sorted(shuffled) == sorted("".join(sentences))
