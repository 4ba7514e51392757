"""No file of a package imports itself, directly or through others, not even inside functions or for type checkers; and
the main package imports none that is built onto it.
"""

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

import modelwright

PACKAGE = Path(modelwright.__file__ or "").parent
ADDED = sorted(path.parent for path in PACKAGE.parents[1].glob("*/*/modelwright_*/__init__.py"))
"""The packages that are built onto the main one."""
Graph = Mapping[str, set[str]]
"""For each module, the modules of the package that it imports."""


def modules_of(folder: Path) -> dict[str, Path]:
    """The files of a package by their module's name; a package's own name stands for its `__init__.py`."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [folder.name, *path.relative_to(folder).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: Mapping[str, Path]) -> set[str]:
    """Modules among `known` that a file imports anywhere, by absolute or relative names.

    The packages around them are left out: their `__init__.py` are checked as modules where they are named.
    """
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            modules = names & known.keys()
            found |= modules if len(modules) == len(names) else {base, *modules}
    return found & known.keys()


def import_graph(folder: Path) -> Graph:
    known = modules_of(folder)
    return {name: imports(name, path, known) for name, path in known.items()}


def find_cycle(graph: Graph) -> list[str]:
    """The modules along one cycle, the first repeated at the end; empty when there is none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for other in sorted(graph[name]):
                if cycle := visit(other, [*path, name]):
                    return cycle
            done.add(name)
        return []

    return next(filter(None, (visit(name, []) for name in graph)), [])


def write_package(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in {"__init__.py": "", **files}.items():
        path = folder / "sample" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    return folder / "sample"


@pytest.mark.parametrize(
    ("files", "cycle"),
    [
        ({"a.py": "from sample.b import x", "b.py": "import sample.a"}, ["sample.a", "sample.b", "sample.a"]),
        ({"a.py": "from . import b", "b.py": "def f():\n    from .a import x"}, ["sample.a", "sample.b", "sample.a"]),
        ({"a.py": "from sample import b", "b.py": "if DEBUG:\n    import sample.a"},
         ["sample.a", "sample.b", "sample.a"]),
        ({"a.py": "import sample.a"}, ["sample.a", "sample.a"]),
        ({"sub/__init__.py": "from sample.sub.a import x", "sub/a.py": "import sample.sub"},
         ["sample.sub", "sample.sub.a", "sample.sub"]),
        ({"a.py": "from sample import b, c", "b.py": "from sample import c", "c.py": "import json"}, []),
        ({"a.py": "from sample.b import x", "b.py": "if TYPE_CHECKING:\n    from sample.a import y"},
         ["sample.a", "sample.b", "sample.a"]),
    ],
)  # fmt: skip
def test_cycles_of_small_packages(tmp_path: Path, files: dict[str, str], cycle: list[str]) -> None:
    assert find_cycle(import_graph(write_package(tmp_path, files))) == cycle


@pytest.mark.parametrize("package", [PACKAGE, *ADDED], ids=lambda package: package.name)
def test_a_package_has_no_cycle(package: Path) -> None:
    graph = import_graph(package)
    # Files of an added package may know only the main package, each by an entry point of its own.
    fewest = len(graph) / 2 if package == PACKAGE else 0
    assert sum(map(len, graph.values())) > fewest, "the graph must not be empty by mistake"
    assert find_cycle(graph) == []


def test_the_main_package_imports_none_that_is_built_onto_it() -> None:
    """They join through entry points alone, so that it runs without them."""
    assert {"modelwright_claims", "modelwright_vllm"} <= {package.name for package in ADDED}
    known = {name: path for package in ADDED for name, path in modules_of(package).items()}
    imported = {name: imports(name, path, known) for name, path in modules_of(PACKAGE).items()}
    assert {name: modules for name, modules in imported.items() if modules} == {}
