"""The text of every machine: the running interpreter's own libraries, as documents.

Code: the standard library's sources. Prose: the docstrings of the standard library, torch and NumPy, and the language
reference in `pydoc_data.topics`. Questions and answers: one pair for each docstring whose first paragraphs make plain
sentences, with varied wording and in several forms (its purpose, its arguments, the error that it raises, an example,
its name), so that all names are equally frequent; an answer repeats the name in the question. Held-out pairs have one
form and wording, so that figures of different corpora can be compared.

Tests, the internals of torch and the files that the interpreter's build generated about this machine are left out. The
split is by module: everything from one module has the same split. Deterministic for given versions of Python, torch and
NumPy.

Docstrings come from source files by syntax tree, from compiled modules by inspection. Source files are parsed, never
imported. `described_functions` pairs functions with their descriptions.
"""

import ast
import doctest
import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import textwrap
import tokenize
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Literal, NamedTuple

from modelwright.core.config import DataError, derive_seed
from modelwright.data.document import Document, Split
from modelwright.data.workers import InProcess, ShardEngine, in_order

_BOUND = ("self", "cls")
_FIRST_LINE_SIGNATURE = re.compile(r"\w[\w.]*\s*(\(.*\))\s*(?:->.*)?")
_PLACEHOLDER = re.compile(r"\$\w+,?\s*")
"""The bound object in the signatures of compiled functions."""
MIN_CHARS = 20
"""Minimum length of a docstring; shorter ones ("See base class.") are empty phrases."""

