"""`modelwright clean --parquet`: what others read of the result, from a folder and from a store."""

import ast
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.parquet
import pytest

from modelwright.core.config import DataError
from modelwright.core.progress import SilentProgress
from modelwright.data.clean import parquet
from modelwright.data.clean.config import CleanConfig
from modelwright.data.clean.folder import kept_files, read_kept
from modelwright.data.clean.steps.quality import QualityConfig
from modelwright.data.document import Document
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from modelwright.pipeline.cleaning import clean_sources
from refusals import config_error

NOUNS = ("garden", "river", "engine", "letter", "teacher", "market", "window", "doctor", "village")
FIELDS = ("id", "text", "kind", "split", "source", "meta")


def write_records(path: Path) -> None:
    rng = random.Random(1)
    records: list[dict[str, Any]] = []
    for number in range(120):
        words = [(*rng.choices(NOUNS, k=3), rng.randrange(10_000)) for _ in range(8)]
        text = " ".join(f"The {a} of the {b} was told about the {c} with number {n}." for a, b, c, n in words)
        records.append({"id": f"r{number}", "text": text})
    records[5] |= {"url": "https://example.org/a", "score": 0.5, "language": "en"}
    records += [{"question": f"What is {n}?", "answer": f"{n} is {NOUNS[n % 9]} number {n * 7}."} for n in range(20)]
    path.write_text("\n".join(map(json.dumps, records)))


def clean(source: Path, out: str, **options: Any) -> list[str]:
    data = SourceConfig(sources=(str(source),), validation_fraction=0.2)
    return clean_sources(data, CleanConfig(num_workers=1), out, SilentProgress(), **options)


def columns(documents: Sequence[Document]) -> list[dict[str, Any]]:
    """The rows that documents should be."""
    return [{**vars(one), "meta": dict(one.meta)} for one in documents]


def rows(table: Any) -> list[dict[str, Any]]:
    return [{name: json.loads(row[name]) if name == "meta" else row[name] for name in FIELDS} for row in table]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "records.jsonl"
    write_records(path)
    return path


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> Any:
    library = pytest.importorskip("datasets")
    library.disable_progress_bars()
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", False)  # the harness keeps its process off the network
    return library


@pytest.mark.filterwarnings("ignore")  # those of datasets about others
def test_datasets_loads_the_folder(
    source: Path, tmp_path: Path, datasets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_FILE_CHARS", 10_000)
    monkeypatch.setattr(parquet, "_GROUP_DOCUMENTS", 10)
    out = tmp_path / "cleaned"
    lines = clean(source, str(out), parquet=True)
    assert f"as Parquet: {out}/data; in Python: datasets.load_dataset({str(out)!r})" in lines
    assert len(list((out / "data").glob("train-*.parquet"))) > 2
    loaded = datasets.load_dataset(str(out), cache_dir=str(tmp_path / "cache"))
    kept = list(read_kept(out))
    assert set(loaded) == {"train", "validation"}
    for name, split in {"train": "train", "validation": "heldout"}.items():
        assert rows(loaded[name]) == columns([one for one in kept if one.split == split])
    assert any("url" in one.meta for one in kept)
    assert any(one.kind == "qa" for one in kept)
    for split, files in kept_files(out).items():
        for kind, name in files.items():
            lines_of_json = datasets.load_dataset(
                "json", data_files=str(out / name), split="train", cache_dir=str(tmp_path / "cache")
            )
            assert lines_of_json["text"][:] == [one.text for one in kept if (one.split, one.kind) == (split, kind)]
    config = SourceConfig(sources=(str(out / "data"),), validation_fraction=0.0)
    again = {one.id: one for one in read_documents(config, report=SourceReport(), leave_open=True)}
    assert again == {one.id: one for one in kept}, "a run can train on the files"


def test_the_files_of_an_earlier_result_go(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "cleaned"
    clean(source, str(out), parquet=True)
    first = sorted(path.name for path in (out / "data").iterdir())
    assert first == ["train-00000-of-00001.parquet", "validation-00000-of-00001.parquet"]
    clean(source, str(out))
    assert not (out / "data").exists()
    (out / "data").mkdir()
    (out / "data" / "mine.txt").write_text("x")
    with config_error("parquet"):
        clean(source, str(out), parquet=True)
    assert (out / "data" / "mine.txt").exists()


def test_files_are_never_of_another_result(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "cleaned"
    clean(source, str(out))
    names = {path.name for path in out.iterdir()}
    clean(source, str(out), parquet=True)
    data = SourceConfig(sources=(str(source),), validation_fraction=0.2)
    all_dropped = CleanConfig(num_workers=1, quality=QualityConfig(limits={"min_num_chars": 100_000}))
    with pytest.raises(DataError, match="no training document is left"):
        clean_sources(data, all_dropped, str(out), SilentProgress())
    assert not (out / "data").exists()

    def interrupted(folder: Path) -> Iterator[Document]:
        yield from itertools.islice(read_kept(folder), 5)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(parquet, "read_kept", interrupted)
        with pytest.raises(KeyboardInterrupt):
            clean(source, str(out), parquet=True)
    assert not (out / "data").exists()
    clean(source, str(out))
    assert {path.name for path in out.iterdir()} == names, "nothing unfinished stays"


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["memory", "s3"])
def test_on_a_store(
    source: Path, tmp_path: Path, protocol: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if protocol == "s3":
        request.getfixturevalue("s3").mkdir("tables")
    url = f"{protocol}://tables/cleaned"
    clean(source, str(tmp_path / "here"), parquet=True)
    clean(source, url, parquet=True)
    filesystem, path = fsspec.core.url_to_fs(url)
    for name in ("train-00000-of-00001.parquet", "validation-00000-of-00001.parquet"):
        here = pyarrow.parquet.read_table(tmp_path / "here" / "data" / name)
        assert pyarrow.parquet.read_table(f"{path}/data/{name}", filesystem=filesystem) == here
    clean(source, url)
    filesystem.invalidate_cache()
    assert not filesystem.glob(f"{path}/data/*.parquet")
    assert not list(tmp_path.glob("*.work"))


@pytest.mark.filterwarnings("ignore")  # those of datasets and s3fs about others
def test_datasets_loads_from_a_store(
    source: Path, tmp_path: Path, datasets: Any, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    s3.mkdir("hub")
    (line,) = (line for line in clean(source, "s3://hub/cleaned", parquet=True) if "load_dataset" in line)
    files = ast.literal_eval(line.partition("data_files=")[2].removesuffix(")"))
    assert set(files) == {"train", "validation"}
    loaded = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded.num_rows > 50
    assert json.loads(loaded[0]["meta"])["id"].startswith("r")
