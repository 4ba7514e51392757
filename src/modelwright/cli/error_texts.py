"""The errors that this package can raise, with the texts that a user sees: read from the syntax trees of its files.

What is inserted into a text when an error is raised is shown as an ellipsis.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import modelwright

PACKAGE = Path(modelwright.__file__).parent
BASE = "ModelwrightError"
INSERTED = "…"
SELF_EXPLANATORY = ", got "
"""Errors with this text are left out: they name the setting, what is allowed and what was given."""
FEWEST_WORDS = 4
"""Of a clause of a docstring that says enough: not `if there is none`."""
OPTION_CAUSE = "The value of an option cannot be used, or the option does not go with another."
SETTING_CAUSE = "The value of a setting cannot be used, or does not go with another setting."


@dataclass(frozen=True, kw_only=True)
class KnownError:
    """One place that raises an error which has a remedy in its text."""

    module: str
    """The file within the package, as `plan/spot/plan`."""
    kind: str
    """The class of the error."""
    owner: str
    """The class in whose body it is raised, "" outside of one."""
    function: str
    """The innermost function around it, "" outside of one."""
    symptom: str
    remedy: str
    cause: str

    @property
    def package(self) -> str:
        return self.module.partition("/")[0]

    @property
    def text(self) -> str:
        return f"{self.symptom}; {self.remedy}"


@dataclass(frozen=True)
class _Raised:
    kind: str
    owner: str
    function: str
    doc: str
    """The docstring of the innermost function around it that has one, else of the class."""
    text: str


def known_errors() -> list[KnownError]:
    """All errors of the package with a remedy in their text, in the order of packages and files, each text once."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    classes = error_classes(trees.values())
    found: dict[tuple[str, str], KnownError] = {}
    for path, tree in trees.items():
        module = path.relative_to(PACKAGE).with_suffix("").as_posix()
        for raised in _raised(tree, classes):
            symptom, separator, remedy = raised.text.rpartition("; ")
            if separator and SELF_EXPLANATORY not in symptom:
                error = KnownError(
                    module=module,
                    kind=raised.kind,
                    owner=raised.owner,
                    function=raised.function,
                    symptom=symptom,
                    remedy=remedy,
                    cause=cause_of(raised.kind, symptom, raised.doc, classes),
                )
                found.setdefault((error.package, raised.text), error)
    return list(found.values())


def error_classes(trees: Iterable[ast.Module]) -> dict[str, str]:
    """The docstrings of the classes that derive from `ModelwrightError`, itself included."""
    nodes = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    bases = {name: {ast.unparse(base) for base in node.bases} for name, node in nodes.items()}
    names, size = {BASE}, 0
    while len(names) > size:
        size = len(names)
        names |= {name for name, above in bases.items() if above & names}
    return {name: (ast.get_docstring(nodes[name]) or "") if name in nodes else "" for name in names}


def cause_of(kind: str, symptom: str, doc: str, classes: Mapping[str, str]) -> str:
    """Why an error is raised: what its own text says after `because`, else what the docstring around it says of errors
    of its class (`Raises X if ...`), else what is wrong with options and settings in general, or what the class is for.
    """
    if because := re.search(r"\bbecause (.+)", symptom):
        return _sentence(because[1])
    others = "|".join(classes)
    clause = re.search(
        rf"`{kind}`,? (?:also )?(?:if|for|where|when) ((?:(?!`(?:{others})`)[^.;:])+)", " ".join(doc.split())
    )
    if clause:
        words = re.sub(r"(?:,|\s+(?:and|or))*\s*$", "", clause[1]).replace("`", "")
        words = re.sub(r"\b(and|or) (?:if|for|where|when) ", r"\1 ", words)
        if len(words.split()) >= FEWEST_WORDS:
            return _sentence(words)
    if kind == "ConfigError" and (place := re.match(r"(--)?[\w.…-]+(?:, [\w.-]+)*: ", symptom)):
        return OPTION_CAUSE if place[1] else SETTING_CAUSE
    return _sentence(re.split(r"[;.]", " ".join(classes[kind].split()))[0])


def _sentence(text: str) -> str:
    text = text.strip().rstrip(".")
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _raised(tree: ast.Module, classes: Mapping[str, str]) -> Iterator[_Raised]:
    """The errors of these classes that a module makes."""

    def visit(node: ast.AST, owner: str, function: str, doc: str) -> Iterator[_Raised]:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.ClassDef(name=name):
                    yield from visit(child, name, function, ast.get_docstring(child) or "")
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    yield from visit(child, owner, name, ast.get_docstring(child) or doc)
                case ast.Call(func=ast.Name(id=kind), args=[text, *_]) if kind in classes:
                    shown = " ".join(_shown(text).split())
                    if not shown.startswith(f"{INSERTED};"):  # the symptom is another error's text
                        yield _Raised(kind, owner, function, doc, shown)
                    yield from visit(child, owner, function, doc)
                case _:
                    yield from visit(child, owner, function, doc)

    return visit(tree, "", "", "")


def _shown(node: ast.expr) -> str:
    """A text as a user sees it, with an ellipsis for what is inserted."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return re.sub(f"{INSERTED}+", INSERTED, "".join(map(_shown, parts)))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _shown(left) + _shown(right)
        case _:
            return INSERTED
