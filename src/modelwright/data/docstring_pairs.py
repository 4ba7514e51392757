"""Functions of Python source files with what their docstrings say about them: pairs of text and code."""

import ast
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from modelwright.data.docstrings import MIN_CHARS, parse_documented

MIN_LINES = 2
"""Functions with shorter bodies, such as `pass`, say nothing."""


class DescribedCode(NamedTuple):
    """The first paragraph of a function's docstring, and the function without its docstring."""

    text: str
    code: str


def described_functions(source: str) -> Iterator[DescribedCode]:
    """The described functions and methods of a source file, in its order; none if it is no Python."""
    tree = parse_documented(source)
    if tree is None:
        return
    # Lines as the parser counts them: str.splitlines also ends a line at a form feed.
    lines = source.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in sorted(functions, key=lambda one: one.lineno):
        pair = _described(node, lines)
        if pair is not None:
            yield pair


def _described(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> DescribedCode | None:
    docstring = ast.get_docstring(node)
    if not docstring or len(node.body) < 2:
        return None
    text = " ".join(docstring.split("\n\n")[0].split())
    first, last = node.body[0].lineno, node.body[0].end_lineno or node.body[0].lineno
    body = [line for line in lines[last : node.end_lineno] if line.strip()]
    if len(text) < MIN_CHARS or len(body) < MIN_LINES or first <= node.lineno:
        return None
    code = [*lines[node.lineno - 1 : first - 1], *lines[last : node.end_lineno]]
    return DescribedCode(text, textwrap.dedent("\n".join(code)).strip("\n"))
