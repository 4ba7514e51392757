"""The text that exists on every machine: the running interpreter's own libraries, as documents.

Code: the standard library's sources. Prose: the docstrings of the standard library, torch and NumPy, and the language
reference in `pydoc_data.topics`. Questions and answers: one pair for each docstring whose first paragraph answers "What
does X do?", in one of several forms (`question_forms.py`). Tests are left out, and so are the internals of torch and
what the interpreter's build generated about this machine. The split is by module: everything from one module has the
same split. Deterministic for given versions of Python, torch and NumPy.
"""

import importlib.util
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

from modelwright.core.errors import DataError
from modelwright.core.seeds import derive_seed
from modelwright.data.document import Document, Split
from modelwright.data.sources.docstrings import (
    Docstring,
    docstrings_of_compiled,
    docstrings_of_compiled_stdlib,
    docstrings_of_source,
    module_files,
    stdlib_folder,
)
from modelwright.data.sources.questions import answer, pair
from modelwright.data.workers import InProcess, ShardEngine, in_order

HELDOUT_FRACTION = 1 / 20
"""Share of the modules that is held out."""

_LEFT_OUT = ("_sysconfigdata", "pydoc_data.topics", "torch._")
"""Beginnings of names of modules: what a build generated, and the internals of torch, whose documentation would be a
third of all prose and of no use to anybody who asks about torch."""
_COMPILED = {
    "torch": ("torch", "torch.linalg", "torch.fft", "torch.special", "torch.nn.functional", "torch.Tensor"),
    "numpy": ("numpy", "numpy.ndarray", "numpy.random", "numpy.random.Generator"),
}

_MODULES_AT_ONCE = 40
_IN_PROCESS = InProcess()

SkipFile = Callable[[str, str], None]
"""Told `(reason, file)` about a source file that cannot be read."""


@dataclass(frozen=True)
class ModulesJob:
    """Modules of one library for a worker, each with its name and file."""

    origin: str
    modules: tuple[tuple[str, Path], ...]


@dataclass(kw_only=True)
class ModulesRead:
    """What was in some modules. documents: in order, those of a docstring under its name, and code under ""; unread:
    files that could not be read, with the reason; num_sources: files that were not empty.
    """

    documents: list[tuple[str, tuple[Document, ...]]] = field(default_factory=list)
    unread: list[tuple[str, str]] = field(default_factory=list)
    num_sources: int = 0


def machine_corpus(*, fraction: float, skip: SkipFile, engine: ShardEngine = _IN_PROCESS) -> Iterator[Document]:
    """The documents of this machine's libraries; `fraction` in (0, 1] takes a share of the modules, by hash. engine:
    where source files are read. Raises `DataError` if the interpreter comes without its sources.
    """
    seen: set[str] = set()
    for name, documents in _named_documents(fraction, skip, engine):
        if name not in seen:
            yield from documents
        seen |= {name} - {""}


def split_of(module: str) -> Split:
    """The split of a module."""
    return "heldout" if _hash("module", module) < HELDOUT_FRACTION else "train"


def _named_documents(
    fraction: float, skip: SkipFile, engine: ShardEngine
) -> Iterator[tuple[str, tuple[Document, ...]]]:
    """As `ModulesRead.documents`."""
    jobs = {origin: list(_jobs(origin, fraction)) for origin in ("stdlib", *_COMPILED)}
    results = in_order(engine, read_modules, chain.from_iterable(jobs.values()))
    num_sources = 0
    for origin, own in jobs.items():
        for read in islice(results, len(own)):
            yield from read.documents
            num_sources += read.num_sources
            for reason, file in read.unread:
                skip(reason, file)
        for docstring in _compiled(origin):
            if _is_chosen(docstring.module, fraction):
                yield docstring.name, tuple(_documents(docstring, f"python:{origin}"))
    if not num_sources:
        text = f"{stdlib_folder()}: the interpreter came without its library sources"
        raise DataError(f"{text}; install them (a full Python), or give your own files with --data.sources")
    for topic, text in _topics():
        if _is_chosen(topic, fraction):
            yield topic, tuple(_documents(Docstring(topic, topic, "module", text), "python:topics"))


def _jobs(origin: str, fraction: float) -> Iterator[ModulesJob]:
    base = stdlib_folder() if origin == "stdlib" else _package(origin)
    modules = [
        (module, path)
        for module, path in (module_files(base, "" if origin == "stdlib" else origin) if base else ())
        if not module.startswith(_LEFT_OUT) and _is_chosen(module, fraction)
    ]
    for first in range(0, len(modules), _MODULES_AT_ONCE):
        yield ModulesJob(origin, tuple(modules[first : first + _MODULES_AT_ONCE]))


def read_modules(job: ModulesJob) -> ModulesRead:
    """Read some modules: the code of the standard library, and the docstrings of all."""
    result = ModulesRead()
    for module, path in job.modules:
        source = _read(path, lambda *entry: result.unread.append(entry))
        result.num_sources += bool(source)
        if job.origin == "stdlib" and source:
            result.documents.append(("", (_code(module, source),)))
        for docstring in docstrings_of_source(module, source):
            documents = tuple(_documents(docstring, f"python:{job.origin}"))
            result.documents.append((docstring.name, documents))
    return result


def _documents(docstring: Docstring, source: str) -> Iterator[Document]:
    split = split_of(docstring.module)
    summary = "" if source == "python:topics" else answer(docstring.text)
    about = {"name": docstring.name, "module": docstring.module}
    title = docstring.name
    yield Document(
        id=f"prose:{docstring.name}",
        text=f"{title}\n\n{docstring.text}",
        kind="prose",
        split=split,
        source=source,
        meta={**about, "title": title, "summary": summary},
    )
    asked = pair(docstring, canonical=split == "heldout") if summary else None
    if asked is None:
        return
    yield Document(
        id=f"qa:{docstring.name}",
        text=f"{asked.question}\n\n{asked.answer}",
        kind="qa",
        split=split,
        source=source,
        meta={**about, "title": asked.lead, "summary": summary, "question": asked.question, "answer": asked.answer},
    )


def _code(module: str, source: str) -> Document:
    return Document(
        id=f"code:{module}",
        text=source,
        kind="code",
        split=split_of(module),
        source="python:stdlib",
        meta={"module": module},
    )


def _compiled(origin: str) -> Iterator[Docstring]:
    if origin == "stdlib":
        yield from docstrings_of_compiled_stdlib()
        return
    for name in _COMPILED[origin]:
        yield from docstrings_of_compiled(name, name)
        if name == "torch.Tensor":
            yield from docstrings_of_compiled("torch._C.TensorBase", name)


def _topics() -> Iterator[tuple[str, str]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return
    for name, text in sorted(topics.items()):
        yield f"pydoc_data.topics.{name}", text


def _package(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def _read(path: Path, skip: SkipFile) -> str:
    try:
        with tokenize.open(path) as file:  # honors the file's own encoding line
            return file.read()
    except (OSError, SyntaxError, UnicodeDecodeError):
        skip("not readable as Python source", str(path))
        return ""


def _is_chosen(module: str, fraction: float) -> bool:
    return _hash("fraction", module) < fraction


def _hash(purpose: str, module: str) -> float:
    return derive_seed(0, purpose, module) / 2**63
