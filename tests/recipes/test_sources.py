"""Sources in memory become the same lines, whatever object holds them."""

import json
import os
import tracemalloc
from collections import UserDict
from pathlib import Path

import pytest

import modelwright as mw
from modelwright.core.config import DataError
from modelwright.data.clean.folder import read_kept
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
    assert len(list(tmp_path.iterdir())) == 1


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


def test_records_that_are_there_keep_their_file(tmp_path: Path) -> None:
    """Its time tells the next stage that nothing has changed; a damaged one is written again."""
    (path,) = (Path(one) for one in read_sources(ROWS).place(tmp_path))
    os.utime(path, (1, 1))
    read_sources(ROWS).place(tmp_path)
    assert path.stat().st_mtime == 1
    path.write_bytes(path.read_bytes()[:-3] + b"x}\n")
    assert lines(ROWS, tmp_path) == ROWS


def test_records_are_copied_without_holding_them_in_memory(tmp_path: Path) -> None:
    given = read_sources({"text": "x" * 100_000} for _ in range(200))
    tracemalloc.start()
    try:
        given.place(tmp_path)
        given.place(tmp_path)  # compared with what is there
        assert tracemalloc.get_traced_memory()[1] < 5_000_000, "of 20 MB"
    finally:
        tracemalloc.stop()
        given.close()


TEXTS = [{"text": f"Line {n} of the records speaks of {n * 7} rivers and {n * 3} hills near {n}."} for n in range(30)]
LIMITS = {"clean.quality.limits": {}, "clean.duplicates.near": False, "clean.num_workers": 1}


@pytest.mark.parametrize("out", ["cleaned", "file://{}/cleaned"])
def test_records_of_a_result_wait_in_a_folder_of_its_own(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "mine.txt").write_text("not of this call")
    with pytest.raises(mw.ConfigError):
        mw.clean(TEXTS, out.format(tmp_path), **{"clean.no_such_setting": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["sources"], "a wrong setting leaves nothing"
    mw.clean(TEXTS, out.format(tmp_path), **LIMITS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cleaned", "sources"]
    assert len(list(read_kept(tmp_path / "cleaned"))) == len(TEXTS)
    assert [path.name for path in (tmp_path / "sources").iterdir()] == ["mine.txt"]


def test_records_wait_until_the_result_is_complete(tmp_path: Path) -> None:
    (tmp_path / "cleaned").write_text("is no folder")
    with pytest.raises(mw.ModelwrightError):
        mw.clean(TEXTS, tmp_path / "cleaned", **LIMITS)
    (waiting,) = (tmp_path / "cleaned.sources").iterdir()
    assert len(waiting.read_text().splitlines()) == len(TEXTS)


def test_a_result_on_a_store_keeps_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store `memory://` of fsspec stands in for S3: both are addresses of which no path may be made."""
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.chdir(tmp_path)
    lines_shown = mw.clean(TEXTS, "memory://bucket/cleaned", **LIMITS)
    assert lines_shown[-1].endswith("memory://bucket/cleaned")
    names = {path.rpartition("/")[2] for path in fsspec.filesystem("memory").find("/bucket/cleaned")}
    assert "report.json" in names
    assert list(tmp_path.iterdir()) == []
