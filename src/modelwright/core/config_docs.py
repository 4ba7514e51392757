"""Documentation of settings: the string literals under the fields of config dataclasses, with types and defaults."""

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import yaml

from modelwright.core.config import dump, is_constant

WIDTH = 100
_UNITS = {
    "_bytes": "bytes",
    "_chars": "characters",
    "_fraction": "fraction, 0 to 1",
    "_minutes": "minutes",
    "_s": "seconds",
    "_steps": "steps",
    "_tokens": "tokens",
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Leaf key of a configuration. default: as plain data, or "required"; allowed: its type or its literal values."""

    key: str
    default: str
    allowed: str
    unit: str
    doc: str


def settings_of(cls: type, path: str = "") -> Iterator[Setting]:
    """Every leaf key of a config dataclass except constants, in the order of definition."""
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    for field in dataclasses.fields(cls):
        if is_constant(field):
            continue
        key = f"{path}.{field.name}" if path else field.name
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from settings_of(cast(type, hint), key)
            continue
        yield Setting(
            key=key,
            default=plain_value(default_of(field)) if has_default(field) else "required",
            allowed=allowed_values(hint),
            unit=next((unit for end, unit in _UNITS.items() if field.name.endswith(end)), ""),
            doc=docs.get(field.name, ""),
        )


def has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    assert field.default_factory is not dataclasses.MISSING, f"{field.name} has no default"
    return field.default_factory()


def defaults_of(cls: type) -> dict[str, Any]:
    """Defaults of a config dataclass as plain data; required fields are left out."""
    hints = typing.get_type_hints(cls)
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if is_constant(field):
            continue
        if dataclasses.is_dataclass(hints[field.name]):
            plain[field.name] = defaults_of(hints[field.name])
        elif has_default(field):
            plain[field.name] = dump(default_of(field))
    return plain


@functools.cache
def field_docs(cls: type) -> Mapping[str, str]:
    """Texts of the string literals under the fields, each as one line; those of base classes too. A class made by
    `make_dataclass`, which has no source, carries them as `metadata["doc"]` of its fields.
    """
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):  # so that a subclass's text for a field replaces its base's
        if not dataclasses.is_dataclass(base):
            continue
        in_metadata = {one.name: one.metadata["doc"] for one in dataclasses.fields(base) if "doc" in one.metadata}
        docs |= in_metadata
        if in_metadata:
            continue
        body = cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]).body
        for statement, following in itertools.pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                literal = following.value if isinstance(following, ast.Expr) else None
                if isinstance(literal, ast.Constant) and isinstance(literal.value, str):
                    docs[statement.target.id] = " ".join(literal.value.split())
    return docs


def allowed_values(hint: Any) -> str:
    """Describes a type annotation for a reader who does not know Python."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return ", ".join('""' if value == "" else plain_value(value) for value in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(allowed_values(arg) for arg in args)
    if origin is tuple:
        inner = " and ".join(allowed_values(arg) for arg in args if arg is not Ellipsis)
        return f"list of {inner}"
    names = {bool: "true or false", int: "integer", float: "number", str: "text"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def plain_value(value: Any) -> str:
    """Formats a value as YAML does on one line."""
    # PyYAML ends a document that is a single scalar with a line `...`.
    text = yaml.safe_dump(dump(value), default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def annotated_yaml(cls: type, plain: Mapping[str, Any], *, indent: int = 0) -> Iterator[str]:
    """YAML lines for the plain form of a config, each setting below its documentation."""
    hints, docs, pad = typing.get_type_hints(cls), field_docs(cls), " " * indent
    for key, value in plain.items():
        is_group = dataclasses.is_dataclass(hints[key])
        # A group without its own text is documented by the first paragraph of its class.
        text = docs.get(key) or (" ".join((hints[key].__doc__ or "").split("\n\n")[0].split()) if is_group else "")
        yield from (f"{pad}# {line}" for line in textwrap.wrap(text, WIDTH - len(pad)))
        if is_group and value:
            yield f"{pad}{key}:"
            yield from annotated_yaml(hints[key], cast(Mapping[str, Any], value), indent=indent + 2)
        else:
            yield f"{pad}{key}: {plain_value(value)}"
