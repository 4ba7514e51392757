"""Decisions of cleaning that were recorded when all fingerprints and features were held in memory at once."""

import json
from pathlib import Path

import pytest

from mixed_corpora import digest, dropped

RECORDED = json.loads((Path(__file__).parent / "golden" / "dropped.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("thresholds", ["fixed", "auto"])
def test_decisions_about_a_corpus(tmp_path: Path, thresholds: str) -> None:
    drops = dropped(tmp_path, 1, thresholds=thresholds)
    recorded = RECORDED[f"1 {thresholds}"]
    assert len(drops) == recorded["dropped"]
    assert digest(drops) == recorded["digest"]


@pytest.mark.slow
def test_decisions_by_an_index_of_earlier_runs(tmp_path: Path) -> None:
    for day, (seed, after) in {"a": (4, 0), "b": (5, 4), "c": (6, 5)}.items():
        drops = dropped(tmp_path / day, seed, index=str(tmp_path / "index"), key=day, after=after)
        recorded = RECORDED[f"day {day}"]
        assert sum("of an earlier run" in detail for *_, detail in drops) == recorded["of earlier runs"]
        assert digest(drops) == recorded["digest"]
