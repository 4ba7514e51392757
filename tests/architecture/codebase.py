"""The size and shape of the code, measured from its syntax trees: `python tests/architecture/codebase.py [FOLDER]`.

FOLDER is the root of a checkout (default: this one), so that two commits can be compared. `test_codebase.py` holds
these figures to limits that may only be lowered. Nothing of the project is imported except, for the number of settings,
its own list of them.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL_FILE_LINES = 60
LAYERS_CONTRACT = "layers"


@dataclass(frozen=True)
class Module:
    """One file of a package: its dotted name, its path and its text."""

    name: str
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree, walked once, because every figure looks at them."""
        return list(ast.walk(self.tree))

    @cached_property
    def functions(self) -> "list[ast.FunctionDef | ast.AsyncFunctionDef]":
        return [node for node in self.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def read_modules(folder: Path) -> dict[str, Module]:
    """The modules of the package in `folder`, by their dotted names."""
    modules = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [folder.name, *path.relative_to(folder).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = Module(name, path, path.read_text(encoding="utf-8"))
    return modules


def line_kinds(module: Module) -> Counter[str]:
    """How many lines are code, docstrings, imports, comments (whole lines) and blank; the kinds add up to the lines."""
    lines = module.text.splitlines()
    kinds = ["code" if line.strip() else "blank" for line in lines]
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
            kinds[token.start[0] - 1] = "comments"
    for node in module.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            kind = "imports"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            kind = "docstrings"
        else:
            continue
        for number in range(node.lineno - 1, node.end_lineno or node.lineno):
            kinds[number] = kind
    return Counter(kinds)


def imported_modules(module: Module, modules: Mapping[str, Module]) -> set[str]:
    """The modules of the package that a module imports, anywhere in it."""
    names = set()
    for node in module.nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names & modules.keys()


def called_once(module: Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Private functions and methods whose name occurs exactly once in their module besides their definition."""
    names = Counter(node.id for node in module.nodes if isinstance(node, ast.Name))
    names += Counter(node.attr for node in module.nodes if isinstance(node, ast.Attribute))
    return [one for one in module.functions if re.match("_[^_]", one.name) and names[one.name] == 1]


def num_settings(root: Path) -> int:
    """The settings of a run, shared ones once, as that checkout's own `modelwright` lists them."""
    code = "from modelwright.cli.config import listed_settings; print(len(listed_settings()))"
    listed = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(root / "src")}, cwd=root, capture_output=True, text=True
    )
    if listed.returncode:
        raise RuntimeError(listed.stderr)
    return int(listed.stdout)


def layer_levels(root: Path) -> dict[str, int]:
    """The level of each package of the main package, 1 for the lowest, by the contract of import-linter."""
    contracts = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(one["layers"] for one in contracts if one["type"] == LAYERS_CONTRACT)
    return {name.strip(): len(layers) - number for number, layer in enumerate(layers) for name in layer.split("|")}


@dataclass(frozen=True)
class Journey:
    """The way of one value through the calls of a package."""

    stays: int
    """Entries into a module that differs from the one before."""
    files: int
    climbs: int
    """Entries into a module on a higher layer than the one before."""


class Walker:
    """Follows a parameter through the calls that pass it on, or something made from it, in the order of the code.

    It reads names only: a value reaches what is assigned from an expression that contains it, and a call that takes it
    is followed where the callee is a function of the package that the module defines, imports by name, or reaches by
    the name of an imported module. Each function is walked once. Calls of methods are not followed.
    """

    def __init__(self, modules: Mapping[str, Module], levels: Mapping[str, int]) -> None:
        self._modules, self._levels = modules, levels
        self._defined = {
            name: {node.name: node for node in module.tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
            for name, module in modules.items()
        }
        self._stays: list[str] = []
        self._walked: set[tuple[str, str]] = set()

    def walk(self, module: str, function: str, parameter: str) -> Journey:
        self._enter(module, function, {parameter})
        levels = [self._levels[name.split(".")[1]] for name in self._stays]
        climbs = sum(after > before for before, after in pairwise(levels))
        return Journey(len(self._stays), len(set(self._stays)), climbs)

    def _enter(self, module: str, function: str, carried: set[str]) -> None:
        if not self._stays or self._stays[-1] != module:
            self._stays.append(module)
        node = self._defined[module].get(function)
        if (module, function) in self._walked or not isinstance(node, ast.FunctionDef):
            return
        self._walked.add((module, function))
        imported = self._imported(module)
        for statement in ast.walk(node):  # breadth first: names of outer statements are known before inner ones
            if isinstance(statement, ast.Assign | ast.AnnAssign | ast.For | ast.withitem | ast.NamedExpr):
                carried |= self._bound(statement, carried)
        for call in sorted(
            (one for one in ast.walk(node) if isinstance(one, ast.Call)),
            key=lambda one: (one.end_lineno or 0, one.end_col_offset or 0),  # inner calls run before outer ones
        ):
            self._follow(module, call, carried, imported)

    def _follow(self, module: str, call: ast.Call, carried: set[str], imported: Mapping[str, tuple[str, str]]) -> None:
        values = [*call.args, *(keyword.value for keyword in call.keywords)]
        names = [None] * len(call.args) + [keyword.arg for keyword in call.keywords]
        taken = [number for number, value in enumerate(values) if _mentions(value, carried)]
        if not taken:
            return
        if isinstance(call.func, ast.Name):
            target = imported.get(call.func.id, (module, call.func.id))
        elif isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            target = (".".join(imported.get(call.func.value.id, ("",))), call.func.attr)  # `cost.estimate(...)`
        else:
            return
        node = self._defined.get(target[0], {}).get(target[1])
        if not isinstance(node, ast.FunctionDef):
            return
        parameters = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
        chosen = {names[number] or parameters[min(number, len(parameters) - 1)] for number in taken if parameters}
        self._enter(*target, chosen | {names[number] or "" for number in taken})

    @cache  # noqa: B019  (a walker lives as long as its one walk)
    def _imported(self, module: str) -> dict[str, tuple[str, str]]:
        """Names that a module imports from the package, anywhere in it: the module and the name there."""
        return {
            alias.asname or alias.name: (node.module, alias.name)
            for node in self._modules[module].nodes
            if isinstance(node, ast.ImportFrom) and node.module in self._modules
            for alias in node.names
        }

    def _bound(self, statement: ast.AST, carried: set[str]) -> set[str]:
        """The names that a statement binds to the value or to something made from it."""
        pairs: list[tuple[ast.AST | None, ast.AST | None]] = []
        if isinstance(statement, ast.Assign):
            pairs = [(target, statement.value) for target in statement.targets]
        elif isinstance(statement, ast.AnnAssign | ast.NamedExpr):
            pairs = [(statement.target, statement.value)]
        elif isinstance(statement, ast.For):
            pairs = [(statement.target, statement.iter)]
        elif isinstance(statement, ast.withitem):
            pairs = [(statement.optional_vars, statement.context_expr)]
        return {
            node.id
            for target, value in pairs
            if target is not None and value is not None and _mentions(value, carried)
            for node in ast.walk(target)
            if isinstance(node, ast.Name)
        }


def _mentions(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(one, ast.Name) and one.id in names for one in ast.walk(node))


def measure(root: Path) -> dict[str, float]:
    """The figures of the main package in a checkout, by the name of the row."""
    modules = read_modules(root / "src" / "modelwright")
    kinds = sum((line_kinds(module) for module in modules.values()), Counter[str]())
    lines = kinds.total()
    importers = Counter(
        name for module in modules.values() for name in imported_modules(module, modules) if name != module.name
    )
    once = [one for module in modules.values() for one in called_once(module)]
    num_functions = sum(len(module.functions) for module in modules.values())
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    levels = layer_levels(root)
    words = Walker(modules, levels).walk("modelwright.cli.run", "run", "words")
    return {
        "lines": lines,
        **{f"lines of {kind}": kinds[kind] for kind in ("code", "docstrings", "imports", "comments", "blank")},
        "imports, % of lines": round(100 * kinds["imports"] / lines, 1),
        "comments, % of lines": round(100 * kinds["comments"] / lines, 2),
        "files": len(modules),
        f"files under {SMALL_FILE_LINES} lines": sum(
            len(module.text.splitlines()) < SMALL_FILE_LINES for module in modules.values()
        ),
        "files with one importer": sum(importers[name] == 1 for name in modules),
        "packages": len(levels),
        "functions": num_functions,
        "functions per 1,000 lines of code": round(1000 * num_functions / kinds["code"]),
        "private functions called once": len(once),
        "... of at most 6 lines": sum((one.end_lineno or 0) - one.lineno + 1 <= 6 for one in once),
        "settings": num_settings(root),
        "core dependencies": len(project["dependencies"]),
        "modules that the words of `run` pass": words.files,
        "moves between modules": words.stays - 1,
        "climbs to a higher layer": words.climbs,
    }


def satellites(root: Path) -> Iterator[tuple[str, int, int]]:
    """Name, lines and files of each package that is built onto the main one."""
    for project in sorted(root.glob("packages/*/pyproject.toml")):
        for folder in sorted(project.parent.glob("modelwright_*")):
            if (folder / "__init__.py").exists():
                modules = read_modules(folder).values()
                yield folder.name, sum(len(one.text.splitlines()) for one in modules), len(modules)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the size and shape of the code of one or more checkouts.")
    parser.add_argument("roots", nargs="*", type=Path, default=[ROOT], help="roots of checkouts, one column each")
    roots = parser.parse_args().roots
    columns = [measure(root.resolve()) for root in roots]
    for name in columns[0]:
        print(f"{name:<40}" + "".join(f"{column[name]:>12,}" for column in columns))
    for root in roots:
        print(*(f"{name}: {lines:,} lines, {files} files" for name, lines, files in satellites(root)), sep="\n")


if __name__ == "__main__":
    main()
