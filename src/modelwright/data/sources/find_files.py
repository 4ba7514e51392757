"""Resolves what a user names (a path, a directory, a glob, an fsspec URL) to the files to read, in a fixed order.
Skipped files are reported with the reason.
"""

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

import fsspec
import fsspec.core
from fsspec.implementations.local import LocalFileSystem

from modelwright.core.errors import DataError
from modelwright.data.clean.folder import without_dropped
from modelwright.data.images.read import ARCHIVE_EXTENSIONS, IMAGE_EXTENSIONS, without_captions
from modelwright.data.sources.readers import File

PROSE_EXTENSIONS = (".txt", ".md", ".rst")
MARKUP_EXTENSIONS = (".html", ".htm")
TABLE_EXTENSIONS = (".jsonl", ".parquet", ".arrow")
WEB_ARCHIVE_EXTENSIONS = (".warc", ".wet")
LOOSE_EXTENSIONS = (".json", ".csv", ".tsv")
"""Formats that hold records or something else altogether: in a directory they are read when they hold text."""
CODE_EXTENSIONS = (
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".scala", ".swift", ".js",
    ".jsx", ".ts", ".tsx", ".rb", ".php", ".lua", ".r", ".jl", ".hs", ".ml", ".sh", ".sql", ".cs", ".m", ".pl",
)  # fmt: skip
PAIRED_EXTENSIONS = IMAGE_EXTENSIONS + ARCHIVE_EXTENSIONS
"""Images with captions."""
_EXTENSIONS = (
    *PROSE_EXTENSIONS, *MARKUP_EXTENSIONS, *TABLE_EXTENSIONS, *WEB_ARCHIVE_EXTENSIONS, *LOOSE_EXTENSIONS,
    *CODE_EXTENSIONS, *PAIRED_EXTENSIONS,
)  # fmt: skip
_UNCOMPRESSED = (".parquet", ".arrow", *IMAGE_EXTENSIONS)
COMPRESSIONS = {".gz": "gz", ".zst": "zst"}
_DATASET_FILES = ("dataset_info.json", "dataset_dict.json", "state.json")
_GLOB_MARKS = "*?["

SkipFile = Callable[[str, str], None]
"""Told `(reason, file)` about a file or directory that is passed over."""


def locate(sources: tuple[str, ...], skip: SkipFile) -> Iterator[File]:
    """The files that the sources name, each once, sorted within a source.

    A file named explicitly must have a supported format; in directories and globs others are skipped and reported.
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
    reasons: Counter[str] = Counter()

    def pass_over(reason: str, name: str) -> None:
        reasons[reason] += 1
        skip(reason, _shown(source, path, name))

    result = _walk(filesystem, path, pass_over) if is_folder else _glob(filesystem, path, pass_over)
    result, other = without_dropped(result)
    for name in other:
        pass_over("file of a cleaned folder beside its kept documents", name)
    result = without_captions(result, pass_over)
    files = [file for name in result if (file := _supported(filesystem, name, _shown(source, path, name), pass_over))]
    if not files:
        what = "the directory holds" if is_folder else "the pattern matches"
        passed = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        text = f"{source}: {what} no file of a supported format ({_supported_names()})"
        raise DataError(f"{text}; skipped: {passed}" if passed else text)
    yield from files


def _filesystem(source: str) -> tuple[fsspec.AbstractFileSystem, str]:
    local = "://" not in source
    try:
        filesystem, path = fsspec.core.url_to_fs(os.path.expanduser(source) if local else source)
    except ImportError as error:
        remedy = "; pip install 'modelwright[remote]'" if source.startswith("s3://") else ""
        raise DataError(f"{source}: needs a package that is not installed ({error}){remedy}") from None
    except ValueError as error:
        raise DataError(f"{source}: is not a URL that fsspec supports ({error}); check --data.sources") from None
    return filesystem, str(path)


def _walk(filesystem: fsspec.AbstractFileSystem, folder: str, skip: SkipFile) -> list[str]:
    """Files below a folder, sorted, without hidden ones and the caches of `datasets`."""
    if isinstance(filesystem, LocalFileSystem):
        return sorted(_walk_local(folder, skip))
    below = [str(name) for name in filesystem.find(folder)]
    return sorted(name for name in below if not _is_hidden(name, folder))


def _walk_local(root: str, skip: SkipFile) -> Iterator[str]:
    """Report directories that cannot be read, which fsspec's own walk omits silently."""

    def unreadable(error: OSError) -> None:
        skip(f"directory that cannot be read ({error.strerror})", _posix(str(error.filename)))

    for folder, folders, names in os.walk(root, onerror=unreadable):
        paths = {name: _posix(os.path.join(folder, name)) for name in (*folders, *names)}
        folders[:] = sorted(name for name in folders if not _is_hidden(paths[name], root))
        for name in folders:
            if os.path.islink(paths[name]):
                skip("link to a directory (not followed)", paths[name])
        yield from (paths[name] for name in names if not _is_hidden(paths[name], root))


