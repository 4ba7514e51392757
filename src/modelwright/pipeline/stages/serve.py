"""serve: the real server in a process of its own, asked by the official client, and stopped with SIGTERM.

Artifact: `answers.json`. Fails when the server does not start, answers wrongly, or does not leave with exit code 143.
"""

import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import write_atomic
from modelwright.core.config import dump
from modelwright.core.errors import ModelwrightError, Stopped
from modelwright.data.clean import read_kept
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.stage import Stage, StageContext
from modelwright.pipeline.stages.lineage import final_model
from modelwright.serve.config import ServeConfig

ANSWERS = "answers.json"
_URL = re.compile(r" at (https?://\S+)")


def serve_stage(config: RunConfig) -> Stage:
    """Asks the questions of the configuration and some held-out ones; see the module."""
    name = final_model(config)
    return Stage(
        name="serve",
        title="Serving and asking",
        settings=dump(config.serve),
        parents=("clean", name),
        run=lambda context: _run(context, config, context.parents[name]),
    )


@dataclass
class Server:
    """A running server: its address, seconds until it answered, and what is known once it has ended."""

    url: str
    start_s: float
    process: subprocess.Popen
    peak_bytes: int = 0
    exit_code: int = -1
    log: Path = field(default_factory=Path)


def _run(context: StageContext, config: RunConfig, folder: Path) -> None:
    check = config.serve
    asked = [(question, "") for question in check.questions]
    asked += _heldout_questions(context.parents["clean"], check.num_heldout_questions)
    context.progress.begin("serve", len(asked), "answers")
    with start_server(folder, replace(check.server, port=0), context.folder.path, check.start_timeout_s) as server:
        answers = []
        for number, (question, reference) in enumerate(asked, start=1):
            answers.append(_ask(server.url, config, question, reference, stream=False))
            context.progress.advance(number)
        streamed = _ask(server.url, config, asked[0][0], asked[0][1], stream=True)
        metrics = _get(f"{server.url}/metrics")
        health = json.loads(_get(f"{server.url}/health"))
    context.progress.end()
    if server.exit_code != Stopped.exit_code:
        raise ModelwrightError(f"the server left with exit code {server.exit_code} after SIGTERM; see {server.log}")
    if config.serve.temperature == 0 and streamed["answer"] != answers[0]["answer"]:
        raise ModelwrightError("the streamed answer differs from the plain one, both at temperature 0: a bug")
    facts = {"start_s": server.start_s, "server_peak_bytes": server.peak_bytes, "health": health.get("status", "")}
    result = {"answers": answers, "streamed": streamed, "num_metrics": len(metrics.splitlines()), **facts}
    write_atomic(context.output.path / ANSWERS, json.dumps(result, indent=1, ensure_ascii=False))
    context.output.facts |= {"child_peak_bytes": server.peak_bytes, "num_answers": len(answers)}
    context.progress.note(f"server: {len(answers)} questions answered, one more as a stream; stopped cleanly")


@contextmanager
def start_server(folder: Path, server: ServeConfig, log_folder: Path, timeout_s: float) -> Iterator[Server]:
    """`modelwright serve folder` as a process on a free port; on the way out SIGTERM, and its exit code is noted."""
    settings = [f"--{name}={value}" for name, value in _flat(dump(server)) if value != ""]
    command = [sys.executable, "-m", "modelwright.cli.main", "serve", str(folder), "--with-parent", *settings]
    log = log_folder / "server.log"
    started = time.monotonic()
    with open(log, "w", encoding="utf-8") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            url = _await_url(process, timeout_s, log)
            running = Server(url, time.monotonic() - started, process, log=log)
            yield running
            running.peak_bytes = _peak_bytes(process.pid)
            process.send_signal(signal.SIGTERM)
            running.exit_code = process.wait(server.drain_timeout_s + 30)
        except subprocess.TimeoutExpired:
            raise ModelwrightError(f"the server did not leave after SIGTERM; see {log}") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdout:
                process.stdout.close()


def _await_url(process: subprocess.Popen, timeout_s: float, log: Path) -> str:
    """The address from the line that says that the server answers."""
    found: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            match = _URL.search(line)
            if match and not found:
                found.append(match[1])

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    deadline = time.monotonic() + timeout_s
    while not found:
        if process.poll() is not None or time.monotonic() > deadline:
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
            what = "ended at once" if process.poll() is not None else f"did not answer within {timeout_s:g} s"
            raise ModelwrightError(f"the server {what}: {last[0]} (all of it in {log})")
        time.sleep(0.02)
    return found[0]


def _ask(url: str, config: RunConfig, question: str, reference: str, *, stream: bool) -> dict[str, Any]:
    """One question through the official client, plain or as a stream."""
    from openai import OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        model = client.models.list().data[0].id
        wanted: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": config.serve.max_tokens,
            "temperature": config.serve.temperature,
            "seed": config.seed,
        }
        started = time.monotonic()
        result: dict[str, Any] = {"question": question, "reference": reference}
        if stream:
            pieces, first_s = [], 0.0
            for event in client.chat.completions.create(stream=True, **wanted):
                text = event.choices[0].delta.content if event.choices else None
                if text:
                    first_s = first_s or time.monotonic() - started
                    pieces.append(text)
            result |= {"answer": "".join(pieces), "first_text_s": first_s, "num_pieces": len(pieces)}
        else:
            reply = client.chat.completions.create(**wanted)
            result |= {
                "answer": reply.choices[0].message.content or "",
                "finish_reason": reply.choices[0].finish_reason,
                "num_tokens": reply.usage.completion_tokens if reply.usage else 0,
            }
        return result | {"latency_s": time.monotonic() - started}


def _heldout_questions(clean: Path, number: int) -> list[tuple[str, str]]:
    """Held-out questions with their reference answers, evenly spread over what there is; a plain greeting if none."""
    every = [d for d in islice(read_kept(clean, split="heldout", kind="qa"), 20_000) if "question" in d.meta]
    stride = max(1, len(every) // max(1, number))
    chosen = every[::stride][:number] if number else []
    return [(str(d.meta["question"]), str(d.meta["answer"])) for d in chosen] or [("Hello! What can you do?", "")]


def _flat(data: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    result: list[tuple[str, Any]] = []
    for name, value in data.items():
        if isinstance(value, dict):
            result += _flat(value, f"{prefix}{name}.")
        else:
            result.append((prefix + name, str(value).lower() if isinstance(value, bool) else value))
    return result


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as reply:
        return reply.read().decode("utf-8")


def _peak_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(match[1]) * 1024 if match else 0
