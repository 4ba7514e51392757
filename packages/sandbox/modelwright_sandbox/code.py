"""Reward for Python code that passes the record's test cases, run in the sandbox; the common forms of test cases in
data sets, and extraction of the program from an answer.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from modelwright.core.config import ConfigError
from modelwright.reward.reward import Reward, Sample, Score
from modelwright_sandbox.sandbox import Execution, Program, Sandbox, SandboxLimits

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


@dataclass(frozen=True)
class Task:
    """The programs of one sample, or its score if nothing has to run."""

    tests: CodeTests = dataclasses.field(default_factory=CodeTests)
    programs: Sequence[Program] = ()
    known_score: Score | None = None


@dataclass(frozen=True, kw_only=True)
class CodeConfig:
    """Reward by execution of the answer's code against test cases."""

    field: str = "tests"
    """Name of the record's field with the test cases: inputs and outputs, or assert statements."""
    score: Literal["all", "fraction"] = "all"
    """`all`: 1 if all test cases pass, else 0; `fraction`: the share of test cases that pass."""
    num_workers: int = 2
    """Number of programs that run at a time."""
    limits: SandboxLimits = dataclasses.field(default_factory=SandboxLimits)
    """Resource limits of each program."""

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ConfigError(f"num_workers: must be at least 1, got {self.num_workers}")

    def build(self, name: str) -> Reward:
        return Code(name, self, Sandbox(self.limits, num_workers=self.num_workers))


@dataclass(frozen=True)
class Code:
    name: str
    config: CodeConfig
    sandbox: Sandbox

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        tasks = list[Task]()
        for sample in samples:
            try:
                tests = read_tests(sample.fields.get(self.config.field))
            except ValueError as error:
                text = f"test cases in the field {self.config.field!r}: {error}"
                tasks.append(Task(known_score=Score.failure("no_tests", text)))
                continue
            source = extract_program(sample.answer)
            has_code = bool(source.strip())
            tasks.append(Task(tests, tests.programs(source)) if has_code else Task(known_score=Score(0.0, "no_code")))
        # One call for all samples, so that programs of different samples run in parallel; results come in the same
        # order.
        executions = iter(self.sandbox.run([program for task in tasks for program in task.programs]))
        return [task.known_score or self._score(task, [next(executions) for _ in task.programs]) for task in tasks]

    def _score(self, task: "Task", executions: Sequence[Execution]) -> Score:
        broken = next((one for one in executions if one.outcome == "not_started"), None)
        if broken:
            return Score.failure("not_started", broken.stderr)
        if task.tests.checks:
            num_passed = executions[0].num_passed
        else:
            pairs = zip(executions, task.tests.outputs, strict=True)
            num_passed = sum(one.outcome == "exit" and same_output(one.stdout, right) for one, right in pairs)
        fraction = num_passed / task.tests.count
        value = fraction if self.config.score == "fraction" else float(num_passed == task.tests.count)
        # The outcome of the first program that failed; `wrong` if all ended normally.
        worst = next((one.outcome for one in executions if one.outcome != "exit"), "wrong")
        return Score(value, "passed" if fraction == 1 else worst)


def read_tests(value: Any) -> CodeTests:
    """Parses test cases. Raises `ValueError` that names the problem."""
    if isinstance(value, str):
        text = value
        try:
            value = json.loads(text)  # tables store test cases as JSON; other text is code
        except (ValueError, RecursionError):
            value = None
        value = value if isinstance(value, (list, dict)) else [text]
    if isinstance(value, Mapping):
        inputs, outputs = value.get("inputs"), value.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError("inputs and outputs are not two lists of the same length")
        value = [{"input": one, "output": other} for one, other in zip(inputs, outputs, strict=True)]
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"not found; expected {FORMS}")
    if all(isinstance(case, str) and case.strip() for case in value):
        return CodeTests(checks=tuple(value))
    inputs, outputs = list[str](), list[str]()
    for number, case in enumerate(value, start=1):
        stdin, stdout = (case.get("input"), case.get("output")) if isinstance(case, Mapping) else (None, None)
        if not isinstance(stdin, str) or not isinstance(stdout, str):
            raise ValueError(f"number {number} is not in one of the forms {FORMS}")
        inputs.append(stdin)
        outputs.append(stdout)
    return CodeTests(inputs=tuple(inputs), outputs=tuple(outputs))


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
