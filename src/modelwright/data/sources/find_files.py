"""Resolves a source (a path, a directory, a glob, an fsspec URL) to the files to read, in a fixed order. Skipped files
are reported with the reason.
"""

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import PurePosixPath

import fsspec
import fsspec.core
from fsspec.implementations.local import LocalFileSystem

from modelwright.core import hub
from modelwright.core.config import DataError
from modelwright.data.clean.folder import without_dropped
from modelwright.data.images.read import ARCHIVE_EXTENSIONS, IMAGE_EXTENSIONS, without_captions
from modelwright.data.sources.corpora import EXTRAS
from modelwright.data.sources.readers import File
from modelwright.data.sources.registry import NAMES as REGISTRIES
from modelwright.data.sources.registry import Entry, entries_of

PROSE_EXTENSIONS = (".txt", ".md", ".rst")
MARKUP_EXTENSIONS = (".html", ".htm")
TABLE_EXTENSIONS = (".jsonl", ".parquet", ".arrow")
WEB_ARCHIVE_EXTENSIONS = (".warc", ".wet")
LOOSE_EXTENSIONS = (".json", ".csv", ".tsv")
"""Formats of records, but also of settings and figures: in a directory they are read if they have text."""
RECORD_EXTENSIONS = (*TABLE_EXTENSIONS, *LOOSE_EXTENSIONS)
"""Formats that a registry may describe."""
DOCUMENT_EXTENSIONS = (".pdf", ".docx")
CODE_EXTENSIONS = (
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".scala", ".swift", ".js",
    ".jsx", ".ts", ".tsx", ".rb", ".php", ".lua", ".r", ".jl", ".hs", ".ml", ".sh", ".sql", ".cs", ".m", ".pl",
)  # fmt: skip
PAIRED_EXTENSIONS = IMAGE_EXTENSIONS + ARCHIVE_EXTENSIONS
"""Formats of images with captions."""
_EXTENSIONS = (
    *PROSE_EXTENSIONS, *MARKUP_EXTENSIONS, *TABLE_EXTENSIONS, *WEB_ARCHIVE_EXTENSIONS, *LOOSE_EXTENSIONS,
    *CODE_EXTENSIONS, *PAIRED_EXTENSIONS, *DOCUMENT_EXTENSIONS,
)  # fmt: skip
# Formats that are compressed inside, and that readers must seek in.
_UNCOMPRESSED = (".parquet", ".arrow", *IMAGE_EXTENSIONS, *DOCUMENT_EXTENSIONS)
COMPRESSIONS = {".gz": "gz", ".zst": "zst"}
_DATASET_FILES = ("dataset_dict.json", "state.json", *REGISTRIES)
_GLOB_MARKS = "*?["

SkipFile = Callable[[str, str], None]
"""Receives `(reason, file)` for a file or directory that is passed over."""


def locate(sources: tuple[str, ...], skip: SkipFile) -> Iterator[File]:
    """Yields the files that the sources name, each once, sorted within a source.

    A file named explicitly must have a supported format; in directories and globs others are skipped and reported.
    Raises `DataError` for a source without files, or a URL whose fsspec backend is not installed.
    """
    # Two sources may name the same file, as a folder and a pattern within it do.
    seen: set[tuple[str, str]] = set()
    for source in sources:
        for file in _on_hub(source, skip) if source.startswith(hub.DATASETS) else _locate(source, skip):
            key = (type(file.filesystem).__name__, file.path)
            if key not in seen:
                seen.add(key)
                yield file


def _on_hub(source: str, skip: SkipFile) -> Iterator[File]:
    root, path = hub.dataset_path(source)
    url = source[: len(hub.DATASETS)] + "/".join(source.removeprefix(hub.DATASETS).split("/")[:2])
    for file in _locate(str(path), skip):
        within = str(PurePosixPath(file.path).relative_to(root))
        if hub.is_data(within):
            yield replace(file, name=f"{url}/{within}")
        else:
            skip("file about the data set", f"{url}/{within}")


