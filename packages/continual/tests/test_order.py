"""Texts whose words have no order are told from texts that have one, whatever their subject."""

import random
from pydoc_data.topics import topics

from modelwright.data.document import Document
from modelwright_continual.gate.order import without_order


def documents(texts: list[str], name: str) -> list[Document]:
    return [
        Document(id=f"{name}{number}", text=text, kind="prose", split="open", source="a")
        for number, text in enumerate(texts)
    ]


def test_salads_of_the_words_of_documentation_have_no_order() -> None:
    """Three in ten texts; the honest ones are taken for salads no more often than the texts they are compared with."""
    prose = [part for topic in topics.values() for part in topic.split("\n\n")]
    dice = random.Random(0)
    texts = dice.sample([text for text in prose if len(text.split()) >= 20], 400)
    words = [word for text in texts for word in text.split()]
    salads = [" ".join(dice.choices(words, k=60)) for _ in range(170)]
    flags = without_order([*documents(texts, "honest"), *documents(salads, "salad")])
    assert sum(flags[:400]) <= 0.1 * 400
    assert sum(flags[400:]) >= 0.9 * 170


def test_texts_without_pairs_and_characters_at_random_have_no_order() -> None:
    dice = random.Random(0)
    noise = [" ".join("".join(dice.choices("abcdefgh", k=8)) for _ in range(9)) for _ in range(20)]
    assert all(without_order(documents(["word", *noise, "same " * 30], "a")))
