"""Code in answers, scored by test cases in the forms of public data sets."""

import json
from collections.abc import Iterator

import pytest

from modelwright.core.config import ConfigError
from modelwright.reward.build import build_reward
from modelwright.reward.reward import Reward, Score
from modelwright_sandbox.code import CodeConfig, extract_program, read_tests, same_output
from modelwright_sandbox.sandbox import Launcher, SandboxError, SandboxLimits
from reward_samples import sample

LIMITS = SandboxLimits(cpu_s=1, wall_s=4, memory_bytes=200 << 20, num_processes=20)
PAIRS = [{"input": "1 2\n", "output": "3\n"}, {"input": "2 3\n", "output": "5"}]
ASSERTS = ["assert add(1, 2) == 3", "assert add(2, 3) == 5"]
SCRIPT = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
FUNCTION = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nIt adds."


@pytest.fixture(scope="module")
def reward() -> Iterator[Reward]:
    config = CodeConfig(limits=LIMITS)
    reward = config.build("code")
    yield reward
    reward.sandbox.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("answer", "tests", "value", "outcome"),
    [
        (SCRIPT, PAIRS, 1, "passed"),
        (SCRIPT, {"inputs": ["1 2", "2 3"], "outputs": ["3", "5"]}, 1, "passed"),
        (SCRIPT, json.dumps(PAIRS), 1, "passed"),
        (SCRIPT, [*PAIRS, {"input": "1 1", "output": "3"}], 0, "wrong"),
        (FUNCTION, ASSERTS, 1, "passed"),
        (FUNCTION, "def check(f):\n    assert f(1, 2) == 3\ncheck(add)", 1, "passed"),
        (FUNCTION, [*ASSERTS, "assert add(1, 1) == 3"], 0, "wrong"),
        ("def add(a, b): return a + b", ASSERTS, 1, "passed"),
        ("```python\ndef add(a, b): return 0\n```\nNo:\n" + FUNCTION, ASSERTS, 1, "passed"),
        ("```python\ndef add(a, b): return a +", ASSERTS, 0, "no_code"),
        ("", ASSERTS, 0, "no_code"),
        ("I do not know.", ASSERTS, 0, "error"),
        ("import sys; sys.exit(0)", ASSERTS, 0, "wrong"),
        ("import os; os._exit(0)", ASSERTS, 0, "wrong"),
        ("while True: pass", PAIRS, 0, "cpu_time"),
        ("x = bytearray(10 << 30)", PAIRS, 0, "memory"),
        ("import socket; socket.socket()", PAIRS, 0, "error"),
    ],
)
def test_scores(reward: Reward, answer: str, tests: object, value: float, outcome: str) -> None:
    (score,) = reward.score([sample(answer, tests=tests)])
    assert score in (Score(value, outcome), Score(value, outcome.replace("cpu", "wall")))


@pytest.mark.parametrize("tests", [None, [], "", " ", [1], [{"input": "1"}], {"inputs": ["1"], "outputs": []}, [""]])
def test_a_record_without_test_cases_is_a_failure(reward: Reward, tests: object) -> None:
    good = sample(FUNCTION, tests=ASSERTS)
    failed, score = reward.score([sample(FUNCTION, tests=tests), good])
    assert (failed.failed, failed.outcome) == (True, "no_tests")
    assert "test cases in the field 'tests'" in failed.detail
    assert score == Score(1, "passed")


def test_fractions() -> None:
    """Through settings, in a sum, with the outcomes counted."""
    limits = {"cpu_s": 1, "memory_bytes": "200MiB"}
    reward = build_reward({"code": {"score": "fraction", "weight": 2, "limits": limits}})
    broken = "def add(a, b):\n    return 3"
    samples = [sample(FUNCTION, tests=ASSERTS), sample(broken, tests=ASSERTS), sample("while 1: 1", tests=PAIRS)]
    result = reward.evaluate(samples)
    assert [score.value for score in result.scores] == [2, 1, 0]
    metrics = result.metrics()
    assert metrics["rewards/code/count/passed"] == metrics["rewards/code/count/wrong"] == 1
    assert metrics.get("rewards/code/count/cpu_time", 0) + metrics.get("rewards/code/count/wall_time", 0) == 1
    assert metrics["rewards/code/mean"] == 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": 0}, "rewards.code.num_workers: must be at least 1"),
        ({"limits": {"cpu_s": 0}}, "rewards.code.limits.cpu_s"),
    ],
)
def test_settings_that_cannot_work(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        build_reward({"code": options})


def test_a_broken_machine_is_a_failure_of_the_sample(reward: Reward, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(self: Launcher, program: object, limits: object) -> None:
        raise SandboxError("the launcher ended")

    monkeypatch.setattr(Launcher, "run", lose)
    (score,) = reward.score([sample(FUNCTION, tests=ASSERTS)])
    assert (score.failed, score.outcome, score.detail) == (True, "not_started", "the launcher ended")


def test_the_program_in_an_answer() -> None:
    assert extract_program("x") == "x"
    assert extract_program("```\nx\n```") == "x\n"
    assert extract_program("a\n  ```py\nx\n  ```\n```text\nresult\n```") == "x\n"
    assert extract_program("```json\n{}\n```") == ""
    assert extract_program("```python\nx") == ""


def test_outputs_differ_in_white_space_at_ends_only() -> None:
    assert same_output("1 \n2\n\n", "1\n2")
    assert not same_output("1\n\n2", "1\n2")
    assert not same_output(" 1", "1")
    assert not same_output("", "1")


def test_forms_of_test_cases() -> None:
    assert read_tests(PAIRS).count == 2
    assert read_tests("assert f() == 1").checks == ("assert f() == 1",)
    assert read_tests("[1]" + " == f()").checks == ("[1] == f()",)
    with pytest.raises(ValueError, match="number 2 is not in one of the forms"):
        read_tests([PAIRS[0], "assert x"])