def _locate(source: str, skip: SkipFile) -> Iterator[File]:
    local = "://" not in source
    try:
        filesystem, path = fsspec.core.url_to_fs(os.path.expanduser(source) if local else source)
    except ImportError as error:
        remedy = "; pip install 'modelwright[remote]'" if source.startswith("s3://") else ""
        raise DataError(f"{source}: needs a package that is not installed ({error}){remedy}") from None
    except ValueError as error:
        raise DataError(f"{source}: is not a URL that fsspec supports ({error}); check --data.sources") from None
    path = str(path)
    if filesystem.isfile(path) and PurePosixPath(_posix(path)).name in REGISTRIES:
        folder = _parent(path)
        yield from _files_of_registry(filesystem, folder, source, skip)
        return
    if filesystem.isfile(path):
        extension, compression = _format(path)
        if not _is_supported(extension, compression):
            text = f"{source}: the extension {extension or '(none)'} is not supported"
            raise DataError(f"{text}; convert it to one of {_supported_names()}")
        entry = _entry_of(filesystem, path, {}, extension)
        yield File(filesystem, path, named(source), extension, compression, is_named=True, entry=entry)
        return
    is_folder = filesystem.isdir(path)
    if not is_folder and not any(mark in path for mark in _GLOB_MARKS):
        remedy = f"pip install 'modelwright[{EXTRAS[source]}]'" if source in EXTRAS else "check --data.sources"
        raise DataError(f"{source}: no such file or directory; {remedy}")
    reasons: Counter[str] = Counter()

    def pass_over(reason: str, name: str) -> None:
        reasons[reason] += 1
        skip(reason, named(_shown(source, path, name)))

    names: list[str] = []
    for match in [path] if is_folder else sorted(str(name) for name in filesystem.glob(path)):
        names += _walk(filesystem, match, pass_over) if is_folder or filesystem.isdir(match) else [match]
    names, other = without_dropped(names)
    for name in other:
        pass_over("file of a cleaned folder beside its kept documents", name)
    files: list[File] = []
    registries: dict[str, dict[str, Entry]] = {}
    for name in names:
        if PurePosixPath(_posix(name)).name in REGISTRIES and _parent(name) not in registries:
            found, others = entries_of(filesystem, _parent(name), named(_parent(_shown(source, path, name))))
            registries[_parent(name)] = found
            for other in others:
                skip("entry of a registry whose data are elsewhere", other)
            for one in found.values():
                if not filesystem.exists(f"{_parent(name)}/{one.file_name}"):
                    skip("entry of a registry without its file", f"{one.registry}: {one.name}")
    for name in without_captions(names, pass_over):
        extension, compression = _format(name)
        if PurePosixPath(name).name in _DATASET_FILES:
            continue
        if not _is_supported(extension, compression):
            pass_over(f"unsupported {extension or 'file without an extension'}", name)
        elif isinstance(filesystem, LocalFileSystem) and (problem := _problem_of(name)):
            pass_over(problem, name)
        else:
            entry = _entry_of(filesystem, name, registries, extension) if registries else None
            shown = named(_shown(source, path, name))
            files.append(File(filesystem, name, shown, extension, compression, entry=entry))
    if not files:
        what = "the directory holds" if is_folder else "the pattern matches"
        passed = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        text = f"{source}: {what} no file of a supported format ({_supported_names()})"
        raise DataError(f"{text}; skipped: {passed}" if passed else text)
    yield from files


def _parent(name: str) -> str:
    return str(PurePosixPath(_posix(name)).parent)


