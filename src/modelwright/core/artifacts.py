"""Artifacts: folders that are either whole or absent.

An artifact is written into `<folder>.partial` and flushed to disk; `manifest.json` is written last, and the folder is
renamed into place. A reader that finds a manifest finds every file it lists.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from modelwright.core.errors import ArtifactError, StorageError, writing

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of `manifest.json`. `kind`: type of the artifact ("tokenizer", "shards", "checkpoint"); `digest`: digest
    of the config and inputs that made it; `inputs`: digests of the parents by name; `files`: size in bytes and SHA-256
    by relative path; `facts`: small figures that later stages and the report read.
    """

    kind: str
    digest: str
    inputs: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def content_digest(self) -> str:
        """SHA-256 over the files' names and hashes: equal if and only if the contents are equal."""
        lines = "\n".join(f"{name} {entry['sha256']}" for name, entry in sorted(self.files.items()))
        return hashlib.sha256(lines.encode()).hexdigest()


@dataclass(eq=False)
class ArtifactDraft:
    """The folder being written (`path`) and the facts for its manifest."""

    path: Path
    facts: dict[str, Any] = field(default_factory=dict[str, Any])


@contextmanager
def write_artifact(
    folder: Path, *, kind: str, digest: str, inputs: Mapping[str, str] | None = None
) -> Generator[ArtifactDraft]:
    """Write a folder that appears whole or not at all. Yields a draft; write files under `draft.path` and figures into
    `draft.facts`. On a clean exit the files are flushed, hashed and listed in the manifest, and the folder replaces any
    older one. On an exception the partial folder is removed and the older one stays. Raises `StorageError` when the
    disk is full.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with writing(folder):
        make_folder(partial)
        draft = ArtifactDraft(partial)
        try:
            yield draft
            files = {
                str(path.relative_to(partial)): describe_file(path)
                for path in sorted(path for path in partial.rglob("*") if path.is_file())
            }
            manifest = {
                "kind": kind,
                "digest": digest,
                "inputs": dict(inputs or {}),
                "files": files,
                "facts": draft.facts,
            }
            write_atomic(partial / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True))
            _replace_folder(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _replace_folder(partial: Path, folder: Path) -> None:
    # A rename cannot replace a folder that has files, so the old one is moved away and removed only when the new name
    # is durable.
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(partial, folder)
    fsync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def read_manifest(folder: Path, *, kind: str = "", verify: bool = False) -> Manifest:
    """Read and check an artifact's manifest. Checks that every listed file exists with its size, and with `verify` also
    its SHA-256, which reads every file once. Callers verify an artifact before they load it. Raises `ArtifactError`
    when the manifest is missing (the artifact was never finished), damaged, or of another kind.
    """
    try:
        manifest = parse_manifest((folder / MANIFEST).read_bytes(), str(folder), kind=kind)
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(f"{folder}: lacks {MANIFEST}, so it was never finished; run its stage again") from None
    for name, entry in manifest.files.items():
        if problem := damage(folder / name, int(entry["bytes"]), str(entry["sha256"]), verify=verify):
            raise ArtifactError(f"{folder / name}: {problem}; remove {folder} and run its stage again")
    return manifest


def parse_manifest(text: str | bytes, folder: str, *, kind: str = "") -> Manifest:
    """Parse the content of an artifact's manifest. folder: where it is, for messages. Raises `ArtifactError` if it is
    damaged, or of another kind.
    """
    try:
        manifest = Manifest(**json.loads(text))
        if not all(int(entry["bytes"]) >= 0 and entry["sha256"] for entry in manifest.files.values()):
            raise ValueError("a file lacks its size or its SHA-256")
        for name in manifest.files:
            # Names are joined to the folder, and a manifest may come from another machine.
            if not name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ValueError(f"the file {name!r} is not in its folder")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        place = f"{folder.rstrip('/')}/{MANIFEST}"
        raise ArtifactError(f"{place}: is damaged ({error}); remove {folder} and run its stage again") from None
    if kind and manifest.kind != kind:
        raise ArtifactError(f"{folder}: holds {manifest.kind!r}, not {kind!r}")
    return manifest


def make_folder(folder: Path) -> None:
    """Create a folder and its parents. Raises `StorageError` if that fails for any reason."""
    try:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{folder}: cannot be created ({error.strerror}); choose another folder") from None


def verify_if_artifact(folder: Path) -> Manifest | None:
    """Verify a model folder if a stage wrote it; None for one without a manifest (downloaded, exported). Raises
    `ArtifactError` that names the damaged file.
    """
    return read_manifest(folder, verify=True) if is_finished(folder) else None


def is_finished(folder: Path) -> bool:
    """True if `folder` holds a finished artifact; its files may have been damaged since."""
    return (folder / MANIFEST).is_file()


def describe_file(path: Path) -> dict[str, Any]:
    """Flush a file to disk and describe it: size in bytes and SHA-256 in hex."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())  # before the manifest names it: a manifest on disk then implies its files are, too
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": checksum}


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a small file so that a reader sees the old content or the new one, never a part."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    # In the same folder, because a rename replaces a file at once only within one file system.
    temporary = path.with_name(path.name + ".tmp")
    with writing(path):
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Make renames and new names inside `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def damage(file: Path, num_bytes: int, checksum: str, *, verify: bool = True) -> str:
    """Describes the damage of an artifact's file; "" for an intact one. verify: compare its SHA-256."""
    if not file.is_file():
        return "is missing"
    size = file.stat().st_size
    if size != num_bytes:
        return f"has {size:,} bytes instead of {num_bytes:,}"
    if verify:
        with open(file, "rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() != checksum:
                return "is damaged: its SHA-256 is not the one in the manifest"
    return ""
