"""What no file of the package may do, found in its syntax trees."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import modelwright

PACKAGE = Path(modelwright.__file__).parent
PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
"""Modules whose loading runs code that the data names."""
OBJECT_COLLECTIVES = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip
"""Functions of torch.distributed that unpickle what arrives."""


def violations(source: str) -> Iterator[str]:
    """Uses of pickle in a module: its imports, PyTorch's object collectives, and `torch.save` and `torch.load`."""
    for node in ast.walk(ast.parse(source)):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
            yield from (f"line {node.lineno}: {one.name}" for one in node.names if one.name in OBJECT_COLLECTIVES)
        yield from (f"line {node.lineno}: imports {name}" for name in modules if name.partition(".")[0] in PICKLES)
        if isinstance(node, ast.Attribute):
            is_file = isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in ("load", "save")
            if node.attr in OBJECT_COLLECTIVES or is_file:
                yield f"line {node.lineno}: {node.attr}"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, pickle as p",
        "from pickle import loads",
        "def f():\n    import dill",
        "from torch.distributed import all_gather_object as gather",
        "dist.broadcast_object_list(values)",
        "gather = torch.distributed.all_gather_object",
        "torch.load(path)",
    ],
)
def test_each_way_to_pickle_is_found(source: str) -> None:
    assert list(violations(source))


def test_similar_names_are_no_violation() -> None:
    assert not list(violations("import json\nfrom pickles import jar\nworld.gather_json(1)\nsafetensors.torch.load(x)"))


@pytest.mark.slow
def test_the_package_does_not_pickle() -> None:
    """Neither files nor messages between ranks: what arrives is data, never code."""
    paths = sorted(PACKAGE.rglob("*.py"))
    assert len(paths) > 100
    found = {str(path.relative_to(PACKAGE)): list(violations(path.read_text(encoding="utf-8"))) for path in paths}
    assert {name: lines for name, lines in found.items() if lines} == {}
