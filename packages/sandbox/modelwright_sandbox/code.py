"""Reward for Python code that passes the record's test cases, run in the sandbox."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from modelwright.core.errors import ConfigError
from modelwright.reward.reward import Reward, Sample, Score
from modelwright_sandbox.code_tests import CodeTests, extract_program, read_tests, same_output
from modelwright_sandbox.sandbox import Execution, Program, Sandbox, SandboxLimits


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
        tasks = [self._task(sample) for sample in samples]
        # One call for all samples, so that programs of different samples run in parallel; results come in the same
        # order.
        executions = iter(self.sandbox.run([program for task in tasks for program in task.programs]))
        return [task.known_score or self._score(task, [next(executions) for _ in task.programs]) for task in tasks]

    def _task(self, sample: Sample) -> "Task":
        try:
            tests = read_tests(sample.fields.get(self.config.field))
        except ValueError as error:
            text = f"test cases in the field {self.config.field!r}: {error}"
            return Task(known_score=Score.failure("no_tests", text))
        source = extract_program(sample.answer)
        if not source.strip():
            return Task(known_score=Score(0.0, "no_code"))
        return Task(tests, tests.programs(source))

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
        return Score(value, "passed" if fraction == 1 else _worst(executions))


@dataclass(frozen=True)
class Task:
    """The programs of one sample, or its score if nothing has to run."""

    tests: CodeTests = dataclasses.field(default_factory=CodeTests)
    programs: Sequence[Program] = ()
    known_score: Score | None = None


def _worst(executions: Sequence[Execution]) -> str:
    """Returns the outcome of the first program that failed; `wrong` if all ended normally."""
    return next((one.outcome for one in executions if one.outcome != "exit"), "wrong")
