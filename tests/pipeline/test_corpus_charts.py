"""The charts of the text in the report, against counts of the documents themselves."""

import random
import re
from collections import Counter
from pathlib import Path

import pytest

from mistaken_text import SENTENCES
from modelwright.core.progress import SilentProgress
from modelwright.data.clean import clean as clean_module
from modelwright.data.clean.clean import clean_documents
from modelwright.data.clean.config import CleanConfig, build_steps
from modelwright.data.clean.folder import read_dropped, read_kept
from modelwright.data.clean.report import CleanReport
from modelwright.data.document import Document
from modelwright.pipeline.report.blocks import Chart
from modelwright.pipeline.report.page import corpus_charts

NOUNS = ("garden", "river", "engine", "letter", "teacher", "market", "window", "doctor", "village")


def documents() -> list[Document]:
    """English, Russian and German, with personal data and clusters of two and of four."""
    rng = random.Random(2)

    def english(length: int) -> str:
        parts = [(*rng.choices(NOUNS, k=3), rng.randrange(10_000)) for _ in range(length)]
        return " ".join(f"The {a} of the {b} was told about the {c} with number {n}." for a, b, c, n in parts)

    texts = [english(rng.randrange(4, 40)) for _ in range(90)]
    texts += [f"{texts[0].rpartition(' ')[0]} {word}." for word in ("nothing", "everything", "something")]
    texts += [f"{texts[1].rpartition(' ')[0]} nothing."]
    texts += [f"{english(5)} Write to someone{number}@example.org or someone@example.net." for number in range(7)]
    texts += [f"{' '.join(rng.sample(SENTENCES['ru'], 5))} {number}" for number in range(30)]
    texts += ["x" * 8, "buy now " * 90]
    return [
        Document(id=f"d{number}", text=text, kind="prose", split="train", source="test")
        for number, text in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cleaned")


@pytest.fixture(scope="module")
def report(folder: Path) -> CleanReport:
    steps = build_steps(CleanConfig())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clean_module, "_FEWEST_FOR_LANGUAGES", 1)
        return clean_documents(iter(documents()), steps, folder, SilentProgress(), shard_documents=40)[0]


def words_of(chart: Chart) -> list[str]:
    return [" ".join(text.split()) for text in re.findall(r"<text[^>]*>(.*?)</text>", chart.svg, flags=re.DOTALL)]


def test_figures_are_those_of_the_documents(report: CleanReport, folder: Path) -> None:
    kept, dropped = list(read_kept(folder)), [entry.document for entry in read_dropped(folder)]

    def lengths(of: list[Document]) -> dict[str, int]:
        return dict(Counter(str(max(2**n for n in range(30) if 2**n <= len(one.text))) for one in of))

    assert report.kept_lengths == lengths(kept)
    assert report.dropped_lengths == lengths(dropped)
    # the first, the 21st ... kept document of each of the four shards
    assert sum(report.languages.values()) >= len(kept) // 20
    assert set(report.languages) >= {"en", "ru"}
    assert report.figures["duplicates"]["cluster_sizes"] == {"2": 1, "4": 1}
    assert report.replaced["email"] == 14


def test_there_is_a_chart_of_each(report: CleanReport) -> None:
    charts = {block.title: block for block in corpus_charts(report.plain()) if isinstance(block, Chart)}
    assert list(charts) == [
        "Documents left after each step", "Documents by length in characters", "Languages",
        "Personal data replaced in kept documents", "Clusters of near-duplicates by size",
    ]  # fmt: skip
    names = words_of(charts["Documents by length in characters"])
    assert {"kept", "dropped", "256 to 511", "512 to 1,023", "8 to 15"} <= set(names)
    assert {"email", "14"} <= set(words_of(charts["Personal data replaced in kept documents"]))
    assert {"2", "4 to 7"} <= set(words_of(charts["Clusters of near-duplicates by size"]))
    assert "en" in words_of(charts["Languages"])


def test_a_report_without_figures_has_no_charts() -> None:
    assert corpus_charts({"num_documents": 3, "dropped": {}}) == []


def test_languages_are_sampled_though_kinds_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second document is code, the first one, too, so that the 20th, the 40th and so on are all code."""
    monkeypatch.setattr(clean_module, "_FEWEST_FOR_LANGUAGES", 1)
    rng = random.Random(3)
    mixed: list[Document] = []
    for number in range(60):
        words = " ".join(f"the {rng.choice(NOUNS)} of number {rng.randrange(10_000)}" for _ in range(20))
        code = "\n".join(f"value_{rng.randrange(10_000)} = {rng.randrange(10_000)}" for _ in range(8))
        mixed += [
            Document(id=f"c{number}", text=code, kind="code", split="train", source="test"),
            Document(id=f"p{number}", text=words, kind="prose", split="train", source="test"),
        ]
    report = clean_documents(iter(mixed), (), tmp_path, SilentProgress())[0]
    assert sum(report.languages.values()) == 3


def test_many_languages_and_large_clusters_share_bars() -> None:
    languages = {f"l{number}": 30 - number for number in range(20)}
    sizes = {str(size): 1 for size in range(2, 20)}
    clean = {
        "num_documents": 3, "dropped": {}, "languages": languages, "figures": {"duplicates": {"cluster_sizes": sizes}},
    }  # fmt: skip
    by_title = {block.title: block for block in corpus_charts(clean) if isinstance(block, Chart)}
    assert {"l0", "l11", "others", str(sum(range(11, 19)))} <= set(words_of(by_title["Languages"]))
    assert "l12" not in words_of(by_title["Languages"])
    names = words_of(by_title["Clusters of near-duplicates by size"])
    assert {"2", "3", "4 to 7", "8 to 15", "16 to 31"} <= set(names)