def _glob(filesystem: fsspec.AbstractFileSystem, pattern: str, skip: SkipFile) -> list[str]:
    result: list[str] = []
    for match in sorted(str(name) for name in filesystem.glob(pattern)):
        result += _walk(filesystem, match, skip) if filesystem.isdir(match) else [match]
    return result


def _is_hidden(name: str, folder: str) -> bool:
    parts = PurePosixPath(_posix(name).removeprefix(_posix(folder).rstrip("/"))).parts
    is_cache = bool(parts) and parts[-1].startswith("cache-") and parts[-1].endswith(".arrow")
    return is_cache or any(part.startswith((".", "__pycache__")) for part in parts)


def _posix(path: str) -> str:
    return path.replace(os.sep, "/")


def _shown(source: str, path: str, name: str) -> str:
    """The name to show for a file: as the user wrote the source, if possible."""
    if "://" in source or any(mark in source for mark in _GLOB_MARKS):
        return os.path.relpath(name) if "://" not in source else name
    return source.rstrip("/") + name.removeprefix(path.rstrip("/"))


def _supported(filesystem: fsspec.AbstractFileSystem, path: str, shown: str, skip: SkipFile) -> File | None:
    extension, compression = _format(path)
    if PurePosixPath(path).name in _DATASET_FILES:
        return None
    if not _is_supported(extension, compression):
        skip(f"unsupported {extension or 'file without an extension'}", path)
        return None
    problem = _problem_of(path) if isinstance(filesystem, LocalFileSystem) else ""
    if problem:
        skip(problem, path)
        return None
    return File(filesystem, path, shown, extension, compression)


def _problem_of(path: str) -> str:
    """Why a local path cannot be read as a file; "" if it can."""
    try:
        return "" if stat.S_ISREG(os.stat(path).st_mode) else "no regular file"
    except FileNotFoundError:
        return "dangling link" if os.path.islink(path) else "file that is gone"
    except OSError as error:
        return f"file that cannot be read ({error.strerror})"


def _file(filesystem: fsspec.AbstractFileSystem, path: str, name: str) -> File:
    extension, compression = _format(path)
    if not _is_supported(extension, compression):
        text = f"{name}: the extension {extension or '(none)'} is not supported"
        raise DataError(f"{text}; convert it to one of {_supported_names()}")
    return File(filesystem, path, name, extension, compression, is_named=True)


def _format(path: str) -> tuple[str, str]:
    """`(extension, compression)` by the name: `a.jsonl.zst` is `(".jsonl", "zst")`."""
    name = PurePosixPath(_posix(path))
    compression = COMPRESSIONS.get(name.suffix.lower(), "")
    return (name.with_suffix("").suffix if compression else name.suffix).lower(), compression


def _is_supported(extension: str, compression: str) -> bool:
    if extension in ARCHIVE_EXTENSIONS:
        return compression in ("", "gz")
    return extension in _EXTENSIONS and not (compression and extension in _UNCOMPRESSED)


def _supported_names() -> str:
    texts = " ".join((*PROSE_EXTENSIONS, ".html", ".jsonl", *LOOSE_EXTENSIONS, *WEB_ARCHIVE_EXTENSIONS))
    return f"{texts}, each also .gz or .zst; .parquet .arrow; .py .c .js ...; images .jpg .png ... and .tar of them"
