"""The corpus that is spoiled on purpose: labels say what was done, and figures of cleaning follow from them."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from judge_cleaning import lines
from modelwright.data.clean.config import CleanConfig
from modelwright.data.clean.features import split_words
from modelwright.data.clean.fingerprints import SHINGLE_WORDS, DuplicatesConfig
from modelwright.data.clean.steps.privacy import PrivacyConfig
from modelwright.data.clean.steps.quality import QualityConfig
from modelwright.data.document import Document
from modelwright_claims.cleaning_scores import (
    BROKEN,
    COPY,
    JUNK,
    PERSONAL,
    Label,
    clean_texts,
    judge_cleaning,
    read_spoiled,
    spoil,
    write,
)

SCRIPT = """
import sys
from pathlib import Path
from modelwright_claims.cleaning_scores import clean_texts, spoil, write
write(Path(sys.argv[1]), spoil(clean_texts(("stdlib",), 200), 0.8, 3))
"""
LENIENT = QualityConfig(
    limits={
        "min_stop_word_fraction": 0,
        "max_misordered_fraction": 1,
        "max_top_ngram_fraction": 1,
        "max_symbol_fraction": 1,
    }
)


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spoiled")
    write(folder, spoil(clean_texts(("stdlib",), 200), 0.8, 3))
    return folder


@pytest.fixture(scope="module")
def entries(spoiled: Path) -> list[tuple[Document, Label]]:
    return read_spoiled(spoiled)


def similarity(first: str, second: str) -> float:
    """Jaccard similarity of word 5-grams, by their definition."""
    sets = []
    for text in (first, second):
        words = split_words(text)
        sets.append({tuple(words[i : i + SHINGLE_WORDS]) for i in range(len(words) - SHINGLE_WORDS + 1)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


@pytest.mark.slow
def test_labels_say_what_was_done(entries: list[tuple[Document, Label]]) -> None:
    by_id = {document.id: document.text for document, _ in entries}
    forms = {label.form for _, label in entries}
    assert forms == {"", *JUNK, PERSONAL, BROKEN, COPY}
    for document, label in entries:
        assert document.id == label.id
        assert all(value in document.text for _, value in label.values)
        if label.form == BROKEN:
            assert document.text != label.right
        if label.form == COPY:
            assert label.similarity == pytest.approx(similarity(document.text, by_id[label.of]), abs=1e-6)
    levels = sorted(label.similarity for _, label in entries if label.form == COPY)
    assert levels[0] < 0.65
    assert levels[-1] > 0.97


@pytest.mark.slow
def test_another_process_spoils_in_the_same_way(spoiled: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], env=environment, check=True)
    for name in ("documents.jsonl", "labels.jsonl"):
        assert (tmp_path / name).read_bytes() == (spoiled / name).read_bytes()


def test_figures_follow_what_cleaning_does(entries: list[tuple[Document, Label]]) -> None:
    result = judge_cleaning(entries, CleanConfig(num_workers=1))
    for step, precision, recall in (("duplicates", 0.95, 0.9), ("privacy", 0.9, 0.9), ("format", 1, 0.7)):
        score = result.scores[step]
        assert (score.precision or 0) >= precision, step
        assert (score.recall or 0) >= recall, step
    assert result.forms["quality, noise", "keyword spam"].recall == 1
    assert result.after / result.kept > result.before / result.documents
    text = "\n".join(lines(result))
    score = result.scores["duplicates"]
    assert f"| duplicates | {score.precision:.1%} | {score.recall:.1%} |" in text
    blind = CleanConfig(
        num_workers=1,
        quality=LENIENT,
        duplicates=DuplicatesConfig(near=False, contained="off"),
        privacy=PrivacyConfig(replace=()),
    )
    nothing = judge_cleaning(entries, replace(blind, format=replace(blind.format, repair_encoding=False)))
    assert nothing.scores["privacy"].recall == 0
    assert (nothing.scores["duplicates"].recall or 0) < 0.2, "equal copies"
    assert nothing.scores["format"].recall == 0
    assert (nothing.scores["quality, noise"].recall or 0) < 0.1
    assert nothing.before == result.before
    assert nothing.after / nothing.kept < result.after / result.kept
