"""Identifier renaming: other names for local variables of Python functions; the rest of the syntax tree stays.

Only names that are local to one function change. Parameters keep theirs, because callers may name them; attributes,
keyword arguments, imported names, strings and everything that a nested scope binds stay as well.
"""

import ast
import builtins
import keyword
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random

from modelwright.data.augment.augmentation import Augmentation, check_fraction, draw, text_augmentation

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (*_FUNCTIONS, ast.Lambda, ast.ClassDef, *_COMPREHENSIONS)
_SEES_NAMES = frozenset({"locals", "eval", "exec"})
"""Functions with which a program can read its local names; where one is used, no name changes."""
_SEES_NAMES_WITHOUT_ARGUMENTS = frozenset({"vars", "dir"})

_NAMES: Mapping[str, Sequence[str]] = {
    "index": ("index", "position", "place", "number", "step"),
    "element": ("item", "entry", "element", "each", "part"),
    "list": ("items", "entries", "elements", "parts", "values"),
    "dict": ("table", "mapping", "lookup", "index"),
    "set": ("unique", "seen", "members", "known"),
    "str": ("text", "label", "string", "phrase"),
    "number": ("number", "amount", "count", "total"),
    "bool": ("flag", "enabled", "is_set", "condition"),
    "resource": ("handle", "resource", "stream", "context"),
    "value": ("value", "result", "data", "output", "current", "temp", "outcome", "content"),
}
"""New names by the sort of value that is bound to them."""


@dataclass(frozen=True, kw_only=True)
class IdentifierRenamingConfig:
    """Other names for local variables of Python source."""

    fraction: float = 0.5
    """Fraction of the local variables that are renamed."""

    __post_init__ = check_fraction


def identifier_renaming(config: IdentifierRenamingConfig) -> Augmentation:
    return text_augmentation(
        "identifier_renaming",
        lambda text, rng: rename_identifiers(text, config.fraction, rng),
        keeps=("syntax_tree", "lines"),
        kinds=("code",),
    )


def rename_identifiers(source: str, fraction: float, rng: Random) -> str | None:
    """Renames local variables. Returns None for source without any that can change or other than Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
    used = _names_in(tree) | set(keyword.kwlist) | set(keyword.softkwlist) | set(dir(builtins))
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) if name in _SEES_NAMES:
                return None
            case ast.Call(func=ast.Name(id=name), args=[], keywords=[]) if name in _SEES_NAMES_WITHOUT_ARGUMENTS:
                return None
    variables = [
        (_sort_of(name, function), nodes)
        for function in _outermost_functions(tree)
        for name, nodes in local_variables(function).items()
    ]
    new_names: dict[tuple[int, int], str] = {}
    for sort, nodes in draw(variables, fraction, rng):
        pool = list(_NAMES[sort])
        rng.shuffle(pool)
        numbered = (f"{name}_{number}" for number in range(2, 1000) for name in pool)
        name = next(name for name in chain(pool, numbered) if name not in used)
        used.add(name)
        new_names |= {(node.lineno, node.col_offset): name for node in nodes}
    if not new_names:
        return None
    lines = [line.encode() for line in source.split("\n")]  # `ast` counts columns in bytes, lines from 1
    old: dict[tuple[int, int], str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and (node.lineno, node.col_offset) in new_names:
            old[node.lineno, node.col_offset] = node.id
            node.id = new_names[node.lineno, node.col_offset]
    for (number, column), name in sorted(old.items(), reverse=True):  # from the end, so that columns stay valid
        line = lines[number - 1]
        new = new_names[number, column].encode()
        lines[number - 1] = line[:column] + new + line[column + len(name.encode()) :]
    result = b"\n".join(lines).decode()
    assert ast.dump(ast.parse(result)) == ast.dump(tree)
    return result


def local_variables(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, list[ast.Name]]:
    """Returns all uses of each variable of a function that can be renamed, also those in nested functions.

    A name stays if it is bound otherwise than by assignment, or in a nested scope, or if it is used in an f-string,
    whose positions Python before 3.12 does not know.
    """
    nodes = [node for statement in function.body for node in ast.walk(statement)]
    own = list(_own_nodes(function.body))
    uses: dict[str, list[ast.Name]] = {}
    for node in nodes:
        if isinstance(node, ast.Name):
            uses.setdefault(node.id, []).append(node)
    bound = {node.id for node in own if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    inside_own = set(map(id, own))
    fixed = {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) if id(node) not in inside_own:
                fixed.add(name)
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                fixed.add(name)
            case ast.ClassDef(name=name) | ast.ExceptHandler(name=str(name)):
                fixed.add(name)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                fixed.add(name)
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                fixed |= set(names)
            case ast.alias(name=name, asname=other):
                fixed |= {other or name.partition(".")[0]}
            case ast.JoinedStr():
                fixed |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    # "_" means "unused" to linters and "__x" is mangled in a class.
    fixed |= {name for name in _names_in(ast.Module(list(function.body), [])) if name.startswith("_")}
    return {name: found for name, found in uses.items() if name in bound - fixed}


def _own_nodes(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Yields the nodes of a function's scope, without those of nested scopes."""
    for node in body:
        yield node
        if not isinstance(node, _SCOPES):
            yield from _own_nodes(list(ast.iter_child_nodes(node)))


def _outermost_functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yields the functions that are not nested: a nested one shares names with those around it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _FUNCTIONS):
            yield node
        else:
            yield from _outermost_functions(node)


def _names_in(tree: ast.AST) -> set[str]:
    """Returns every identifier of a tree, also those of attributes, arguments and imports."""
    names: set[str] = set()
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            values = value if isinstance(value, list) else [value]
            names |= {
                part for text in values if isinstance(text, str) for part in text.split(".") if part.isidentifier()
            }
    return names


def _sort_of(name: str, function: ast.AST) -> str:
    """Returns the key of `_NAMES` for a variable, from the first statement that binds it."""
    for node in ast.walk(function):
        match node:
            case ast.For(target=ast.Name(id=target), iter=ast.Call(func=ast.Name(id="range"))) if target == name:
                return "index"
            case ast.For(target=ast.Name(id=target)) | ast.AsyncFor(target=ast.Name(id=target)) if target == name:
                return "element"
            case ast.withitem(optional_vars=ast.Name(id=target)) if target == name:
                return "resource"
            case ast.AugAssign(
                target=ast.Name(id=target), op=ast.Add() | ast.Sub(), value=ast.Constant(value=int())
            ) if target == name:
                return "number"
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                return _sort_of_value(value)
            case ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value) if target == name:
                return _sort_of_value(value)
    return "value"


def _sort_of_value(value: ast.expr) -> str:
    match value:
        case ast.List() | ast.ListComp() | ast.Call(func=ast.Name(id="list" | "sorted")):
            return "list"
        case ast.Dict() | ast.DictComp() | ast.Call(func=ast.Name(id="dict")):
            return "dict"
        case ast.Set() | ast.SetComp() | ast.Call(func=ast.Name(id="set" | "frozenset")):
            return "set"
        case ast.Constant(value=bool()) | ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return "bool"
        case (
            ast.Constant(value=int() | float()) | ast.Call(func=ast.Name(id="len" | "sum" | "int" | "float" | "round"))
        ):
            return "number"
        case ast.Constant(value=str()) | ast.JoinedStr() | ast.Call(func=ast.Name(id="str" | "repr")):
            return "str"
        case ast.Call(func=ast.Attribute(attr="strip" | "lower" | "upper" | "format" | "replace" | "title")):
            return "str"
    return "value"
