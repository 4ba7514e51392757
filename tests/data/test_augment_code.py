"""Renaming and comment dropping on real modules: the compiled program is the same, apart from names of locals."""

import argparse
import csv
import dis
import heapq
import inspect
import json.decoder
import shutil
import textwrap
import types
from collections.abc import Iterator
from random import Random

import pytest

from modelwright.data.augment.comment_dropping import drop_comments
from modelwright.data.augment.identifier_renaming import rename_identifiers

MODULES = [argparse, csv, heapq, json.decoder, shutil, textwrap]


def instructions(code: types.CodeType) -> Iterator[object]:
    """All instructions, with local variables and those of enclosing functions by the order of their first use."""
    numbers: dict[object, int] = {}
    for step in dis.get_instructions(code):
        is_local = step.opcode in dis.haslocal or step.opcode in dis.hasfree
        if step.opname in ("MAKE_CELL", "LOAD_CLOSURE"):  # in the order of names
            yield step.opname
        elif is_local:
            yield step.opname, numbers.setdefault(step.argval, len(numbers))
        elif isinstance(step.argval, types.CodeType):
            yield step.opname, step.argval.co_name
        elif step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            yield step.opname
        else:
            yield step.opname, step.argval if isinstance(step.argval, str) else repr(step.argval)
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    yield code.co_name, parameters
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from instructions(constant)


def test_a_local_that_became_global_would_be_found() -> None:
    before, after = "def f():\n    a = 1\n    return a\n", "def f():\n    a = 1\n    return b\n"
    assert list(instructions(compile(before, "x", "exec"))) != list(instructions(compile(after, "x", "exec")))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_the_compiled_module_is_the_same(module: types.ModuleType, seed: int) -> None:
    source = inspect.getsource(module)
    renamed = rename_identifiers(source, 0.8, Random(seed))
    assert renamed is not None
    assert renamed != source
    assert renamed.count("\n") == source.count("\n")
    without = drop_comments(renamed, 0.5, Random(seed))
    assert without is not None
    expected = list(instructions(compile(source, "x", "exec")))
    assert list(instructions(compile(without, "x", "exec"))) == expected
