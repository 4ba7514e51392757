"""Sources in memory become the same lines, whatever object holds them."""

import json
from collections import UserDict
from pathlib import Path

import pytest

from modelwright.core.errors import DataError
from modelwright.recipes.sources import read_sources

ROWS = [{"question": "1 + 1?", "answer": "2"}, {"question": "ä", "answer": "<b>"}]


def lines(given: object, folder: Path) -> list[dict]:
    (path,) = read_sources(given).place(folder)
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def test_records_of_any_container_are_the_same_file(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    given = [ROWS, tuple(ROWS), (row for row in ROWS), [UserDict(row) for row in ROWS], pandas.DataFrame(ROWS)]
    for one in given:
        assert lines(one, tmp_path) == ROWS
    assert len(list((tmp_path / "sources").iterdir())) == 1


def test_a_polars_frame_and_a_dataset_are_records(tmp_path: Path) -> None:
    polars, datasets = pytest.importorskip("polars"), pytest.importorskip("datasets")
    assert lines(polars.DataFrame(ROWS), tmp_path) == ROWS
    assert lines(datasets.Dataset.from_list(ROWS), tmp_path) == ROWS


def test_missing_values_of_a_pandas_frame_are_left_out(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    rows = [{"text": "a"}, {"text": "b", "n": 2}]
    assert lines(pandas.DataFrame(rows), tmp_path) == [{"text": "a"}, {"text": "b", "n": 2.0}]


def test_strings_of_a_list_are_paths_and_of_a_generator_texts(tmp_path: Path) -> None:
    assert read_sources(["a.txt", tmp_path]).paths == ["a.txt", str(tmp_path)]
    assert lines(iter(["one", "two"]), tmp_path) == [{"text": "one"}, {"text": "two"}]


@pytest.mark.parametrize("given", [3, b"text", {"text": "a"}, [1], iter(()), [{"a": object()}], [{"a": float("nan")}]])
def test_what_is_no_source_is_refused(given: object) -> None:
    with pytest.raises(DataError, match=r"^sources: "):
        read_sources(given)
