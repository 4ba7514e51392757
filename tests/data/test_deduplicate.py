"""Duplicates of a whole corpus, against a twin that compares every document with every other one."""

import multiprocessing
import os
import random
import signal
from collections.abc import Iterable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from modelwright.core.artifacts import ArtifactError
from modelwright.core.progress import SilentProgress
from modelwright.data.clean import deduplicate
from modelwright.data.clean.clean import clean_documents
from modelwright.data.clean.config import CleanConfig, build_steps
from modelwright.data.clean.features import split_words
from modelwright.data.clean.fingerprints import (
    NO_NUMBER,
    NUM_BANDS,
    SHINGLE_WORDS,
    BandFiles,
    DuplicatesConfig,
    fingerprints,
    jaccard,
    shingles,
)
from modelwright.data.clean.folder import read_dropped, read_kept
from modelwright.data.clean.steps import duplicates as duplicates_step
from modelwright.data.clean.steps.duplicates import DuplicateIndex
from modelwright.data.clean.steps.privacy import PrivacyConfig
from modelwright.data.clean.steps.quality import QualityConfig
from modelwright.data.document import Document
from modelwright.data.workers import InProcess, LocalProcesses, ShardEngine
from watched_engine import WatchedEngine

WORDS = [
    f"{first}{second}" for first in ("ba", "ko", "lu", "mi", "ne") for second in ("dra", "fin", "gos", "tul", "vex")
]


def document(text: str, number: int = 0, **changes) -> Document:
    values = {"id": f"d{number}", "kind": "prose", "split": "train", "source": "test"} | changes
    return Document(text=text, **values)


def sentence(rng: random.Random, length: int) -> list[str]:
    return [rng.choice(WORDS) + str(rng.randrange(50)) for _ in range(length)]


def changed(rng: random.Random, words: list[str], share: float) -> list[str]:
    """The words with a share of them replaced, one after another in one place."""
    count = int(share * len(words))
    at = rng.randrange(len(words) - count + 1)
    return [*words[:at], *sentence(rng, count), *words[at + count :]]


def clean(
    folder: Path, documents: Iterable[Document], *, key: str = "", engine: ShardEngine | None = None, **settings
) -> tuple[list[str], dict[str, tuple[str, str]]]:
    config = CleanConfig(
        duplicates=DuplicatesConfig(**settings),
        quality=QualityConfig(
            limits={
                "min_num_chars": 0,
                "min_stop_word_fraction": 0,
                "max_sorted_fraction": 1,
                "max_cut_end_fraction": 1,
                "max_broken_word_fraction": 1,
            }
        ),
        privacy=PrivacyConfig(replace=()),
    )
    clean_documents(
        iter(documents), build_steps(config), folder, SilentProgress(), key=key, engine=engine or InProcess(),
        shard_documents=37,
    )  # fmt: skip
    dropped = {entry.document.id: (entry.reason, entry.detail) for entry in read_dropped(folder)}
    return [entry.id for entry in read_kept(folder)], dropped


