"""Names: a class name means one thing, and spelling is American, as PyTorch's is."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

import modelwright

PACKAGE = Path(modelwright.__file__).parent
BRITISH = re.compile(
    r"(?i)\b\w*(?:quanti|normali|utili|initiali|optimi|minimi|maximi|penali|synchroni|seriali|summari|regulari|recogni|"
    r"generali|organi|reali|emphasi|speciali|visuali)s(?:e[ds]?|ing|er|ers|ation|ations)\b"
    r"|\b\w*(?:colour|behaviour|favour|neighbour|honour|labelled|labelling|cancelled|cancelling|travelled|artefact)\w*\b"
    r"|\bcentre[ds]?\b"
)


@pytest.mark.slow
def test_class_names_are_unique() -> None:
    files: dict[str, list[str]] = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(str(path.relative_to(PACKAGE)))
    assert not {name: found for name, found in files.items() if len(found) > 1}


@pytest.mark.slow
def test_spelling_is_american() -> None:
    """`normalise` would be found; `advise`, `precise` and `exercise` are the same everywhere."""
    assert BRITISH.search("it normalises")
    found = {
        str(path.relative_to(PACKAGE)): words
        for pattern in ("*.py", "*.cpp", "*.html", "*.js", "*.css")
        for path in PACKAGE.rglob(pattern)
        if (words := BRITISH.findall(path.read_text(encoding="utf-8")))
    }
    assert not found
