"""`benchmarks/agent_loop.py`: loops of openai-agents against real servers, at a size where only the mechanics count."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("agents")

import agent_loop
import forked_commands
from added_package import add_agent_routes
from modelwright.cli.main import main
from modelwright.serve.config import ServeConfig
from modelwright.serve.engines.backends import engine_in_thread
from modelwright.serve.server import ServerThread
from modelwright_agents import tool_corpus
from modelwright_agents.tool_corpus import ToolRequest
from serve.conftest import make_model, make_served_tokenizer

TIDE = {"type": "object", "properties": {"town": {"type": "string", "maxLength": 4}}, "required": ["town"],
        "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "valid"), [
    ("look_up", '{"town": "Osadorf", "column": "area"}', True),
    ("look_up", '{"town": 3, "column": "area"}', False),
    ("look_up", '{"town": "Osadorf"}', False),
    ("look_up", '{"town": "Osa', False),
    ("other", "{}", False),
])  # fmt: skip
def test_validity(name: str, arguments: str, valid: bool):
    assert agent_loop.is_valid(name, arguments) is valid


@pytest.mark.slow
def test_forced_calls_of_a_random_model_are_valid_and_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("llguidance")
    add_agent_routes(tmp_path, monkeypatch)
    agent_loop.set_tracing_disabled(True)
    tool = {"type": "function", "function": {"name": "look_up", "description": "Finds a town.", "parameters": TIDE}}
    monkeypatch.setattr(agent_loop, "TOOLS", (tool,))
    monkeypatch.setattr(agent_loop, "MAX_TOKENS", 300)
    monkeypatch.setattr(agent_loop, "call_function", lambda name, arguments: f"high in {arguments['town']}")
    config = ServeConfig(port=0)
    client = engine_in_thread(make_model(4096), config)
    requests = [ToolRequest("How high is the water?", "look_up", {"town": "Barby"})] * 2
    with ServerThread(client, make_served_tokenizer(), config, model_name="tools") as server:
        row = asyncio.run(agent_loop.measure(server.url, requests, "required"))
        declined = asyncio.run(agent_loop.measure(server.url, requests[:1], "none"))
    assert (row["valid"], row["right"], row["right_and_answered"]) == (1, 0, 0)
    assert row["calls"] >= len(requests)
    assert [one["problem"] for one in row["wrong"]] == ["", ""]
    assert (declined["calls"], declined["valid"]) == (0, 0)


@pytest.mark.slow
def test_the_record_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The recipe with few conversations and steps, then the whole benchmark with servers in processes of their own."""
    monkeypatch.setattr(tool_corpus, "NUM_CONVERSATIONS", 60)
    monkeypatch.setattr(agent_loop, "MAX_TOKENS", 24)  # of a model that has learned nothing, and so never ends
    monkeypatch.setattr(forked_commands, "FORKED", (*forked_commands.FORKED, "modelwright.cli.entry"))
    run, out = tmp_path / "run", tmp_path / "record.json"
    words = ["--stages", "clean,tokenize,pack,pretrain,sft", "--pretrain.num_steps", "2", "--sft.num_steps", "3"]
    words += ["--model.num_layers", "1"]
    assert main(["run", "tools", "--run-dir", str(run), *words, "--hardware.num_threads", "1"]) == 0
    monkeypatch.setattr(sys, "argv", ["agent_loop.py", str(run), "--requests", "2", "--out", str(out)])
    agent_loop.main()
    record, shown = json.loads(out.read_text()), capsys.readouterr().out
    assert list(record["rows"]) == ["before", "before, calls required", "after"]
    for name, row in record["rows"].items():
        assert row["requests"] == 2
        assert 0 <= row["right_and_answered"] <= row["right"] <= row["valid"] <= 1
        assert name in shown
    assert record["training"]["steps"] == 3
    assert record["training"]["cpu_s"]["sft"] > 0
