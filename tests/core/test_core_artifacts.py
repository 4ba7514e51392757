"""Artifacts are whole or absent; damage is noticed; a full disk is one clear error."""

import errno
import json
import os
from pathlib import Path

import pytest

from modelwright.core.artifacts import (
    ArtifactError,
    StorageError,
    is_finished,
    parse_manifest,
    read_manifest,
    verify_if_artifact,
    write_artifact,
    write_atomic,
    writing,
)


def make(folder: Path, text: str = "content") -> None:
    with write_artifact(folder, kind="thing", digest="d", inputs={"parent": "p"}) as draft:
        (draft.path / "sub").mkdir()
        (draft.path / "sub" / "file.txt").write_text(text)
        draft.facts["rows"] = 3


def test_manifest_lists_everything(tmp_path: Path) -> None:
    make(tmp_path / "a")
    manifest = read_manifest(tmp_path / "a", kind="thing", verify=True)
    assert (manifest.digest, dict(manifest.inputs), manifest.facts["rows"]) == ("d", {"parent": "p"}, 3)
    assert list(manifest.files) == ["sub/file.txt"]


def test_content_digest_is_of_the_content_alone(tmp_path: Path) -> None:
    make(tmp_path / "a")
    make(tmp_path / "b")
    make(tmp_path / "c", "other")
    a, b, c = (read_manifest(tmp_path / name).content_digest for name in "abc")
    assert a == b != c


def test_a_failed_rewrite_keeps_the_old_one(tmp_path: Path) -> None:
    make(tmp_path / "a")

    def fail() -> None:
        with write_artifact(tmp_path / "a", kind="thing", digest="e") as draft:
            (draft.path / "half").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert read_manifest(tmp_path / "a").digest == "d"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest", "kind"])
def test_damage_is_noticed(tmp_path: Path, damage: str) -> None:
    make(tmp_path / "a")
    file = tmp_path / "a" / "sub" / "file.txt"
    if damage == "truncate":
        file.write_text("c")
    elif damage == "remove":
        file.unlink()
    elif damage == "manifest":
        (tmp_path / "a" / "manifest.json").write_text('{"kind"')
    if damage == "kind":
        with pytest.raises(ArtifactError, match="holds 'thing', not 'model'"):
            read_manifest(tmp_path / "a", kind="model")
    else:
        named = "manifest.json" if damage == "manifest" else "file.txt"
        with pytest.raises(ArtifactError, match=rf"{named}: .*; remove {tmp_path / 'a'} and run its stage again"):
            read_manifest(tmp_path / "a")


def test_changed_content_of_equal_size_is_noticed_on_request(tmp_path: Path) -> None:
    make(tmp_path / "a")
    (tmp_path / "a" / "sub" / "file.txt").write_text("CONTENT")
    read_manifest(tmp_path / "a")
    with pytest.raises(ArtifactError, match=r"file\.txt: is damaged: its SHA-256"):
        read_manifest(tmp_path / "a", verify=True)
    with pytest.raises(ArtifactError, match=r"file\.txt: is damaged: its SHA-256"):
        verify_if_artifact(tmp_path / "a")


def test_only_a_folder_with_a_manifest_is_verified(tmp_path: Path) -> None:
    assert not is_finished(tmp_path)
    assert verify_if_artifact(tmp_path) is None


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    (tmp_path / "a.partial").mkdir()
    (tmp_path / "a.partial" / "old").write_text("x")
    make(tmp_path / "a")
    assert "old" not in json.dumps(dict(read_manifest(tmp_path / "a").files))


@pytest.mark.parametrize(("number", "words"), [(errno.ENOSPC, "disk is full"), (errno.EACCES, "cannot be written")])
def test_refusals_become_one_storage_error(number: int, words: str) -> None:
    with pytest.raises(StorageError, match=words), writing("some/file"):
        raise OSError(number, os.strerror(number))
    with pytest.raises(FileNotFoundError), writing("some/file"):
        raise FileNotFoundError(errno.ENOENT, "gone")


def test_write_atomic_replaces(tmp_path: Path) -> None:
    write_atomic(tmp_path / "f", "one")
    write_atomic(tmp_path / "f", b"two")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("f", "two")]


@pytest.mark.parametrize("name", ["../outside", "a/../../outside", "/etc/outside", "", "a/.."])
def test_a_manifest_cannot_name_files_outside_its_folder(name: str) -> None:
    """Who takes over an artifact writes what its manifest names."""
    entry = {"bytes": 1, "sha256": "0"}
    text = json.dumps({"kind": "k", "digest": "d", "inputs": {}, "files": {"a..b": entry, name: entry}, "facts": {}})
    with pytest.raises(ArtifactError, match=r"s3://runs/manifest\.json: is damaged \(the file .* is not in its folder"):
        parse_manifest(text, "s3://runs")
