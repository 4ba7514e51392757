"""From what a user names (a path, a directory, a glob, an fsspec URL) to the files to read, in a fixed order.

Knows the names of formats, not their contents.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

import fsspec
import fsspec.core

from modelwright.core.errors import DataError
from modelwright.data.readers import File

PROSE_EXTENSIONS = (".txt", ".md", ".rst")
TABLE_EXTENSIONS = (".jsonl", ".parquet", ".arrow")
CODE_EXTENSIONS = (
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".scala", ".swift", ".js",
    ".jsx", ".ts", ".tsx", ".rb", ".php", ".lua", ".r", ".jl", ".hs", ".ml", ".sh", ".sql", ".cs", ".m", ".pl",
)  # fmt: skip
COMPRESSIONS = {".gz": "gz", ".zst": "zst"}
_DATASET_FILES = ("dataset_info.json", "dataset_dict.json", "state.json")
_GLOB_MARKS = "*?["

SkipFile = Callable[[str, str], None]
"""Told `(reason, file)` about a file in a directory that is passed over."""


def locate(sources: tuple[str, ...], skip: SkipFile) -> Iterator[File]:
    """The files that the sources name, each once, sorted within a source.

    A file named outright must be of a supported format; in directories and globs others are passed over and counted.
    Raises `DataError` for a source that names nothing, or a URL whose fsspec backend is not installed.
    """
    seen: set[tuple[str, str]] = set()
    for source in sources:
        for file in _locate(source, skip):
            key = (type(file.filesystem).__name__, file.path)
            if key not in seen:
                seen.add(key)
                yield file


def _locate(source: str, skip: SkipFile) -> Iterator[File]:
    filesystem, path = _filesystem(source)
    if filesystem.isfile(path):
        yield _file(filesystem, path, source)
        return
    is_folder = filesystem.isdir(path)
    if not is_folder and not any(mark in path for mark in _GLOB_MARKS):
        raise DataError(f"{source}: no such file or directory; check --data.sources")
    found = _walk(filesystem, path) if is_folder else _glob(filesystem, path)
    files = [file for name in found if (file := _supported(filesystem, name, _shown(source, path, name), skip))]
    if not files:
        what = "the directory holds" if is_folder else "the pattern matches"
        raise DataError(f"{source}: {what} no file of a supported format ({_supported_names()})")
    yield from files


def _filesystem(source: str) -> tuple[fsspec.AbstractFileSystem, str]:
    local = "://" not in source
    try:
        filesystem, path = fsspec.core.url_to_fs(os.path.expanduser(source) if local else source)
    except ImportError as error:
        raise DataError(f"{source}: needs a package that is not installed ({error})") from None
    except ValueError as error:
        raise DataError(f"{source}: is no address that fsspec knows ({error}); check --data.sources") from None
    return filesystem, str(path)


def _walk(filesystem: fsspec.AbstractFileSystem, folder: str) -> list[str]:
    """Files below a folder, sorted; hidden ones and the caches of `datasets` left out."""
    below = [str(name) for name in filesystem.find(folder)]
    return sorted(name for name in below if not _is_hidden(name, folder))


def _glob(filesystem: fsspec.AbstractFileSystem, pattern: str) -> list[str]:
    found: list[str] = []
    for match in sorted(str(name) for name in filesystem.glob(pattern)):
        found += _walk(filesystem, match) if filesystem.isdir(match) else [match]
    return found


def _is_hidden(name: str, folder: str) -> bool:
    parts = PurePosixPath(name.replace(os.sep, "/").removeprefix(folder.replace(os.sep, "/").rstrip("/"))).parts
    is_cache = bool(parts) and parts[-1].startswith("cache-") and parts[-1].endswith(".arrow")
    return is_cache or any(part.startswith((".", "__pycache__")) for part in parts)


def _shown(source: str, path: str, name: str) -> str:
    """The name to show for a found file: as the user wrote the source, where that is possible."""
    if "://" in source or any(mark in source for mark in _GLOB_MARKS):
        return os.path.relpath(name) if "://" not in source else name
    return source.rstrip("/") + name.removeprefix(path.rstrip("/"))


def _supported(filesystem: fsspec.AbstractFileSystem, path: str, name: str, skip: SkipFile) -> File | None:
    extension, compression = _format(path)
    if PurePosixPath(path).name in _DATASET_FILES:
        return None
    if not _is_supported(extension, compression):
        skip(f"unsupported extension {extension or '(none)'}", name)
        return None
    return File(filesystem, path, name, extension, compression)


def _file(filesystem: fsspec.AbstractFileSystem, path: str, name: str) -> File:
    extension, compression = _format(path)
    if not _is_supported(extension, compression):
        text = f"{name}: the extension {extension or '(none)'} is not supported"
        raise DataError(f"{text}; convert it to one of {_supported_names()}")
    return File(filesystem, path, name, extension, compression)


def _format(path: str) -> tuple[str, str]:
    """`(extension, compression)` by the name: `a.jsonl.zst` is `(".jsonl", "zst")`."""
    name = PurePosixPath(path.replace(os.sep, "/"))
    compression = COMPRESSIONS.get(name.suffix.lower(), "")
    return (name.with_suffix("").suffix if compression else name.suffix).lower(), compression


def _is_supported(extension: str, compression: str) -> bool:
    if compression and extension in (".parquet", ".arrow"):
        return False
    return extension in PROSE_EXTENSIONS + TABLE_EXTENSIONS + CODE_EXTENSIONS


def _supported_names() -> str:
    return "; ".join((" ".join(PROSE_EXTENSIONS), ".jsonl, each also .gz or .zst", ".parquet .arrow", ".py .c .js ..."))
