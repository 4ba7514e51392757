"""Agents call functions through a model of the recipe `tools`, before and after its fine-tuning.

`openai-agents` runs one loop per held-out request: it sends the question and the functions, runs the model's call,
sends the result, and takes the answer. A call is valid if its arguments fit the function's schema, and right if it is
the one that the request asks for; both are shares of the requests, so a request without a call counts against them.

    pip install openai-agents    # in an environment of its own: it wants openai below 3
    modelwright run tools --run-dir runs/tools
    python benchmarks/agent_loop.py runs/tools --out agent_loop.json

Another server of the fine-tuned model, such as llama.cpp's over its GGUF file, is measured beside them:

    modelwright export runs/tools --stage sft --to gguf tools.gguf
    llama-server -m tools.gguf --jinja --port 8080
    python benchmarks/agent_loop.py runs/tools --also llama.cpp=http://localhost:8080
"""

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
from agents import Agent, FunctionTool, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled  # pyright: ignore[reportMissingImports]
from agents.exceptions import AgentsException  # pyright: ignore[reportMissingImports]
from openai import AsyncOpenAI, OpenAIError

from modelwright.core.artifacts import RunDir, read_attempts
from modelwright.core.records import read_records
from modelwright.core.resources import versions
from modelwright_agents.tool_corpus import TOOLS, ToolRequest, call_function, draw_request
from modelwright_claims.results import circumstances

SEED = 20_000
"""Another seed than that of any conversation; the values, days and towns are held out as well."""
MAX_TOKENS = 96
MAX_TURNS = 4


@contextmanager
def served(run: str, stage: str) -> Iterator[str]:
    """Serves a stage's model in a process of its own; yields the address."""
    words = [sys.executable, "-m", "modelwright.cli.entry", "serve", run, "--stage", stage, "--port", "0"]
    with subprocess.Popen([*words, "--served-model-name", "tools"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if found := re.search(r"at (http://\S+) ", line):
                    yield found.group(1)
                    break
            else:
                raise SystemExit(f"the server of {stage} did not start; see its messages above")
        finally:
            process.terminate()


async def run_request(client: AsyncOpenAI, request: ToolRequest, tool_choice: str) -> dict[str, Any]:
    """Returns what a loop did: its calls as (name, arguments), its answer, and its error or ""."""
    calls: list[tuple[str, str]] = []

    def tool(description: Any) -> FunctionTool:
        async def invoke(_: Any, arguments: str) -> str:
            calls.append((description["name"], arguments))
            try:
                return call_function(description["name"], json.loads(arguments))
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                return f"error: {error}"[:200]

        return FunctionTool(
            name=description["name"], description=description["description"],
            params_json_schema=description["parameters"], on_invoke_tool=invoke, strict_json_schema=False,
        )  # fmt: skip

    settings = ModelSettings(temperature=0, max_tokens=MAX_TOKENS, tool_choice=tool_choice)
    agent = Agent(
        name="assistant", model=OpenAIChatCompletionsModel("tools", client), model_settings=settings,
        tools=[tool(one["function"]) for one in TOOLS],
    )  # fmt: skip
    answer, problem = "", ""
    try:
        answer = str((await Runner.run(agent, request.question, max_turns=MAX_TURNS)).final_output)
    except (AgentsException, OpenAIError) as error:
        problem = f"{type(error).__name__}: {error}"[:200]
    return {"question": request.question, "calls": calls, "answer": answer, "problem": problem}


def is_valid(name: str, arguments: str) -> bool:
    """True if the arguments of a call fit the schema of its function."""
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in TOOLS}
    try:
        jsonschema.validate(json.loads(arguments), schemas[name])
    except (ValueError, KeyError, jsonschema.ValidationError):
        return False
    return True


async def measure(address: str, requests: list[ToolRequest], tool_choice: str) -> dict[str, Any]:
    """Runs a loop per request, one after the other, and returns the shares with the loops that went wrong."""
    loops: list[dict[str, Any]] = []
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120) as client:
        for request in requests:
            loops.append(await run_request(client, request, tool_choice))
    valid = [bool(loop["calls"]) and all(is_valid(*call) for call in loop["calls"]) for loop in loops]
    right = [
        ok and len(loop["calls"]) == 1 and loop["calls"][0][0] == request.name
        and json.loads(loop["calls"][0][1]) == dict(request.arguments)
        for ok, loop, request in zip(valid, loops, requests, strict=True)
    ]  # fmt: skip
    results = [call_function(request.name, request.arguments) for request in requests]
    answered = [ok and result in loop["answer"] for ok, loop, result in zip(right, loops, results, strict=True)]
    num = len(requests)
    return {
        "requests": num,
        "calls": sum(len(loop["calls"]) for loop in loops),
        "valid": sum(valid) / num,
        "right": sum(right) / num,
        "right_and_answered": sum(answered) / num,
        "wrong": [loop for loop, ok in zip(loops, answered, strict=True) if not ok][:10],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="run directory of the recipe `tools`")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--also", action="append", default=[], metavar="NAME=URL", help="another server to measure")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    parsed = parser.parse_args()
    set_tracing_disabled(True)
    around = circumstances()
    dice = random.Random(SEED)
    requests = [draw_request(dice, "heldout") for _ in range(parsed.requests)]
    rows: dict[str, dict[str, Any]] = {}
    with served(parsed.run, "pretrain") as address:
        rows["before"] = asyncio.run(measure(address, requests, "auto"))
        rows["before, calls required"] = asyncio.run(measure(address, requests, "required"))
    with served(parsed.run, "sft") as address:
        rows["after"] = asyncio.run(measure(address, requests, "auto"))
    for name, _, address in (word.partition("=") for word in parsed.also):
        rows[f"after, {name}"] = asyncio.run(measure(address, requests, "auto"))
    around["versions"] |= versions("openai-agents", "openai")
    print(f"openai-agents {around['versions']['openai-agents']}, {len(requests)} held-out requests\n")
    print(f"{'':24}{'calls':>6}{'valid':>8}{'right':>8}{'answered':>10}")
    for name, row in rows.items():
        shares = f"{row['valid']:8.1%}{row['right']:8.1%}{row['right_and_answered']:10.1%}"
        print(f"{name:24}{row['calls']:6}{shares}")
    if parsed.out:
        run = RunDir(Path(parsed.run))
        stages = {name: read_attempts(run.stage(name)) for name in ("clean", "tokenize", "pack", "pretrain", "sft")}
        record = {"benchmark": "agent_loop", **around, "rows": rows, "training": {
            "steps": max(one["step"] for one in read_records(run.stage("sft").path / "metrics.jsonl")),
            **{f"{kind}_s": {name: round(sum(one.get(f"{kind}_s", 0) for one in attempts)) for name, attempts in
               stages.items()} for kind in ("wall", "cpu")},
        }}  # fmt: skip
        parsed.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
