"""The folders of a run, and artifacts: folders that are either whole or absent.

An artifact is written into `<folder>.partial` and flushed to disk; `manifest.json` is written last, and the folder is
renamed into place. A reader that finds a manifest finds every file it lists.

<run>/run.json           command line, commit, versions, hardware
<run>/config.yaml        resolved configuration
<run>/<stage>/metrics.jsonl, log.txt, tensorboard/, checkpoints/, artifact/manifest.json (written last = done)
<run>/report.html
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, cast

import yaml

from modelwright.core.config import ConfigError, ModelwrightError, dump


class ArtifactError(ModelwrightError):
    """An artifact is missing, incomplete or of an unexpected kind."""


class StorageError(ModelwrightError, OSError):
    """Writing failed (disk full, no permission); earlier files are untouched."""


@contextmanager
def writing(path: Path | str) -> Generator[None]:
    """Turn an operating system error while writing `path` into one clear `StorageError`; other errors pass through."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):  # which is an OSError too, from a nested `writing`
            raise
        if error.errno == errno.ENOSPC:
            raise StorageError(f"{path}: the disk is full; free some space and run the same command again") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EDQUOT):
            raise StorageError(
                f"{path}: cannot be written ({error.strerror}); make it writable or write elsewhere"
            ) from error
        raise


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


def save_yaml(path: Path | str, config: Any) -> None:
    """Write a config as plain data, keys in the order of definition. A reader sees the old file or the new one, never
    a part.
    """
    write_atomic(Path(path), yaml.safe_dump(dump(config), sort_keys=False, allow_unicode=True))


LOCK_FILE = ".lock"


@dataclass(frozen=True)
class StageDir:
    """The folder of one stage."""

    path: Path

    @property
    def artifact(self) -> Path:
        return self.path / "artifact"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"


def read_stage_digest(folder: StageDir) -> str:
    """Returns the digest to which the stage's folder belongs, "" if nothing was started there."""
    return str(_read_stage(folder).get("digest", ""))


def read_attempts(folder: StageDir) -> list[dict[str, Any]]:
    """Returns all attempts at the stage, oldest first."""
    return list(_read_stage(folder).get("attempts", []))


def _read_stage(folder: StageDir) -> dict[str, Any]:
    """Reads `stage.json`; empty, so that the stage starts over, if it is missing or damaged."""
    try:
        result: Any = json.loads((folder.path / "stage.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    journal = cast(dict[str, Any], result) if isinstance(result, dict) else {}
    attempts: Any = journal.get("attempts")
    entries = cast(list[Any], attempts) if isinstance(attempts, list) else [None]
    return journal if all(isinstance(one, dict) and "state" in one for one in entries) else {}


@dataclass(frozen=True)
class RunDir:
    """The folder of one run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def info(self) -> Path:
        return self.path / "run.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def stage(self, name: str) -> StageDir:
        return StageDir(self.path / name)

    def check(self) -> None:
        """Raise `ConfigError` if no folder can exist at this path; creates nothing."""
        check_folder(self.path, "--run-dir")

    def create(self) -> "RunDir":
        """Create the folder. Raises `ConfigError` or `StorageError` if that fails."""
        self.check()
        make_folder(self.path)
        return self

    def read_info(self) -> dict[str, Any]:
        """Read `run.json`. Raises `ArtifactError` if it is missing or damaged."""
        try:
            info: Any = json.loads(self.info.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise ArtifactError(f"{self.path}: is not a run directory (run.json cannot be read)") from None
        kinds = {"invocations": list, "stages": dict}
        result = cast(dict[str, Any], info) if isinstance(info, dict) else {}
        if not all(isinstance(result.get(name), kind) for name, kind in kinds.items()):
            raise ArtifactError(f"{self.info}: is damaged; remove it and run again, which writes a new one")
        return result

    def write_info(self, info: Mapping[str, Any]) -> None:
        write_atomic(self.info, json.dumps(info, indent=1, default=str))

    @contextmanager
    def lock(self) -> Generator[None]:
        """Hold the run for this process. Raises `ModelwrightError` when another process is working in it. The lock is
        the operating system's, so it is released even on kill -9.
        """
        with lock_folder(self.path, "this run; wait for it or choose another --run-dir"):
            yield


def check_folder(path: Path, option: str) -> None:
    """Raise `ConfigError` that names the option if no folder can exist at this path; creates nothing."""
    try:
        # The nearest folder that exists decides whether the path can be created.
        exists = path.exists()
        above = next((one for one in (path, *path.parents) if one.exists()), Path())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option}: {path} is not a usable path ({error}); choose another one") from None
    if not above.is_dir():
        what = "is" if exists else f"lies below {above}, which is"
        raise ConfigError(f"{option}: {path} {what} a file, not a folder; choose another one")
    if not os.access(above, os.W_OK):
        raise ConfigError(f"{option}: {path} cannot be written (permission denied); choose another one")


@contextmanager
def lock_folder(path: Path, remedy: str) -> Generator[None]:
    """Hold a folder for this process. Raises `ModelwrightError` if another process is working in it."""
    # "a+" does not truncate: until the lock is held, the file has the process id of its holder.
    with writing(path), open(path / LOCK_FILE, "a+") as file:
        try:
            # Not a file that exists while the run is held: that would outlive a killed process.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise ModelwrightError(f"{path}: process {holder} is working in {remedy}") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