def named(path: str) -> str:
    r"""Returns a path for messages and documents: bytes of a name that are not UTF-8 are written as `\xe9`."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _files_of_registry(
    filesystem: fsspec.AbstractFileSystem, folder: str, source: str, skip: SkipFile
) -> Iterator[File]:  # fmt: skip
    """Yields the files that a registry names. Raises `DataError` for a missing one."""
    entries, others = entries_of(filesystem, folder, _parent(source))
    for other in others:
        skip("entry of a registry whose data are elsewhere", other)
    for entry in entries.values():
        path = f"{folder}/{entry.file_name}"
        extension, compression = _format(path)
        if not filesystem.isfile(path) or extension not in RECORD_EXTENSIONS:
            problem = "is missing" if not filesystem.exists(path) else f"is not one of {', '.join(RECORD_EXTENSIONS)}"
            raise DataError(
                f"{entry.registry}: the file {entry.file_name} of {entry.name!r} {problem}; correct the entry"
            )
        shown = f"{_parent(source)}/{entry.file_name}"
        yield File(filesystem, path, shown, extension, compression, is_named=True, entry=entry)
    if not entries:
        raise DataError(f"{source}: describes no file of this folder; name the data files")


def _entry_of(
    filesystem: fsspec.AbstractFileSystem, path: str, known: dict[str, dict[str, Entry]], extension: str
) -> Entry | None:
    """Returns the entry that describes a file, from the registries of the folders above it; `known` are those read."""
    if extension not in RECORD_EXTENSIONS:
        return None
    place = PurePosixPath(_posix(path))
    if not known:
        known = {str(place.parent): entries_of(filesystem, str(place.parent), "")[0]}
    for folder, entries in known.items():
        if PurePosixPath(folder) in place.parents:
            below = place.relative_to(folder)
            found = (entries.get(str(one)) for one in (below, *below.parents))
            if entry := next((one for one in found if one is not None), None):
                return entry
    return None


def _walk(filesystem: fsspec.AbstractFileSystem, root: str, skip: SkipFile) -> list[str]:
    """Returns the files below a folder, sorted, without hidden ones and the caches of `datasets`."""
    if not isinstance(filesystem, LocalFileSystem):
        below = [str(name) for name in filesystem.find(root)]
        return sorted(name for name in below if not _is_hidden(name, root))
    # fsspec's own walk silently omits directories that cannot be read.
    files: list[str] = []
    unreadable = "directory that cannot be read"
    walk = os.walk(root, onerror=lambda error: skip(f"{unreadable} ({error.strerror})", _posix(str(error.filename))))
    for folder, folders, names in walk:
        paths = {name: _posix(os.path.join(folder, name)) for name in (*folders, *names)}
        folders[:] = sorted(name for name in folders if not _is_hidden(paths[name], root))
        for name in folders:
            if os.path.islink(paths[name]):
                skip("link to a directory (not followed)", paths[name])
        files += [paths[name] for name in names if not _is_hidden(paths[name], root)]
    return sorted(files)


def _is_hidden(name: str, folder: str) -> bool:
    parts = PurePosixPath(_posix(name).removeprefix(_posix(folder).rstrip("/"))).parts
    is_cache = bool(parts) and parts[-1].startswith("cache-") and parts[-1].endswith(".arrow")
    return is_cache or any(part.startswith((".", "__pycache__")) for part in parts)


def _posix(path: str) -> str:
    return path.replace(os.sep, "/")


def _shown(source: str, path: str, name: str) -> str:
    """Returns the name of a file for messages: as the user wrote the source, if possible."""
    if "://" in source or any(mark in source for mark in _GLOB_MARKS):
        return os.path.relpath(name) if "://" not in source else name
    return source.rstrip("/") + name.removeprefix(path.rstrip("/"))


def _problem_of(path: str) -> str:
    """Returns the reason for which a local path cannot be read as a file; "" if it can."""
    try:
        return "" if stat.S_ISREG(os.stat(path).st_mode) else "no regular file"
    except FileNotFoundError:
        return "dangling link" if os.path.islink(path) else "file that is gone"
    except OSError as error:
        return f"file that cannot be read ({error.strerror})"


def _format(path: str) -> tuple[str, str]:
    """Returns `(extension, compression)` of a name: `a.jsonl.zst` is `(".jsonl", "zst")`."""
    name = PurePosixPath(_posix(path))
    compression = COMPRESSIONS.get(name.suffix.lower(), "")
    return (name.with_suffix("").suffix if compression else name.suffix).lower(), compression


def _is_supported(extension: str, compression: str) -> bool:
    if extension in ARCHIVE_EXTENSIONS:
        return compression in ("", "gz")
    return extension in _EXTENSIONS and not (compression and extension in _UNCOMPRESSED)


def _supported_names() -> str:
    texts = " ".join((*PROSE_EXTENSIONS, ".html", ".jsonl", *LOOSE_EXTENSIONS, *WEB_ARCHIVE_EXTENSIONS))
    others = ".parquet .arrow .pdf .docx; .py .c .js ...; images .jpg .png ... and .tar of them"
    return f"{texts}, each also .gz or .zst; {others}"
