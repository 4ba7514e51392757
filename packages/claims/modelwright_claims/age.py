"""The age of a record, and whether the code that it measured has changed since: decided by git, not by the record.

Measured code is what a claim's `measure` reaches: the definitions that it uses in its module and in the modules of this
package, and those that these use by name of the product and of its packages. What the latter use in turn is left out,
or every change of the product would mark every record. Definitions are compared as syntax trees without docstrings, so
that comments, layout and moves change nothing.
"""

import ast
import importlib.util
import inspect
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from modelwright_claims.claim import Claim

PACKAGE, PRODUCT = "modelwright_claims", "modelwright"
JUDGING = tuple(f"{PACKAGE}.{name}" for name in ("claim", "judging", "statistics"))
"""Modules that judge stored samples; changing them changes no sample."""

Ages = Mapping[tuple[str, str], "Age"]
"""By name and commit of a record."""


@dataclass(frozen=True, kw_only=True)
class Age:
    """num_commits: commits since the measurement; changed: files with measured definitions that differ."""

    num_commits: int
    changed: Sequence[str]


def ages(claims: Sequence[Claim], records: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Age]:
    """The ages of all records whose commit the checkout of the claim's module knows."""
    by_name = {claim.name: claim for claim in claims}
    found: dict[tuple[str, str], Age] = {}
    for record in records:
        claim = by_name.get(record["name"])
        key = (record["name"], record["commit"])
        if claim and key not in found and (age := age_of(claim, record["commit"])):
            found[key] = age
    return found


def age_of(claim: Claim, commit: str) -> Age | None:
    """The age of a record of `claim` measured at `commit` (`-dirty` is ignored); None if git does not know it."""
    commit = commit.removesuffix("-dirty")
    folder = Path(inspect.getfile(claim.measure)).resolve().parent
    count = _git(folder, "rev-list", "--count", f"{commit}..HEAD") if commit else ""
    if not count:
        return None
    root = Path(_git(folder, "rev-parse", "--show-toplevel"))
    names_before = _changes(root, commit, _git(root, "rev-parse", "HEAD"))
    changed = []
    for file, names in sorted(measured_definitions(claim).items()):
        name = file.relative_to(root).as_posix() if file.is_relative_to(root) else ""
        if name in names_before:
            before, now = (
                _git(root, "show", f"{at}:{of}") for at, of in ((commit, names_before[name]), ("HEAD", name))
            )
            if before != now and dumped(before, names) != dumped(now, names):
                changed.append(name)
    return Age(num_commits=int(count), changed=changed)


@cache
def _changes(root: Path, commit: str, head: str) -> Mapping[str, str]:
    """The Python files that differ since `commit`, by their present names, with those that they had then."""
    words = iter(
        _git(root, "diff", "--name-status", "-M", "-l0", "--diff-filter=AMR", "-z", commit, head, "--", "*.py").split(
            "\0"
        )
    )
    names = dict[str, str]()
    for status in filter(None, words):
        before = next(words)
        names[next(words) if status.startswith("R") else before] = before
    return names


def measured_definitions(claim: Claim) -> dict[Path, set[str]]:
    """The names that the measured code begins with in each of its files."""
    own = Path(inspect.getfile(claim.measure)).resolve()
    found: dict[Path, set[str]] = defaultdict(set)
    pending = [(own, claim.measure.__name__)]
    while pending:
        file, name = pending.pop()
        if name in found[file]:
            continue
        found[file].add(name)
        if file == own or file.parent.name == PACKAGE:
            pending += _uses(file.read_text(encoding="utf-8"), name)
    return found


def dumped(text: str, names: Iterable[str]) -> set[str]:
    """The definitions of a module that these names reach, as texts without docstrings, comments and layout."""
    return {definition.text for definition in _reached(text, names)}


@dataclass(frozen=True)
class _Definition:
    """What binds a name at the top of a module."""

    name: str
    statement: ast.stmt

    @cached_property
    def text(self) -> str:
        """An import is the name of what it imports, which is compared where it stands."""
        if isinstance(self.statement, ast.Import | ast.ImportFrom):
            (imported,) = (one.name for one in self.statement.names if (one.asname or one.name) == self.name)
            return f"import {imported.rpartition('.')[2]} as {self.name}"
        for node in ast.walk(self.statement):
            if _is_docstring(node):
                node.value.value = ""  # pyright: ignore[reportAttributeAccessIssue]
        return ast.dump(self.statement)

    @cached_property
    def names(self) -> Mapping[str, set[str]]:
        """The names that it uses, with the attributes of each; a module that is started as a program has ""."""
        names = defaultdict[str, set[str]](set)
        for node in ast.walk(self.statement):
            if isinstance(node, ast.Name):
                names[node.id].update()
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                names[node.value.id].add(node.attr)
            elif isinstance(node, ast.Constant) and str(node.value).startswith(f"{PACKAGE}."):
                names[str(node.value)].add("")
        return names


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _uses(text: str, name: str) -> Iterator[tuple[Path, str]]:
    """The definitions of other files that one of a module uses: their files and names."""
    reached = _reached(text, [name])
    programs = {name for definition in reached for name, used in definition.names.items() if "" in used}
    yield from ((source, "") for program in programs if (source := _source(program)))
    for definition in reached:
        statement = definition.statement
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        (imported,) = (alias.name for alias in statement.names if (alias.asname or alias.name) == definition.name)
        module, names = getattr(statement, "module", None), {imported}
        path = f"{module}.{imported}" if module else imported
        if not module or _source(path):  # a module, of which attributes are used
            module, names = path, set().union(*(one.names.get(definition.name, ()) for one in reached))
        source = _source(module)
        if source and module not in JUDGING:
            yield from ((source, one) for one in names)


def _reached(text: str, names: Iterable[str]) -> list[_Definition]:
    """The definitions of a module that names need, and the statements that bind no name."""
    definitions, pending, found = _definitions(text), ["", *names], dict[str, Sequence[_Definition]]()
    while pending:
        name = pending.pop()
        if name not in found:
            found[name] = definitions.get(name, ())
            pending += [used for definition in found[name] for used in definition.names]
    return [definition for of_name in found.values() for definition in of_name]


@cache
def _definitions(text: str) -> Mapping[str, Sequence[_Definition]]:
    """The definitions of a module by name; by "" the statements that bind none, docstrings left out."""
    found = defaultdict[str, list[_Definition]](list)
    blocks = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for statement in ast.parse(text).body:
        bound = set[str]()
        for node in [statement] if isinstance(statement, blocks) else ast.walk(statement):
            if isinstance(node, blocks):
                bound.add(node.name)
            elif isinstance(node, ast.alias):
                bound.add(node.asname or node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound.add(node.id)
        for name in bound or ([] if _is_docstring(statement) else [""]):
            found[name].append(_Definition(name, statement))
    return found


@cache
def _source(module: str) -> Path | None:
    """The file of a module of the project; None for anything else."""
    if module.partition(".")[0].split("_")[0] != PRODUCT:
        return None
    try:
        spec = importlib.util.find_spec(module)
    except (ModuleNotFoundError, AttributeError):  # a name inside a module
        return None
    is_file = spec is not None and spec.origin and not spec.origin.endswith("__init__.py")
    return Path(spec.origin).resolve() if is_file and spec and spec.origin else None


@cache
def _git(folder: Path, *words: str) -> str:
    """Return the output of git; "" if it fails."""
    command = ["git", "-C", str(folder), "-c", "core.quotepath=off", *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
