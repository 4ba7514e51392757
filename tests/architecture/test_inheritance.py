"""Classes are abstract or final: none inherits the implementation of another concrete class of the package.

Open to subclasses are protocols, classes with abstract methods, exceptions, enums, and pydantic's models, whose
subclasses are how fields are shared.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import modelwright

PACKAGE = Path(modelwright.__file__).parent
OPEN_BASES = {"Protocol", "ABC", "Exception", "BaseException", "Enum", "IntEnum", "StrEnum", "BaseModel"}


def foreign_names(tree: ast.AST) -> set[str]:
    """Names that a file binds by importing from other packages."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] != PACKAGE.name:
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def parts(base: ast.expr) -> list[str]:
    """`nn.Module` as its names; a generic's without its parameters."""
    return ast.unparse(base.value if isinstance(base, ast.Subscript) else base).split(".")


def is_abstract(node: ast.ClassDef) -> bool:
    return any("abstractmethod" in ast.unparse(mark) for child in ast.walk(node)
               if isinstance(child, ast.FunctionDef) for mark in child.decorator_list)  # fmt: skip


def concrete_subclassing(sources: Mapping[str, str]) -> Iterator[str]:
    """Classes among all files that inherit from a concrete class of the same files."""
    trees = {path: ast.parse(source) for path, source in sources.items()}
    classes = [
        (path, node) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    own = {node.name: node for _, node in classes}

    def is_open(name: str) -> bool:
        if name not in own:
            return name in OPEN_BASES or name.endswith(("Error", "Exception"))
        bases = [parts(base)[-1] for base in own[name].bases]
        return is_abstract(own[name]) or any(base != name and is_open(base) for base in bases)

    for path, node in classes:
        foreign = foreign_names(trees[path])
        for base in map(parts, node.bases):
            if base[0] not in foreign and base[-1] in own and not is_open(base[-1]):
                yield f"{path}:{node.lineno}: {node.name}({base[-1]})"


SETTINGS = ["train/config.py: TrainConfig(SharedTrainConfig)"]
OF_A_STAGE = "Config(TrainConfig)"
"""Plain data without behavior: a stage has all the shared fields and its own."""


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("class A: pass\nclass B(A): pass", True),
        ("class A: pass\nclass B(Generic[T], A): pass", True),
        ("from modelwright import a\nclass A: pass\nclass B(a.A): pass", True),
        ("class A(Protocol): pass\nclass B(A): pass", False),
        ("class A(Protocol[T]): pass\nclass B(A[int]): pass", False),
        ("class A:\n    @abstractmethod\n    def f(self): ...\nclass B(A): pass", False),
        ("class A(ValueError): pass\nclass B(A): pass\nclass C(B): pass", False),
        ("from torch import nn\nclass Linear(nn.Linear): pass", False),
        ("class A(nn.Module): pass\nclass B(A): pass", True),
    ],
)
def test_small_packages(source: str, is_found: bool) -> None:
    assert bool(list(concrete_subclassing({"a.py": source}))) == is_found


@pytest.mark.slow
def test_the_package_composes_instead_of_inheriting() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    assert len(paths) > 100
    sources = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in paths}
    found = [re.sub(r":\d+", "", line) for line in concrete_subclassing(sources)]
    assert [line for line in found if not line.endswith(OF_A_STAGE)] == SETTINGS
