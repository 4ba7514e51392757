"""Parameters of a function: from its syntax tree, or from the signature that its documentation begins with."""

import ast
import re

_BOUND = ("self", "cls")
_SIGNATURE = re.compile(r"\w[\w.]*\s*(\(.*\))\s*(?:->.*)?")
_PLACEHOLDER = re.compile(r"\$\w+,?\s*")
"""Stands for the bound object in the signatures of compiled functions."""


def parameters_of(arguments: ast.arguments) -> tuple[str, ...]:
    """`src`, `follow=True`, `*rest`: the parameters as the definition has them, without annotations and without the
    object that a method is bound to.
    """
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    result = [_parameter(one, default) for one, default in zip(positional, defaults, strict=True)]
    if positional and positional[0].arg in _BOUND:
        del result[0]
    if arguments.vararg:
        result.append(f"*{arguments.vararg.arg}")
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    result += [_parameter(one, default) for one, default in pairs]
    if arguments.kwarg:
        result.append(f"**{arguments.kwarg.arg}")
    return tuple(result)


def parameters_of_signature(text: str) -> tuple[str, ...]:
    """The same from a signature such as `add(input, other, *, out=None) -> Tensor`, or the one that CPython keeps of a
    compiled function (`($module, obj, /)`); () for a text that is none.
    """
    match = _SIGNATURE.fullmatch(text.strip()) if not text.startswith("(") else None
    inside = match[1] if match else text.strip()
    if not inside.startswith("("):
        return ()
    try:
        (definition,) = ast.parse(f"def _{_PLACEHOLDER.sub('', inside)}: pass").body
    except (SyntaxError, ValueError):
        return ()
    return parameters_of(definition.args) if isinstance(definition, ast.FunctionDef) else ()


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    return argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"
