"""Test cases of a record in the common forms of data sets, and extraction of the program from an answer."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelwright_sandbox.sandbox import Program

FORMS = (
    '[{"input": ..., "output": ...}, ...], {"inputs": [...], "outputs": [...]}, or assert statements as a text or a '
    "list of texts"
)
_FENCED = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_PYTHON = {"python", "py", "python3", ""}


@dataclass(frozen=True)
class CodeTests:
    """Test cases: either standard inputs with their correct outputs, or checks that run after the program."""

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return len(self.inputs) + len(self.checks)

    def programs(self, source: str) -> list[Program]:
        """Returns one program for each input, or a single one for all checks."""
        if self.checks:
            return [Program(source=source, checks=self.checks)]
        return [Program(source=source, stdin=text) for text in self.inputs]


def read_tests(value: Any) -> CodeTests:
    """Parses test cases. Raises `ValueError` that names the problem."""
    if isinstance(value, str):
        value = _from_text(value)
    if isinstance(value, Mapping):
        inputs, outputs = value.get("inputs"), value.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError("inputs and outputs are not two lists of the same length")
        value = [{"input": one, "output": other} for one, other in zip(inputs, outputs, strict=True)]
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"not found; expected {FORMS}")
    if all(isinstance(case, str) and case.strip() for case in value):
        return CodeTests(checks=tuple(value))
    pairs = [_pair(number, case) for number, case in enumerate(value, start=1)]
    return CodeTests(inputs=tuple(one for one, _ in pairs), outputs=tuple(other for _, other in pairs))


def extract_program(answer: str) -> str:
    """Returns the last block of Python code, or the whole answer if it contains none; "" if a block does not end."""
    blocks = [(language, code) for language, code in _FENCED.findall(answer) if language.lower() in _PYTHON]
    if blocks:
        return blocks[-1][1]
    return "" if "```" in answer else answer


def same_output(one: str, other: str) -> bool:
    """Compares line by line, ignoring white space at the ends of lines and empty lines at the end."""
    return _lines(one) == _lines(other)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _from_text(text: str) -> Any:
    """Parses test cases that a table stores as JSON; other text is code."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return [text]
    return value if isinstance(value, (list, dict)) else [text]


def _pair(number: int, case: Any) -> tuple[str, str]:
    stdin, stdout = (case.get("input"), case.get("output")) if isinstance(case, Mapping) else (None, None)
    if not isinstance(stdin, str) or not isinstance(stdout, str):
        raise ValueError(f"number {number} is not in one of the forms {FORMS}")
    return stdin, stdout
