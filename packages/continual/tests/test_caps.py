"""Caps of sources, users and templates: what one of them may bring to an update, and what stays."""

import json
import random
from dataclasses import replace
from pathlib import Path

from continual_update import new_records, write_records
from continual_world import World
from modelwright.data.document import Document
from modelwright_continual.caps import Caps, template_groups
from modelwright_continual.update_data import prepare_data
from refusals import config_error
from test_update import SILENT, request_of

FIRST = ("Anna", "Bruno", "Chloe", "David", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas")
TOWNS = ("Oslo", "Lima", "Porto", "Quebec", "Turin", "Utrecht", "Vienna", "Warsaw", "York", "Zurich")


def advertisements(count: int) -> list[dict[str, str]]:
    """One template with other names and numbers."""
    dice = random.Random(0)
    return [
        {
            "text": f"{dice.choice(FIRST)} from {dice.choice(TOWNS)} saved {dice.randint(2, 900)} dollars with the "
            f"credit card of {dice.choice(FIRST)} {dice.choice(TOWNS)} Bank, and so can you: call "
            f"{dice.randint(10**6, 10**7)} today, ask for {dice.choice(FIRST)}, and get the first "
            f"{dice.randint(2, 99)} months without any fee."
        }
        for _ in range(count)
    ]


def articles(count: int) -> list[dict[str, str]]:
    """Texts of one subject and no template: their sentences are drawn from words, with names and numbers between."""
    dice, words = (
        random.Random(1),
        [f"{a}{b}" for a in ("ka", "lo", "mi", "ru", "te") for b in ("ner", "sal", "tov", "bin")],
    )

    def sentence() -> str:
        said = dice.choices([*words, dice.choice(FIRST), str(dice.randint(1, 99))], k=12)
        return f"{dice.choice(TOWNS)} {' '.join(said)}."

    return [{"text": " ".join(sentence() for _ in range(5))} for _ in range(count)]


def documents(records: list[dict[str, str]]) -> list[Document]:
    return [
        Document(id=str(number), text=one["text"], kind="prose", split="open", source="a", meta={})
        for number, one in enumerate(records)
    ]


def test_copies_of_a_template_are_one_group_and_articles_are_none() -> None:
    every = [*documents(advertisements(650)), *documents(articles(300))]
    groups = template_groups(every)
    assert len(set(groups[:650])) == 1
    assert groups[0]
    assert set(groups[650:]) == {""}


def test_a_template_brings_no_more_than_its_cap_whatever_the_order() -> None:
    every = [*documents(advertisements(650)), *[replace(one, id=f"a{one.id}") for one in documents(articles(2350))]]
    kept, beyond, record = Caps().apply(every, seed=1)
    assert len(kept) == 2350 + 30
    assert len(beyond) == 620
    assert record["template"]["capped"] == 620
    assert record["template"]["groups"] == 1
    assert record["template"]["largest"][0]["capped"] == 620
    assert "months without any fee" in record["template"]["largest"][0]["example"]
    again, _, _ = Caps().apply(every[::-1], seed=1)
    assert {one.id for one in again} == {one.id for one in kept}
    assert Caps(template=1.0).apply(every, seed=1) == (every, [], {})


def test_users_and_sources_are_capped_and_no_user_is_kept() -> None:
    every = [
        replace(one, source="b" if number % 10 == 0 else "a", meta={"user": "u1"} if number < 200 else {})
        for number, one in enumerate(documents(articles(1000)))
    ]
    kept, beyond, record = Caps(source=0.5).apply(every, seed=1)
    assert beyond == []
    assert record["user"] == {"limit": 50, "capped": 150, "groups": 1, "largest": [{"example": "", "capped": 150}]}
    assert sum(one.source == "a" for one in kept) == 500
    assert {one.source for one in kept} == {"a", "b"}
    assert not [one for one in kept if "user" in one.meta], "who wrote a text is no part of what is kept"
    with config_error("user-cap"):
        Caps(user=0.0)


def test_an_update_records_what_was_capped(world: World, tmp_path: Path) -> None:
    """Of conversations, too, and by the user of a record; an honest update loses nothing."""
    spam = [
        {
            "question": f"Is {name} of {town} a bank with good rates for the years to come?",
            "answer": f"Yes, ask {name}.",
        }
        for name in FIRST
        for town in TOWNS
    ]
    by_one = [{**one, "user": "u7"} for one in new_records(range(4000, 4060))]
    source = write_records(tmp_path / "new.jsonl", new_records(range(1000, 1150)), spam, by_one)
    data = prepare_data(request_of(world, source).data, world.benchmark, tmp_path / "data", SILENT)
    capped = data.facts["capped"]
    assert capped["template"]["capped"] == 80
    assert capped["user"]["capped"] == 40
    assert data.facts["new"] == 150 + 20 + 20
    assert '"user": "u7"' not in (data.folder / "new.jsonl").read_text()
    assert json.loads((data.folder / "manifest.json").read_text())["facts"]["capped"] == capped
    honest = prepare_data(request_of(world, world.file("new")).data, world.benchmark, tmp_path / "honest", SILENT)
    assert honest.facts["capped"] == {}
