"""Documents that repeat a passage of an evaluation set, against a twin that compares words."""

import json
import random
from pathlib import Path

import pytest

from modelwright.core.config import DataError
from modelwright.core.progress import SilentProgress
from modelwright.data.clean.clean import clean_documents
from modelwright.data.clean.config import CleanConfig, build_steps
from modelwright.data.clean.features import split_words
from modelwright.data.clean.folder import read_dropped
from modelwright.data.clean.steps.decontamination import PASSAGE_WORDS, DecontaminationConfig
from modelwright.data.document import Document
from modelwright.data.sources.sources import SourceConfig
from modelwright.pipeline.cleaning import fingerprint

RNG = random.Random(1)
WORDS = [f"{a}{b}" for a in ("ba", "ko", "lu", "mi") for b in ("dra", "fin", "gos", "tul", "vex")]


def words(count: int) -> list[str]:
    return [RNG.choice(WORDS) for _ in range(count)]


def passages(text: str) -> set[tuple[str, ...]]:
    own = split_words(text)
    return {tuple(own[start : start + PASSAGE_WORDS]) for start in range(len(own) - PASSAGE_WORDS + 1)}


def config(*sources: Path) -> CleanConfig:
    return CleanConfig(decontamination=DecontaminationConfig(sources=tuple(map(str, sources))))


def test_a_rejected_answer_counts_and_sets_may_have_any_field(tmp_path: Path) -> None:
    passage = " ".join(words(20))
    (tmp_path / "set.jsonl").write_text(json.dumps({"question": "Q", "answer": passage, "is_hard": True}))
    turns = [{"role": role, "content": " ".join(words(20))} for role in ("user", "assistant")]
    documents = [
        Document(
            id=f"d{n}", text=turns[1]["content"], kind="qa", split="train", source="s",
            meta={"messages": turns, "rejected": [{"role": "assistant", "content": text}], "prompt_turns": 1},
        )
        for n, text in enumerate((passage, " ".join(words(20))))
    ]  # fmt: skip
    step = build_steps(config(tmp_path / "set.jsonl"))[1]
    clean_documents(iter(documents), [step], tmp_path / "out", SilentProgress())
    assert [entry.document.id for entry in read_dropped(tmp_path / "out")] == ["d0"]


def test_the_documents_that_share_a_passage_are_dropped(tmp_path: Path) -> None:
    questions = [" ".join(words(length)) for length in (40, 13, 30, 12, 20)]
    sets = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    sets[0].write_text("\n".join(json.dumps({"text": text}) for text in questions[:3]))
    sets[1].write_text("\n".join(json.dumps({"text": text}) for text in questions[3:]))
    texts = [" ".join(words(60)) for _ in range(30)]
    for number in range(0, 30, 3):  # pieces of 11 to 15 words of a question, in other letters
        piece = questions[number % 5].split()[: 11 + number % 5]
        texts[number] += "... " + ", ".join(piece).upper() + " " + " ".join(words(9))
    documents = [
        Document(id=f"d{n}", text=text, kind="prose", split="train", source="s") for n, text in enumerate(texts)
    ]
    step = build_steps(config(*sets))[1]
    report, _ = clean_documents(iter(documents), [step], tmp_path / "out", SilentProgress(), shard_documents=7)
    known = [passages(question) for question in questions]
    expected = {d.id for d in documents if any(passages(d.text) & own for own in known)}
    dropped = {entry.document.id: entry for entry in read_dropped(tmp_path / "out")}
    assert set(dropped) == expected
    assert 2 <= len(expected) < 10
    assert all(entry.detail.startswith(f"13 words of {tmp_path}") for entry in dropped.values())
    corpus = set().union(*(passages(text) for text in texts))
    for path, numbers in zip(sets, ((0, 1, 2), (3, 4)), strict=True):
        of_set = set().union(*(known[number] for number in numbers))
        figures = report.figures["decontamination"][str(path)]
        assert figures["documents"] == len(numbers)
        assert figures["found"] == round(sum(bool(known[n] & corpus) for n in numbers) / len(numbers), 4)
        assert figures["passages_found"] == round(len(of_set & corpus) / len(of_set), 4)


def test_an_evaluation_set_that_changes_is_another_input(tmp_path: Path) -> None:
    source, questions = tmp_path / "a.txt", tmp_path / "questions.txt"
    for path in (source, questions):
        path.write_text("some text")
    data = SourceConfig(sources=(str(source),))
    before = fingerprint(data, config(questions))
    questions.write_text("some other text")
    assert fingerprint(data, config(questions)) != before
    with pytest.raises(DataError, match=r"nowhere: no such file"):
        fingerprint(data, config(tmp_path / "nowhere"))
