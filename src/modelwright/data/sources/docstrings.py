"""Docstrings of Python modules: from source files by syntax tree, from compiled modules by inspection. Source files are
parsed, never imported.

Also the parameters of documented functions, and functions with their descriptions as pairs of text and code.
"""

import ast
import importlib
import inspect
import os
import re
import sys
import sysconfig
import textwrap
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

_BOUND = ("self", "cls")
_SIGNATURE = re.compile(r"\w[\w.]*\s*(\(.*\))\s*(?:->.*)?")
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
    match = _SIGNATURE.fullmatch(text.strip()) if not text.startswith("(") else None
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
