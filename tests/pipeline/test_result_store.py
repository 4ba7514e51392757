"""Sources and results on stores: fsspec's store in memory, and a local S3-compatible server where moto is installed."""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import fsspec
import pytest

from cleaned import result_files
from modelwright.core.artifacts import StorageError
from modelwright.core.config import ConfigError
from modelwright.core.progress import SilentProgress
from modelwright.data.clean.config import CleanConfig
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from modelwright.pipeline.cleaning import clean_sources, explain_document

NOUNS = ("river", "house", "teacher", "garden", "letter", "market", "bridge", "window", "doctor", "village")


def sentences(seed: int) -> str:
    dice = Random(seed)
    parts = [[*dice.choices(NOUNS, k=3), dice.randrange(10_000)] for _ in range(8)]
    return " ".join(f"The {a} of the {b} was told about the {c} with number {number}." for a, b, c, number in parts)


def fill(url: str) -> None:
    filesystem, path = fsspec.core.url_to_fs(url)
    records = [{"id": f"r{number}", "text": sentences(number)} for number in range(20)]
    records[7] = records[3]
    filesystem.makedirs(path, exist_ok=True)
    filesystem.pipe_file(f"{path}/notes.jsonl", "\n".join(map(json.dumps, records)).encode())


def clean(source: str, out: str) -> list[str]:
    config = CleanConfig(num_workers=1)
    return clean_sources(SourceConfig(sources=(source,), validation_fraction=0), config, out, SilentProgress())


@pytest.fixture(params=["memory", "s3"])
def store(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of an empty place on a store."""
    if request.param == "memory":
        yield "memory://place"
        fsspec.filesystem("memory").rm("/place", recursive=True)
        return
    request.getfixturevalue("s3").mkdir("bucket")
    yield "s3://bucket/place"


def test_from_a_store_into_a_store(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fill(f"{store}/texts")
    lines = clean(f"{store}/texts", f"{store}/cleaned")
    clean(f"{store}/texts", f"file://{tmp_path}/here")
    filesystem, path = fsspec.core.url_to_fs(f"{store}/cleaned")
    for name in (*result_files(tmp_path / "here"), "quarantine.jsonl", "sources.json", "settings.json"):
        assert filesystem.cat_file(f"{path}/{name}") == (tmp_path / "here" / name).read_bytes()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["here"], "nothing stays in the current folder"
    assert f"kept {store}/cleaned/kept-*.jsonl.zst, dropped {store}/cleaned/dropped.jsonl.zst" in lines
    config = SourceConfig(sources=(f"{store}/cleaned",), validation_fraction=0)
    kept = list(read_documents(config, report=SourceReport()))
    assert len(kept) == 19
    assert kept[0].meta["id"] == "r0"
    described = explain_document(f"{store}/cleaned", f"{kept[0].id.rpartition(':')[0]}:8")
    assert "dropped by duplicates, duplicate" in described


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for out, problem in (
        ("gs://bucket/x", r"--out: gs://bucket/x needs a package: .*gcsfs"),
        ("nowhere://bucket/x", r"--out: nowhere://bucket/x is not a usable URL .*nowhere"),
        ("memory://", "names no folder"),
        ("memory://texts/inner", "lie in each other"),
    ):
        with pytest.raises(ConfigError, match=problem):
            clean("memory://texts", out)

    def refuse(*arguments: Any) -> None:
        raise RuntimeError("Unable to locate credentials")

    monkeypatch.setattr(fsspec.filesystem("memory"), "pipe_file", refuse)
    with pytest.raises(StorageError, match=r"memory://elsewhere: cannot be written .Unable to locate credentials"):
        clean("memory://texts", "memory://elsewhere")
    assert not list(tmp_path.iterdir())
