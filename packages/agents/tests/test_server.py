"""The server as a process, with the official client, over a folder of runs."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from modelwright.core.artifacts import write_artifact
from modelwright.core.config import ConfigError
from modelwright_agents.command import COMMAND
from modelwright_agents.server import MAX_CHARACTERS, MAX_POINTS


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with a run of one finished stage, a link that leads out, and a file that is no run."""
    stage = tmp_path / "runs" / "first" / "sft"
    stage.mkdir(parents=True)
    (stage.parent / "run.json").write_text("{}")
    (stage.parent / "config.yaml").write_text("name: first\n")
    (stage / "stage.json").write_text(json.dumps({"digest": "d", "attempts": [{"state": "finished"}]}))
    records = [{"step": step, "loss": 3 - step / 1000, "kind": "x"} for step in range(1, 501)]
    lines = [json.dumps(record) for record in [*records, {"step": 501, "loss": None}]]
    (stage / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 5')
    (stage / "samples.jsonl").write_text("\n".join(json.dumps({"step": n, "text": "a" * 30_000}) for n in range(9)))
    with write_artifact(stage / "artifact", kind="model", digest="d") as draft:
        (draft.path / "x.txt").write_text("x")
        draft.facts["perplexity"] = 7.5
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "run.json").write_text("{}")
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "runs" / "notes.txt").write_text("x")
    return tmp_path / "runs"


async def ask(folder: Path, *calls: tuple[str, dict[str, Any]]) -> list[tuple[bool, Any]]:
    """Returns (is an error, value) of each call to a server of its own."""
    code = "import sys; from modelwright_agents.command import COMMAND; sys.exit(COMMAND.run(sys.argv[1:]))"
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ}
    words = StdioServerParameters(command=sys.executable, args=["-c", code, str(folder)], env=environment)
    results: list[tuple[bool, Any]] = []
    async with stdio_client(words) as (reading, writing), ClientSession(reading, writing) as session:
        await session.initialize()
        listed = await session.list_tools()
        assert all(tool.annotations and tool.annotations.readOnlyHint for tool in listed.tools)
        for name, arguments in calls:
            reply = await session.call_tool(name, arguments)
            texts = [part.text for part in reply.content]
            value = (reply.structuredContent or {}).get("result", reply.structuredContent)
            results.append((bool(reply.isError), texts if reply.isError else value))
    return results


def test_a_client_reads_a_run(runs: Path):
    sft = {"run": "first", "stage": "sft"}
    before = sorted((str(path), path.lstat().st_mtime_ns) for path in runs.rglob("*"))
    results = asyncio.run(ask(
        runs, ("list_runs", {}), ("read_settings", {"run": "first"}), ("list_metrics", sft),
        ("read_metric", {**sft, "metric": "loss"}), ("read_samples", sft), ("read_figures", sft),
    ))  # fmt: skip
    assert not any(is_error for is_error, _ in results), results
    listed, settings, metrics, curve, samples, figures = (value for _, value in results)
    assert listed == [{"run": "first", "stages": [{"stage": "sft", "state": "finished", "attempts": 1}]}]
    assert settings == "name: first\n"
    assert metrics == {"loss": {"points": 500, "first": 2.999, "last": 2.5, "smallest": 2.5}}
    assert (len(curve), curve[0], curve[-1]) == (MAX_POINTS, [1, 2.999], [500, 2.5])
    assert [sample["step"] for sample in samples] == [0, 2, 3, 5, 6, 8]
    assert len(samples[0]["text"]) < MAX_CHARACTERS + 100
    assert figures == {"perplexity": 7.5}
    assert before == sorted((str(path), path.lstat().st_mtime_ns) for path in runs.rglob("*"))


def test_names_lead_nowhere_else(runs: Path):
    bad = [("read_settings", {"run": name}) for name in ("../outside", "link", "/etc", "", "first/sft")]
    bad += [("list_metrics", {"run": "first", "stage": name}) for name in ("..", "../..", ".", "none")]
    bad += [("read_metric", {"run": "first", "stage": "sft", "metric": "kind"}), ("read_settings", {})]
    results = asyncio.run(ask(runs, *bad))
    assert all(is_error for is_error, _ in results), results
    assert not any("Traceback" in text for _, texts in results for text in texts)


def test_a_folder_that_is_none_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="none"):
        COMMAND.run([str(tmp_path / "none")])
