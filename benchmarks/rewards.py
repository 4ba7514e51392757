"""Answers per second of each kind of reward, and of a plain Python process beside the sandbox.

    python benchmarks/rewards.py

Medians of several rounds, in which the kinds alternate.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from modelwright.core.resources import hardware, load
from modelwright.reward.build import build_reward
from modelwright.reward.reward import Reward, Sample
from modelwright_sandbox.code import Code, CodeConfig
from modelwright_sandbox.sandbox import KINDS, Sandbox, SandboxLimits

ROUNDS = 5
THOUGHTS = "First we add the numbers, 48 + 24 = 72, then we check the sum once more. " * 20
SOURCE = "print(sum(map(int, input().split())))"


def sample(answer: str, /, **fields: object) -> Sample:
    return Sample(prompt=[{"role": "user", "content": "?"}], answer=answer, num_tokens=300, fields=fields)


def rules(folder: Path) -> dict[str, tuple[Reward, Sample]]:
    """Each kind with an answer of about 1,500 characters."""
    (folder / "mine.py").write_text("def reward(sample):\n    return len(sample.answer)\n")
    schema = {"type": "object", "properties": {"steps": {"type": "array", "items": {"type": "string"}}}}
    steps = json.dumps({"steps": [THOUGHTS[i : i + 50] for i in range(0, len(THOUGHTS), 50)]})
    thinking = f"<think>{THOUGHTS}</think> <answer>72</answer>"
    kinds = {
        "exact_match": ({}, sample(THOUGHTS, answer=THOUGHTS)),
        "numeric_match": ({}, sample(f"{THOUGHTS} \\boxed{{72}}", answer="72")),
        "numeric_match, last number": ({"kind": "numeric_match"}, sample(THOUGHTS, answer="72")),
        "pattern": ({"pattern": "(?s)<think>.*</think>\\s*<answer>.*</answer>"}, sample(thinking)),
        "length": ({"max_len": 500}, sample(THOUGHTS)),
        "json": ({}, sample(steps)),
        "json, schema": ({"kind": "json", "schema_field": "schema"}, sample(steps, schema=schema)),
        "function": ({"path": f"{folder}/mine.py:reward"}, sample(THOUGHTS)),
    }
    return {name: (build_reward({name: options}), one) for name, (options, one) in kinds.items()}


def plain_process() -> None:
    subprocess.run([sys.executable, "-I", "-S", "-c", SOURCE], input=b"1 2", capture_output=True, check=True)


def rate(function: Callable[[], object], count: int) -> float:
    began = time.perf_counter()
    function()
    return count / (time.perf_counter() - began)


def main() -> None:
    rates = defaultdict[str, list[float]](list)
    limits = SandboxLimits()
    rewards = {
        f"code, {kind}, {workers} workers": Code(
            "code", CodeConfig(), Sandbox(limits, num_workers=workers, kinds=[kind])
        )
        for kind in KINDS
        for workers in (1, 2)
    }
    runs = [sample(SOURCE, tests=[{"input": "1 2", "output": "3"}])] * 20
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            for name, (reward, one) in rules(Path(folder)).items():
                rates[name].append(rate(lambda reward=reward, one=one: reward.score([one] * 200), 200))
            for name, reward in rewards.items():
                rates[name].append(rate(lambda reward=reward: reward.score(runs), len(runs)))
            rates["plain Python process"].append(rate(lambda: [plain_process() for _ in runs], len(runs)))
    for reward in rewards.values():
        reward.sandbox.close()
    print(f"{hardware()['processor']}, {hardware()['cores']} cores, load {load():.1f}; answers per second")
    for name, values in rates.items():
        print(f"{name:32}{statistics.median(values):12,.0f}")


if __name__ == "__main__":
    main()