def similarity(first: str, second: str) -> float:
    """Jaccard similarity of word 5-grams, by their definition."""
    sets = []
    for text in (first, second):
        words = split_words(text)
        sets.append({tuple(words[i : i + SHINGLE_WORDS]) for i in range(len(words) - SHINGLE_WORDS + 1)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def test_hashes_give_the_similarity_of_words() -> None:
    rng = random.Random(0)
    for share in (0.0, 0.02, 0.1, 0.5):
        words = sentence(rng, 200)
        first, second = " ".join(words), " ".join(changed(rng, words, share))
        found = jaccard(np.unique(shingles(first)), np.unique(shingles(second)))
        assert found == pytest.approx(similarity(first, second), abs=1e-6)
    assert len(shingles("only four words here")) == 0
    assert len(shingles("深度学习模型")) == 2  # characters count as words
    assert len(shingles("A b, c! D e")) == len(shingles("a B c d E")) == 1
    np.testing.assert_array_equal(shingles("A b, c! D e"), shingles("a B c d E"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_near_duplicates_against_the_comparison_of_all_pairs(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    texts: list[str] = []
    for _ in range(60):
        words = sentence(rng, rng.randrange(100, 300))
        texts.append(" ".join(words))
        for share in (0.005, 0.02, 0.04, 0.2):
            if rng.random() < 0.7:
                texts.append(" ".join(changed(rng, words, share)))
    rng.shuffle(texts)
    kept, dropped = clean(tmp_path, [document(text, i) for i, text in enumerate(texts)], contained="off")
    by_id = {f"d{i}": text for i, text in enumerate(texts)}
    for first in kept:
        for second in kept:
            assert first == second or similarity(by_id[first], by_id[second]) < 0.85
    assert len(dropped) > 30
    for name, (reason, detail) in dropped.items():
        other = detail.rpartition(" ")[2]
        assert other in kept
        assert reason in ("near-duplicate", "duplicate")
        assert reason == "duplicate" or similarity(by_id[name], by_id[other]) >= 0.85
        assert reason == "duplicate" or f"{similarity(by_id[name], by_id[other]):.2f}" in detail


def test_the_best_of_a_cluster_stays(tmp_path: Path) -> None:
    rng = random.Random(5)
    words = sentence(rng, 200)
    noisy = [*words[:190], *["#$%&" * 10] * 10]
    longer = [*words, "and", "some", "words", "more"]
    kept, dropped = clean(tmp_path, [document(" ".join(one), i) for i, one in enumerate((noisy, words, longer))])
    assert kept == ["d2"]
    assert set(dropped) == {"d0", "d1"}
    heldout = [document(" ".join(words), 0), document(" ".join(changed(rng, words, 0.02)), 1, split="heldout")]
    kept, dropped = clean(tmp_path / "heldout", [*heldout, document("Something else to train on.", 2)])
    assert kept == ["d1", "d2"], "a near-duplicate of a held-out document is not trained on"


def test_a_text_inside_another_one(tmp_path: Path) -> None:
    rng = random.Random(6)
    words = sentence(rng, 300)
    documents = [
        document(" ".join(words), 0),
        document(" ".join(words[40:140]), 1),
        document(" ".join(words[100:110]), 2),
        document(" ".join(words[150:250]), 3, kind="code"),
        document(" ".join(words[:140]) + " with another end", 4),
        document(" ".join(words[20:60]), 5, split="heldout"),
    ]
    kept, dropped = clean(tmp_path / "all", documents)
    assert kept == ["d0", "d2", "d3", "d4"], "short texts and other kinds stay"
    assert dropped == {"d1": ("inside another text", "d0"), "d5": ("inside a training text", "d0")}
    assert clean(tmp_path / "heldout", documents, contained="heldout")[0] == ["d0", "d1", "d2", "d3", "d4"]
    assert clean(tmp_path / "off", documents, contained="off")[0] == [f"d{i}" for i in range(6)]


def test_many_texts_with_one_beginning(tmp_path: Path) -> None:
    """A license at the top of every file makes every document a candidate for every other one."""
    rng = random.Random(7)
    license = " ".join(sentence(rng, 60))
    documents = [document(f"{license} {' '.join(sentence(rng, 40))}", i) for i in range(300)]
    documents += [document(license, 300)]
    kept, dropped = clean(tmp_path, documents)
    assert kept == [f"d{i}" for i in range(300)]
    assert dropped["d300"][0] == "inside another text"
    assert list(dropped) == ["d300"]


def test_documents_of_earlier_runs(tmp_path: Path) -> None:
    rng = random.Random(8)
    first, second = sentence(rng, 200), sentence(rng, 200)
    index = str(tmp_path / "index")
    monday = [document(" ".join(first), 0), document(" ".join(sentence(rng, 100)), 1)]
    tuesday = [document(" ".join(changed(rng, first, 0.02)), 2), document(" ".join(second), 3), monday[1]]
    assert clean(tmp_path / "a", monday, key="monday", index=index)[0] == ["d0", "d1"]
    kept, dropped = clean(tmp_path / "b", tuesday, key="tuesday", index=index)
    assert kept == ["d3"]
    assert dropped["d1"] == ("duplicate", "a document of an earlier run")
    reason, detail = dropped["d2"]
    assert reason == "near-duplicate"
    assert detail.endswith("with a document of an earlier run")
    assert clean(tmp_path / "c", monday, key="monday", index=index)[0] == ["d0", "d1"], "a run repeated is not its own"
    again = [document(" ".join(second), 9), document("A text that nobody has ever seen before, really.", 10)]
    assert clean(tmp_path / "d", again, key="wednesday", index=index)[0] == ["d10"]
    (damaged, *_) = sorted((tmp_path / "index").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(ArtifactError, match="is damaged"):
        clean(tmp_path / "e", again, key="thursday", index=index)


def write_index_and_die(folder: str, moment: int) -> None:
    """Cleans into an index, and is killed before a certain array of it is written, or at the end before it counts."""
    tensors = duplicates_step._tensors

    def dying(*arguments: Any) -> Iterator[Any]:
        for number, values in enumerate(tensors(*arguments)):
            if number == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            yield values
        if moment < 0:
            Path.replace = lambda path, target: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]

    duplicates_step._tensors = dying  # type: ignore[assignment]
    clean(Path(folder) / "out", corpus_of_a_day(2), key="monday", index=str(Path(folder) / "index"))


def corpus_of_a_day(seed: int) -> list[Document]:
    rng = random.Random(seed)
    return [document(" ".join(sentence(rng, 60)), number) for number in range(30)]


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0, 3, 60, -1])
def test_an_index_is_whole_though_its_writer_was_killed(tmp_path: Path, moment: int) -> None:
    index = str(tmp_path / "index")
    clean(tmp_path / "before", corpus_of_a_day(1), key="monday", index=index)
    (file,) = (tmp_path / "index").glob("*.safetensors")
    before = file.read_bytes()
    process = multiprocessing.get_context("spawn").Process(target=write_index_and_die, args=(str(tmp_path), moment))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert file.read_bytes() == before
    new = document(" ".join(sentence(random.Random(3), 60)), 99)
    assert clean(tmp_path / "again", [*corpus_of_a_day(1), new], key="tuesday", index=index)[0] == ["d99"]
    assert len(clean(tmp_path / "out", corpus_of_a_day(2), key="monday", index=index)[0]) == 30
    assert file.read_bytes() != before
    assert clean(tmp_path / "after", [*corpus_of_a_day(2), new], key="tuesday", index=index)[0] == ["d99"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_runs_after_another_against_the_comparison_of_all_pairs(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    origins = [sentence(rng, rng.randrange(60, 200)) for _ in range(40)]
    seen: list[str] = []
    num_dropped = 0
    for day in range(3):
        texts = [" ".join(changed(rng, words, rng.choice((0.0, 0.01, 0.03, 0.3)))) for words in origins]
        documents = [document(text, number) for number, text in enumerate(texts)]
        kept, dropped = clean(
            tmp_path / f"{day}", documents, key=f"day {day}", index=str(tmp_path / "index"), contained="off"
        )
        own = {entry.id: entry.text for entry in documents}
        for name in kept:
            others = [*seen, *(own[other] for other in kept if other != name)]
            assert all(similarity(own[name], other) < 0.85 for other in others)
        for name, (reason, detail) in dropped.items():
            assert detail.endswith("a document of an earlier run")
            assert max(similarity(own[name], other) for other in seen) >= 0.85
            assert reason in ("duplicate", "near-duplicate")
        seen += [own[name] for name in kept]
        num_dropped += len(dropped)
    assert num_dropped > 25


@pytest.mark.slow
def test_a_large_index_is_read_in_part(tmp_path: Path) -> None:
    """One document against 3,000: the fences and a few blocks are read."""
    rng = random.Random(3)
    old = [document(" ".join(sentence(rng, 200)), number) for number in range(3000)]
    folder = tmp_path / "index"
    clean(tmp_path / "a", old, key="monday", index=str(folder), contained="off")
    (path,) = folder.glob("*.safetensors")
    prints = fingerprints([old[1234], document(" ".join(sentence(rng, 200)))])
    bands = BandFiles(tmp_path)
    for band in range(NUM_BANDS):
        prints.bands[:, band].tofile(bands.path(band))
    index = DuplicateIndex(folder)
    (found,) = index.related(prints.own, bands, np.ones(2, np.bool_))
    assert found.own.tolist() == [prints.own[0]]
    np.testing.assert_array_equal(found.shingles, shingles(old[1234].text))
    assert found.lengths.tolist() == [len(found.shingles)]
    np.testing.assert_array_equal(found.bands[0], prints.bands[0])
    (file,) = index.files
    assert file.file.num_read < path.stat().st_size / 10
    loaded = load_file(path)  # any reader of safetensors can read it
    assert loaded["own"].shape == (3000,)
    assert loaded["bands"].shape == (3000, NUM_BANDS)
    assert (np.diff(loaded["band07_keys"].astype(object)) >= 0).all()


def test_the_document_named_instead_was_kept(tmp_path: Path) -> None:
    rng = random.Random(9)
    words = sentence(rng, 300)
    documents = [document(" ".join(words[at : 300 - at]), i) for i, at in enumerate((0, 20, 40, 60))]
    kept, dropped = clean(tmp_path, documents[::-1])
    assert kept == ["d0"]
    assert {detail.rpartition(" ")[2] for _, detail in dropped.values()} == {"d0"}


@pytest.mark.parametrize("seed", range(3))
def test_every_dropped_document_has_a_partner_among_the_kept(tmp_path: Path, seed: int) -> None:
    """A part of a text that was dropped as a near-duplicate is not a part of the text that was kept instead."""
    rng = random.Random(seed)
    documents: list[Document] = []
    for group in range(20):
        words = sentence(rng, 300)
        other = [*words[:40], *sentence(rng, 14), *words[54:], *sentence(rng, 5)]
        inner = words[20:80] if group % 2 else words[30:230]
        texts = [words, other, inner, inner[5:45]]
        documents += [document(" ".join(text), 4 * group + place) for place, text in enumerate(texts)]
    text_of = {entry.id: entry.text for entry in documents}
    kept, dropped = clean(tmp_path, documents)
    for name, (reason, detail) in dropped.items():
        partner = detail.split()[-1]
        assert partner in kept
        if reason == "near-duplicate":
            assert similarity(text_of[name], text_of[partner]) >= 0.85
        else:
            assert text_of[name] in text_of[partner]
    assert sum(reason == "near-duplicate" for reason, _ in dropped.values()) >= 20
    assert {f"d{4 * group + 2}" for group in range(20)} & set(kept), "parts that are in no kept text stay"


def test_a_heldout_text_that_is_dropped_itself_costs_no_training_text(tmp_path: Path) -> None:
    rng = random.Random(8)
    answers = [" ".join(sentence(rng, 40)) for _ in range(2)]
    longer = " ".join([*sentence(rng, 50), answers[0], *sentence(rng, 50)])

    def pair(answer: str, number: int, split: str) -> Document:
        asked = f"What about number {number}?"
        meta = {"question": asked, "answer": answer}
        return document(f"{asked}\n\n{answer}", number, kind="qa", split=split, meta=meta)

    heldout = [pair(answer, number, "heldout") for number, answer in enumerate(answers)]
    training = [pair(answer, number + 2, "train") for number, answer in enumerate(answers)]
    kept, dropped = clean(tmp_path / "with", [*heldout, *training, document(longer, 4)])
    assert dropped == {"d0": ("inside a training text", "d4"), "d3": ("in the held-out set", "d1")}
    assert kept == ["d1", "d2", "d4"], "d2 has the answer of d0, which is held out no more"
    kept, dropped = clean(tmp_path / "without", [*heldout, *training, document("Something else.", 5)])
    assert kept == ["d0", "d1", "d5"], "which it is where the longer text is missing"


@pytest.mark.parametrize(("pairs_by", "num_kept"), [("answer", 1), ("conversation", 3)])
def test_answers_that_many_questions_share(tmp_path: Path, pairs_by: str, num_kept: int) -> None:
    label = "The sentiment of this review is clearly positive."
    questions = ("Great.", "Lovely.", "Fine.", "Fine.")
    pairs = [
        document(f"{question}\n\n{label}", number, kind="qa", meta={"question": question, "answer": label})
        for number, question in enumerate(questions)
    ]
    kept, _ = clean(tmp_path, pairs, near=False, pairs_by=pairs_by)
    assert len(kept) == num_kept


def templated_pages(num_pages: int, num_copies: int) -> list[Document]:
    """Pages of one template, which are no duplicates of each other, and near-duplicates of some of them."""
    rng = random.Random(5)
    template = sentence(rng, 120)
    pages = [[*template[:60], *sentence(rng, 36), *template[60:]] for _ in range(num_pages)]
    copied = rng.sample(pages, num_copies)
    copies = [[*page[:93], *sentence(rng, 2), *page[95:]] for page in copied]
    texts = [" ".join(page) for page in (*pages, *copies)]
    assert 0.55 < similarity(texts[0], texts[1]) < 0.7
    assert all(similarity(" ".join(*copy), " ".join(page)) > 0.85 for *copy, page in zip(copies, copied, strict=True))
    return [document(text, number) for number, text in enumerate(texts)]


@pytest.mark.slow
def test_candidates_through_a_band_are_few_and_the_kept_set_is_that_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise pages of one template take quadratic time."""
    fills: list[int] = []
    add_all = deduplicate.NearDuplicates.add_all

    def watched(self: Any, members: Any) -> None:
        add_all(self, members)
        slots = [pair for _, places in self._groups for pair in zip(self._groups.slots, places, strict=True)]
        fills.append(max(band[place] & 0xFFFF for band, place in slots if place != NO_NUMBER))

    monkeypatch.setattr(deduplicate.NearDuplicates, "add_all", watched)
    pages = templated_pages(500, 60)
    results = {}
    for most in (10**9, 5):
        monkeypatch.setattr(deduplicate, "_MOST_PER_BAND", most)
        results[most] = clean(tmp_path / str(most), pages)[0]
    assert results[5] == results[10**9]
    assert len(results[5]) == 500
    assert fills[0] > 20, "pages of a template share bands"
    assert fills[-1] == 5


def test_groups_that_processes_make_drop_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(4)
    texts = [sentence(rng, 120) for _ in range(60)]
    texts += [changed(rng, words, 0.02) for words in texts[:40]]
    documents = [document(" ".join(words), number) for number, words in enumerate(texts)]
    alone, in_processes = WatchedEngine(InProcess()), WatchedEngine(LocalProcesses(2, start_after_s=0.0))
    expected = clean(tmp_path / "here", documents, engine=alone)
    assert sum(reason == "near-duplicate" for reason, _ in expected[1].values()) > 30
    assert "group_band" not in alone.processes, "for so few documents no engine is asked"
    monkeypatch.setattr(deduplicate, "_FEWEST_IN_WORKERS", 1)
    assert clean(tmp_path / "two", documents, engine=in_processes) == expected
    assert len(in_processes.processes["group_band"]) == NUM_BANDS
    assert os.getpid() not in in_processes.processes["group_band"]


def write_index_slowly(folder: str, started: Event, other: Event) -> None:
    """Cleans into an index, and waits for another process while it writes."""
    tensors = duplicates_step._tensors

    def slow(*arguments: Any) -> Iterator[Any]:
        for number, values in enumerate(tensors(*arguments)):
            if number == 3:
                started.set()
                other.wait(timeout=1.0)
            yield values

    duplicates_step._tensors = slow  # type: ignore[assignment]
    clean(Path(folder) / "slow", corpus_of_a_day(1), key="monday", index=str(Path(folder) / "index"))


def test_one_run_in_two_folders_at_once_leaves_a_whole_index(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    started, other = context.Event(), context.Event()
    process = context.Process(target=write_index_slowly, args=(str(tmp_path), started, other))
    process.start()
    assert started.wait(timeout=60)
    index = str(tmp_path / "index")
    clean(tmp_path / "fast", corpus_of_a_day(1), key="monday", index=index)
    other.set()
    process.join()
    assert process.exitcode == 0
    assert [path.suffix for path in (tmp_path / "index").iterdir()] == [".safetensors"]
    assert clean(tmp_path / "after", [*corpus_of_a_day(1), document("Quite new.", 99)], key="tuesday", index=index)[
        0
    ] == ["d99"]
