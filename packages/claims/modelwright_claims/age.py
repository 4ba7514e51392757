"""The age of a record, and whether the code that it measured has changed since: decided by git, not by the record.

Measured code is the claim's module with the modules of this package that it imports, and the modules of the product
and of its packages that these name. What those import in turn is left out, or every change of the product would mark
every record.
"""

import ast
import importlib.util
import inspect
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
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
    """num_commits: commits since the measurement; num_files: measured files; changed: those of them that differ.

    A file that was only moved does not differ.
    """

    num_commits: int
    num_files: int
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
    files = sorted(set(measured_files(claim)))
    count = _git(files[0].parent, "rev-list", "--count", f"{commit}..HEAD") if commit else ""
    if not count:
        return None
    root = Path(_git(files[0].parent, "rev-parse", "--show-toplevel"))
    head = _git(root, "rev-parse", "HEAD")
    measured = {file.relative_to(root).as_posix() for file in files if file.is_relative_to(root)}
    changed = [name for name in _changes(root, commit, head) if name in measured]
    return Age(num_commits=int(count), num_files=len(files), changed=changed)


@cache
def _changes(root: Path, commit: str, head: str) -> Sequence[str]:
    """The Python files that differ since `commit`, by their present names. Those that only moved are left out."""
    options = ("--name-status", "--find-renames=100%", "-l0", "--diff-filter=AMR", "-z")
    words = iter(_git(root, "diff", *options, commit, head, "--", "*.py").split("\0"))
    names = list[str]()
    for status in words:
        if not status:
            continue
        name = next(words)
        if status.startswith("R"):
            next(words)  # its name now
        else:
            names.append(name)
    return names


def measured_files(claim: Claim) -> Iterator[Path]:
    """The files of the measured code."""
    pending, seen = [Path(inspect.getfile(claim.measure)).resolve()], set[Path]()
    while pending:
        file = pending.pop()
        if file in seen:
            continue
        seen.add(file)
        yield file
        for module in _imports(file):
            if (source := _source(module)) is None or module in JUDGING:
                continue
            if module.partition(".")[0] == PACKAGE:
                pending.append(source)
            else:
                yield source


def _imports(file: Path) -> Iterator[str]:
    """The modules of all packages of the project that a file imports, and names in them that are not modules."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (name for name in names if name.partition(".")[0].split("_")[0] == PRODUCT)


def _source(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ModuleNotFoundError, AttributeError):  # a name inside a module
        return None
    is_file = spec is not None and spec.origin and not spec.origin.endswith("__init__.py")
    return Path(spec.origin).resolve() if is_file and spec and spec.origin else None


def _git(folder: Path, *words: str) -> str:
    """Return the output of git; "" if it fails."""
    command = ["git", "-C", str(folder), "-c", "core.quotepath=off", *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