_TEST_PARTS = frozenset({"test", "tests", "testing", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_COMPILED_TESTS = ("_test", "_xx", "xx", "_ctypes_test", "test")
_PUBLIC_NAMES = {"posix": "os", "nt": "os"}

NameKind = Literal["module", "class", "function"]
MIN_LINES = 2
"""Minimum lines of a function's body; shorter ones, such as `pass`, are trivial."""


def parameters_of(arguments: ast.arguments) -> tuple[str, ...]:
    """Returns the parameters as in the definition (`src`, `follow=True`, `*rest`), without annotations and without the
    object that a method is bound to.
    """
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    result = [_parameter(one, default) for one, default in zip(positional, defaults, strict=True)]
    if positional and positional[0].arg in _BOUND:
        del result[0]
    if arguments.vararg:
        result.append(f"*{arguments.vararg.arg}")
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    result += [_parameter(one, default) for one, default in pairs]
    if arguments.kwarg:
        result.append(f"**{arguments.kwarg.arg}")
    return tuple(result)


def parameters_of_signature(text: str) -> tuple[str, ...]:
    """Returns the parameters of a signature such as `add(input, other, *, out=None) -> Tensor`, or of the one that
    CPython keeps of a compiled function (`($module, obj, /)`); () for any other text.
    """
    match = _FIRST_LINE_SIGNATURE.fullmatch(text.strip()) if not text.startswith("(") else None
    inside = match[1] if match else text.strip()
    if not inside.startswith("("):
        return ()
    try:
        (definition,) = ast.parse(f"def _{_PLACEHOLDER.sub('', inside)}: pass").body
    except (SyntaxError, ValueError):
        return ()
    return parameters_of(definition.args) if isinstance(definition, ast.FunctionDef) else ()


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    return argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"


@dataclass(frozen=True)
class Docstring:
    """The documentation of an object: its `module` (the unit of the split), its qualified `name`, the `text`, and the
    known `parameters` of a function, such as `src`, `follow=True` and `*rest`.
    """

    module: str
    name: str
    kind: NameKind
    text: str
    parameters: tuple[str, ...] = ()


def stdlib_folder() -> Path:
    """Returns the folder of the standard library's sources."""
    return Path(sysconfig.get_paths()["stdlib"])


def module_files(base: Path, prefix: str = "") -> Iterator[tuple[str, Path]]:
    """Yields `(module name, file)` of the Python sources under `base`, sorted by name, without tests."""
    result: list[tuple[str, Path]] = []
    for folder, folders, names in os.walk(base):
        # Tests are most of the files, so their folders are not walked.
        folders[:] = [name for name in folders if not _is_test(name)]
        parents = [*prefix.split(), *Path(folder).relative_to(base).parts]
        for name in names:
            stem, extension = os.path.splitext(name)
            if extension == ".py" and not _is_test(stem):
                module = ".".join([*parents, *([] if stem == "__init__" else [stem])])
                result += [(module, Path(folder, name))] if module else []
    yield from sorted(result)


def _is_test(part: str) -> bool:
    return part in _TEST_PARTS or part.startswith(("test_", "config-"))


def docstrings_of_source(module: str, source: str) -> Iterator[Docstring]:
    """Yields the docstrings of a module, its classes and functions at any depth, if its source can be parsed."""
    tree = parse_documented(source)
    if tree is not None:
        yield from _docstrings_of_node(tree, module, module, "module")


def parse_documented(source: str) -> ast.Module | None:
    """Returns the syntax tree of a source file that may have docstrings; None if it has none or does not parse."""
    if '"""' not in source and "'''" not in source:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's files
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None


def docstrings_of_compiled_stdlib() -> Iterator[Docstring]:
    """Yields the docstrings of the modules written in C, under their public names (`_io` is `io`, `posix` is `os`)."""
    folder = stdlib_folder() / "lib-dynload"
    names = {path.name.split(".")[0] for path in folder.glob("*") if path.suffix in (".so", ".pyd")}
    for name in sorted(names.union(sys.builtin_module_names) - {"__main__"}):
        if name.startswith(_COMPILED_TESTS):
            continue
        public = name.lstrip("_")
        public = _PUBLIC_NAMES.get(name, public if public in sys.stdlib_module_names else name)
        yield from docstrings_of_compiled(name, public)


def docstrings_of_compiled(module: str, public: str) -> Iterator[Docstring]:
    """Yields the docstrings of the compiled functions and classes in a module, or in a class of one, if this machine
    can import it.
    """
    parent, _, last = module.rpartition(".")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                holder: object = importlib.import_module(module)
            except ModuleNotFoundError:
                holder = getattr(importlib.import_module(parent), last) if parent else None
    except (ImportError, AttributeError, OSError):
        return
    if holder is None:
        return
    if isinstance(holder, types.ModuleType) and getattr(holder, "__file__", None) is None:
        yield from _docstring(public, public, "module", holder)
    for name, value in sorted(vars(holder).items()):
        if name.startswith("_") or isinstance(value, (types.ModuleType, types.FunctionType)):
            continue
        if not isinstance(value, type):
            if callable(value):
                yield from _docstring(public, f"{public}.{name}", "function", value)
            continue
        # A class of another module, or one with source, is documented there.
        home = value.__module__
        if home in (module, public) and (
            home == "builtins" or not getattr(sys.modules.get(home), "__file__", "").endswith(".py")
        ):
            yield from _docstring(public, f"{public}.{name}", "class", value)
            for attribute, member in sorted(vars(value).items()):
                if not attribute.startswith("_") and callable(getattr(value, attribute, None)):
                    yield from _docstring(public, f"{public}.{name}.{attribute}", "function", member)


def _docstrings_of_node(node: ast.Module | ast.ClassDef, module: str, name: str, kind: NameKind) -> Iterator[Docstring]:
    text = ast.get_docstring(node)
    if text and len(text) >= MIN_CHARS:
        yield Docstring(module, name, kind, text)
    for child in _definitions(node.body):
        below = f"{name}.{child.name}"
        if isinstance(child, ast.ClassDef):
            yield from _docstrings_of_node(child, module, below, "class")
            continue
        text = ast.get_docstring(child)
        if text and len(text) >= MIN_CHARS:
            yield Docstring(module, below, "function", text, parameters_of(child.args))


def _definitions(body: list[ast.stmt]) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yields the definitions in a body, including those under `if` and `try`."""
    for statement in body:
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield statement
        elif isinstance(statement, (ast.If, ast.Try)):
            yield from _definitions([*statement.body, *statement.orelse, *getattr(statement, "finalbody", [])])


def _docstring(module: str, name: str, kind: NameKind, value: object) -> Iterator[Docstring]:
    text = getattr(value, "__doc__", None)
    if isinstance(text, str) and len(text) >= MIN_CHARS:
        text = inspect.cleandoc(text)
        signature = getattr(value, "__text_signature__", None) or text.partition("\n")[0]
        parameters = parameters_of_signature(signature) if kind == "function" else ()
        yield Docstring(module, name, kind, text, parameters)


class DescribedCode(NamedTuple):
    """The first paragraph of a function's docstring, and the function without its docstring."""

    text: str
    code: str


def described_functions(source: str) -> Iterator[DescribedCode]:
    """Yields the described functions and methods of a source file, in its order; none if it does not parse."""
    tree = parse_documented(source)
    if tree is None:
        return
    # Lines as the parser counts them: str.splitlines also ends a line at a form feed.
    lines = source.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in sorted(functions, key=lambda one: one.lineno):
        docstring = ast.get_docstring(node)
        if not docstring or len(node.body) < 2:
            continue
        text = " ".join(docstring.split("\n\n")[0].split())
        first, last = node.body[0].lineno, node.body[0].end_lineno or node.body[0].lineno
        body = [line for line in lines[last : node.end_lineno] if line.strip()]
        # A docstring on the line of the definition cannot be cut out by lines.
        if len(text) >= MIN_CHARS and len(body) >= MIN_LINES and first > node.lineno:
            code = [*lines[node.lineno - 1 : first - 1], *lines[last : node.end_lineno]]
            yield DescribedCode(text, textwrap.dedent("\n".join(code)).strip("\n"))


HELDOUT_FRACTION = 1 / 20
"""Share of held-out modules."""

_LEFT_OUT = ("_sysconfigdata", "pydoc_data.topics", "torch._")
"""Prefixes of names of modules: generated by a build, or the internals of torch, whose documentation would be a third
of all prose and useless for questions about torch."""
_TENSOR_BASE = "torch._C.TensorBase"
_COMPILED = {
    "torch": (
        "torch", "torch.linalg", "torch.fft", "torch.special", "torch.nn.functional", "torch.Tensor", _TENSOR_BASE
    ),
    "numpy": ("numpy", "numpy.ndarray", "numpy.random", "numpy.random.Generator"),
}  # fmt: skip

_MODULES_AT_ONCE = 40
_IN_PROCESS = InProcess()

SkipFile = Callable[[str, str], None]
"""Receives `(reason, file)` for a source file that cannot be read."""


@dataclass(frozen=True)
class ModulesJob:
    """Modules of one library for a worker, each with its name and file."""

    origin: str
    modules: tuple[tuple[str, Path], ...]


@dataclass(kw_only=True)
class ModulesRead:
    """The documents of some modules. documents: in order, those of a docstring under its name, and code under "";
    unread: files that could not be read, with the reason; num_sources: number of files that were not empty.
    """

    documents: list[tuple[str, tuple[Document, ...]]] = field(default_factory=list)
    unread: list[tuple[str, str]] = field(default_factory=list)
    num_sources: int = 0


def machine_corpus(*, fraction: float, skip: SkipFile, engine: ShardEngine = _IN_PROCESS) -> Iterator[Document]:
    """Yields the documents of this machine's libraries; `fraction` in (0, 1] selects a share of the modules, by hash.
    engine: reads the source files. Raises `DataError` if the interpreter comes without its sources.
    """
    # A name may be documented in a source file and in a compiled module: the first one counts.
    seen: set[str] = set()
    for name, documents in _named_documents(fraction, skip, engine):
        if name not in seen:
            yield from documents
        seen |= {name} - {""}


def split_of(module: str) -> Split:
    """Returns the split of a module."""
    return "heldout" if derive_seed(0, "module", module) / 2**63 < HELDOUT_FRACTION else "train"


def _named_documents(
    fraction: float, skip: SkipFile, engine: ShardEngine
) -> Iterator[tuple[str, tuple[Document, ...]]]:
    """Yields the entries of `ModulesRead.documents` of all modules."""
    jobs: dict[str, list[ModulesJob]] = {}
    for origin in ("stdlib", *_COMPILED):
        spec = None if origin == "stdlib" else importlib.util.find_spec(origin)
        base = stdlib_folder() if origin == "stdlib" else Path(spec.origin).parent if spec and spec.origin else None
        modules = [
            (module, path)
            for module, path in (module_files(base, "" if origin == "stdlib" else origin) if base else ())
            if not module.startswith(_LEFT_OUT) and _is_chosen(module, fraction)
        ]
        starts = range(0, len(modules), _MODULES_AT_ONCE)
        jobs[origin] = [ModulesJob(origin, tuple(modules[first : first + _MODULES_AT_ONCE])) for first in starts]
    # All origins are one series of jobs, so that workers are busy while compiled modules are inspected here.
    results = in_order(engine, read_modules, chain.from_iterable(jobs.values()))
    num_sources = 0
    for origin, own in jobs.items():
        for read in islice(results, len(own)):
            yield from read.documents
            num_sources += read.num_sources
            for reason, file in read.unread:
                skip(reason, file)
        compiled = (
            docstrings_of_compiled_stdlib()
            if origin == "stdlib"
            else chain.from_iterable(
                docstrings_of_compiled(name, "torch.Tensor" if name == _TENSOR_BASE else name)
                for name in _COMPILED[origin]
            )
        )
        for docstring in compiled:
            if _is_chosen(docstring.module, fraction):
                yield docstring.name, tuple(_documents(docstring, f"python:{origin}"))
    if not num_sources:
        text = f"{stdlib_folder()}: the interpreter came without its library sources"
        raise DataError(f"{text}; install them (a full Python), or give your own files with --data.sources")
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return
    for name, text in sorted(topics.items()):
        topic = f"pydoc_data.topics.{name}"
        if _is_chosen(topic, fraction):
            yield topic, tuple(_documents(Docstring(topic, topic, "module", text), "python:topics"))


def read_modules(job: ModulesJob) -> ModulesRead:
    """Reads some modules: the code of the standard library, and the docstrings of all."""
    result = ModulesRead()
    for module, path in job.modules:
        source = ""
        try:
            with tokenize.open(path) as file:  # honors the file's own encoding line
                source = file.read()
        except (OSError, SyntaxError, UnicodeDecodeError):
            result.unread.append(("not readable as Python source", str(path)))
        result.num_sources += bool(source)
        if job.origin == "stdlib" and source:
            about = {"module": module}
            code = Document(
                id=f"code:{module}",
                text=source,
                kind="code",
                split=split_of(module),
                source="python:stdlib",
                meta=about,
            )
            result.documents.append(("", (code,)))
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


def _is_chosen(module: str, fraction: float) -> bool:
    return derive_seed(0, "fraction", module) / 2**63 < fraction


MAX_ANSWER_CHARS = 600
MIN_ANSWER_CHARS = 20
MIN_ANSWER_WORDS = 3
ENOUGH_CHARS = 120
"""Minimum length of an answer that ends with the first paragraph; a shorter one gets the next paragraph, too."""

CANONICAL = "What does `{}` do?"
_VARIANTS: dict[NameKind, tuple[str, ...]] = {
    "function": (
        "Explain `{}`.",
        "What is `{}` for?",
        "Describe what `{}` does.",
        "How would you describe `{}`?",
        "Tell me about `{}`.",
        "When would I use `{}`?",
    ),
    "class": (
        "What is `{}`?",
        "Explain the class `{}`.",
        "What is the class `{}` for?",
        "Describe `{}`.",
        "Tell me about `{}`.",
        "When would I use `{}`?",
    ),
    "module": (
        "What is the module `{}` for?",
        "Explain the module `{}`.",
        "What is in `{}`?",
        "Describe the module `{}`.",
        "Tell me about `{}`.",
    ),
}

_ROLE = re.compile(r":[\w:+-]+:`~?([^`<]*?)(?:\s*<[^>`]*>)?`")
_LITERAL = re.compile(r"``([^`]+)``")
_LINK = re.compile(r"`([^`<]+?)\s*<[^>`]+>`_{1,2}")
_SECTION = re.compile(
    r"(args|arguments|parameters|params|returns?|raises|yields?|examples?|usage|notes?|warnings?|see also|references"
    r"|attributes|keyword arguments|inputs?|outputs?|shape|methods|options|caveats?|todo)\s*:*$|"
    r"(args|arguments|parameters|returns|raises|example|examples|note|keyword arguments|usage)\s*:",
    re.IGNORECASE,
)
_NOT_PROSE = re.compile(
    r">>>|\.\. |:(param|type|returns?|rtype|raises?|arg|keyword|cvar|ivar|var)\b|@\w+"
    r"|[-*+|#=•] |\(?\d+[.)] |[-=~^*]{3,}|\$"
)
_ENDS = (".", "!", "?", ":")
_SIGNATURE = re.compile(r"[\w.]+\s*\(.*\)\s*(->.*|:)?$|[\w.]+\s*\(.*->.*$|[\w.]+\s*=\s*[\w.]+\(.*$", re.DOTALL)
MAX_PARAMETERS = 8
"""Maximum number of parameters of a readable answer."""
PURPOSE_WEIGHT = 3
"""Weight of the question for the purpose, relative to those of the other forms with an answer."""

_ERROR = r"`?(?P<error>[A-Z]\w*(?:Error|Exception|Warning|StopIteration|KeyboardInterrupt))`?"
_RAISES_SENTENCE = re.compile(rf"(?P<reason>[^.\n]*\b[Rr]aises?\s+(?:an?\s+|the\s+)?{_ERROR}[^.]*\.)")
_RAISES_SECTION = re.compile(
    rf"^[ \t]*Raises\s*:?[ \t]*\n(?:[ \t]*-+[ \t]*\n)?[ \t]*{_ERROR}[ \t]*:?[ \t]*\n?[ \t]*(?P<reason>[^\n]+)",
    re.MULTILINE,
)
_FIRST_SENTENCE = re.compile(r".*?[.!?](?=\s|$)|.*")


def question(docstring: Docstring, *, canonical: bool) -> str:
    """Returns the question about a name: canonical, or for half of the names in a wording that a hash selects."""
    variants = _VARIANTS[docstring.kind]
    pick = derive_seed(0, "question", docstring.name) % (2 * len(variants))
    template = CANONICAL if canonical or pick >= len(variants) else variants[pick]
    return template.format(docstring.name)


def answer(text: str) -> str:
    """Returns the first paragraphs of a docstring as plain sentences, at most `MAX_ANSWER_CHARS`; "" without any.

    Signatures at the start are skipped; sections (Args, Returns), lists, code and tables end the answer; markup of
    reStructuredText is reduced to its names.
    """
    parts: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        prose, ended = _prose(paragraph)
        if not parts and not ended and _SIGNATURE.fullmatch(prose):
            continue
        if parts and prose and not parts[-1].endswith(_ENDS):
            parts[-1] += "."
        if prose and len(" ".join([*parts, prose])) <= MAX_ANSWER_CHARS:
            parts.append(prose)
        elif prose and not parts:
            parts.append(_whole_sentences(prose))
            break
        if ended or len(" ".join(parts)) >= ENOUGH_CHARS or (prose and prose not in parts):
            break
    result = " ".join(parts)
    if result.endswith(":"):  # a last sentence that announces omitted content ("For example:")
        result = _whole_sentences(result)
    enough = len(result) >= MIN_ANSWER_CHARS and len(result.split()) >= MIN_ANSWER_WORDS
    return result if enough and not result.lower().startswith(("see ", "alias ", "same as ")) else ""


def _prose(paragraph: str) -> tuple[str, bool]:
    """Returns the sentences at the start of a paragraph, on one line, and True if something else follows them."""
    indented = paragraph.splitlines()
    indents = [len(line) - len(line.lstrip()) for line in indented]
    lines = [line.strip() for line in indented]
    for number, line in enumerate(lines):
        has_next = number + 1 < len(lines)
        underlined = has_next and re.fullmatch(r"[-=~^*]{3,}", lines[number + 1])
        # A short line above an indented one is a term with its definition (`sep` / ` The separator ...`).
        is_term = has_next and len(line.split()) <= 3 and indents[number + 1] > indents[number]
        if underlined or _SECTION.match(line) or _NOT_PROSE.match(line) or is_term:
            before = _plain(" ".join(lines[:number]))
            return before if before.endswith(_ENDS) else _whole_sentences(before), True
    return _plain(" ".join(lines)), False


def _plain(text: str) -> str:
    for pattern in (_ROLE, _LINK, _LITERAL):
        text = pattern.sub(r"`\1`", text)
    return " ".join(text.split())


def _whole_sentences(text: str) -> str:
    end = max(f"{text} ".rfind(mark, 0, MAX_ANSWER_CHARS + 1) for mark in (". ", "! ", "? "))
    return text[: end + 1]


@dataclass(frozen=True)
class Pair:
    """A question with its answer. lead: the first words of the answer, if they are not from the documentation."""

    question: str
    answer: str
    lead: str = ""


def pair(docstring: Docstring, *, canonical: bool) -> Pair | None:
    """Returns the question/answer pair of a docstring, None without an answer. canonical: asks for the purpose, in the
    canonical wording; otherwise a hash of the name selects one of the forms to which the docstring has an answer.
    """
    summary = answer(docstring.text)
    if not summary:
        return None
    lead = f"`{docstring.name}`:"
    purpose = Pair(question(docstring, canonical=canonical), f"{lead} {summary}", lead)
    if canonical:
        return purpose
    drawn_from = [purpose] * PURPOSE_WEIGHT
    for form, weight in FORMS:
        if made := form(docstring, summary):
            drawn_from += [made] * weight
    return drawn_from[derive_seed(0, "form", docstring.name) % len(drawn_from)]


def arguments_pair(docstring: Docstring, summary: str) -> Pair | None:
    """Asks for the arguments."""
    if not 1 <= len(docstring.parameters) <= MAX_PARAMETERS:
        return None
    shown: list[str] = []
    for parameter in docstring.parameters:
        name, _, default = parameter.partition("=")
        shown.append(f"`{name}` (default `{default}`)" if default else f"`{name}`")
    listed = " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
    return _within(Pair(f"Which arguments does `{docstring.name}` take?", f"`{docstring.name}` takes {listed}."))


def error_pair(docstring: Docstring, summary: str) -> Pair | None:
    """Asks for the first error that the documentation names, with its reason."""
    match = _RAISES_SECTION.search(docstring.text) or _RAISES_SENTENCE.search(docstring.text)
    if match is None:
        return None
    reason = " ".join(match["reason"].split())
    text = f"`{docstring.name}` raises `{match['error']}`: {reason}"
    return _within(Pair(f"Which error does `{docstring.name}` raise?", text))


def example_pair(docstring: Docstring, summary: str) -> Pair | None:
    """Asks for the documentation's example, up to the first line that uses the name and prints a result."""
    try:
        examples = doctest.DocTestParser().get_examples(docstring.text)
    except ValueError:  # prompts that are not indented alike
        return None
    own_name, shown = docstring.name.rpartition(".")[2], [f"An example of `{docstring.name}`:", ""]
    for example in examples:
        first, *rest = example.source.splitlines()
        shown += [f">>> {first}", *(f"... {line}" for line in rest), *example.want.splitlines()]
        if example.want and own_name in example.source:
            return _within(Pair(f"Give an example of `{docstring.name}`.", "\n".join(shown)))
    return None


def name_pair(docstring: Docstring, summary: str) -> Pair | None:
    """Asks for the name that the first sentence of the documentation describes."""
    match = _FIRST_SENTENCE.match(summary)
    sentence = match[0] if match else summary
    if docstring.name.rpartition(".")[2].lower() in sentence.lower():
        return None
    asked = f"Which {docstring.kind} is this? {sentence}"
    return Pair(asked, f"That is `{docstring.name}`.")


FORMS: Sequence[tuple[Callable[[Docstring, str], Pair | None], int]] = (
    (arguments_pair, 1),
    (error_pair, 3),
    (example_pair, 3),
    (name_pair, 1),
)
"""The forms other than the question for the purpose, each from a docstring and its summary, with its weight: few
docstrings have an error or an example."""


def _within(made: Pair) -> Pair | None:
    return made if len(made.answer) <= MAX_ANSWER_CHARS else None
