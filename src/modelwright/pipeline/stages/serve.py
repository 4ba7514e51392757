"""serve_check: starts the real server in its own process, queries it with the official client, and stops it with
SIGTERM.

Artifact: `answers.json`. Questions that leave no room for an answer in the model's context are skipped and counted.
Fails if the server does not start, answers wrongly, or does not exit with code 143.
"""

import json
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import RunDir, write_atomic
from modelwright.core.config import ConfigError, ModelwrightError, Stopped, constant, dump, flatten
from modelwright.data.clean.folder import read_kept
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.model.hf import load_config
from modelwright.pipeline.estimate.cost import StageEstimate
from modelwright.pipeline.report.results import NUM_SHOWN_ANSWERS, serving_highlight, serving_section
from modelwright.pipeline.stage import Rates, RunConfig, Stage, StageContext, StageSpec
from modelwright.pipeline.stages.clean import CLEAN
from modelwright.pipeline.stages.estimates import fixed_estimate
from modelwright.pipeline.stages.pack import final_model, needed_model
from modelwright.serve.config import RequestsConfig, ServeConfig
from modelwright.train.memory.activations import FP32_BYTES

ANSWERS = "answers.json"
LINE_LEN = 100
"""Characters of an answer on the terminal."""
SERVER_PROCESS_BYTES = 400 * 2**20
"""Memory of the server, and of each engine without its model: Python and the libraries."""
GREETING = "Hello! What can you do?"
"""Question that is asked when no held-out question exists or fits."""

_MAX_READ = 20_000
NOTHING_KEPT = RequestsConfig()
_URL = re.compile(r" at (https?://\S+)")


@dataclass(frozen=True, kw_only=True)
class ServeCheckConfig:
    """The stage `serve_check` starts the real server, asks it questions, records the answers and stops it."""

    questions: tuple[str, ...] = ()
    """Questions to ask."""
    num_validation_questions: int = constant(3)
    """Further questions, drawn from the validation question/answer pairs."""
    max_tokens: int = 64
    """Longest answer in tokens."""
    temperature: float = constant(0.0)
    """0 always takes the likeliest token."""
    start_timeout_s: float = constant(120.0)
    """Seconds for the server to load the model and answer `/health`."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.temperature < 0:
            raise ConfigError("max_tokens: must be at least 1, and temperature at least 0")
        if self.start_timeout_s <= 0:
            raise ConfigError(f"start_timeout_s: must be above 0, got {self.start_timeout_s}")


def _build(config: RunConfig, run: RunDir, present: Sequence[str]) -> Stage:
    check: ServeCheckConfig = config.section(SERVE_CHECK)
    name = final_model(config)

    def check_server(context: StageContext) -> None:
        folder = context.parents[name]
        questions = choose_questions(folder, context.parents[CLEAN.name], check)
        if questions.left_out:
            context.progress.note(f"server: {questions.left_out}")
        context.progress.begin("serve", len(questions.asked), "answers")
        server_config = replace(config.serve, port=0)  # any free port: the configured one may be in use
        with start_server(folder, server_config, context.folder.path, check.start_timeout_s) as server:
            answers = []
            for number, (question, reference) in enumerate(questions.asked, start=1):
                answers.append(_ask(server, config, question, reference, stream=False))
                context.progress.advance(number)
            streamed = [_ask(server, config, *first, stream=True) for first in questions.asked[:1]]
            metrics = _get(f"{server.url}/metrics")
            health = json.loads(_get(f"{server.url}/health"))
            model = json.loads(_get(f"{server.url}/v1/models"))["data"][0]
        context.progress.end()
        if server.exit_code != Stopped.exit_code:
            raise ModelwrightError(f"the server exited with code {server.exit_code} after SIGTERM; see {server.log}")
        # Sampled answers may differ: the batch in which a token is computed decides its last bits.
        if check.temperature == 0 and any(s["answer"] != a["answer"] for s, a in zip(streamed, answers, strict=False)):
            raise ModelwrightError("the streamed answer differs from the plain one, both at temperature 0: a bug")
        facts = {"start_s": server.start_s, "server_peak_bytes": server.peak_bytes, "health": health.get("status", "")}
        result = {
            "model": {name: model[name] for name in ("stage", "root", "digest")},
            "answers": answers,
            "streamed": streamed[0] if streamed else None,
            "left_out": questions.left_out,
            "num_metrics": len(metrics.splitlines()),
            **facts,
        }
        write_atomic(context.output.path / ANSWERS, json.dumps(result, indent=1, ensure_ascii=False))
        context.output.facts |= {"child_peak_bytes": server.peak_bytes, "num_answers": len(answers)}
        asked = f"{len(answers)} questions answered, one more as a stream" if answers else "nothing could be asked"
        context.progress.note(f"server: {asked} ({model['stage']}, sha256 {model['digest'][:12]}); stopped cleanly")

    return Stage(
        name=SERVE_CHECK.name,
        title=SERVE_CHECK.title,
        settings={"serve": dump(config.serve), "serve_check": dump(check)},
        parents=(CLEAN.name, name),
        run=check_server,
    )


@dataclass
class Server:
    """A running server: its address, seconds until it answered, and its outcome once it has ended."""

    url: str
    start_s: float
    process: subprocess.Popen
    peak_bytes: int = 0
    exit_code: int = -1
    log: Path = field(default_factory=Path)


@dataclass(frozen=True)
class Questions:
    """Questions for the server, each with its reference answer ("" for none), and the number of those that are too
    long.

    `room`: tokens of the context available to the prompt; `num_heldout`: held-out questions that were considered.
    """

    asked: list[tuple[str, str]]
    room: int
    num_heldout: int
    num_heldout_too_long: int
    num_configured_too_long: int

    @property
    def left_out(self) -> str:
        """Description of the skipped questions with the reason, "" if none was skipped."""
        parts = []
        if self.num_heldout_too_long:
            parts.append(f"{self.num_heldout_too_long:,} of {self.num_heldout:,} held-out questions")
        if self.num_configured_too_long:
            parts.append(f"{self.num_configured_too_long} of serve_check.questions")
        if not parts and self.asked:
            return ""
        why = f"longer than the {max(0, self.room):,} tokens that serve_check.max_tokens leaves of the model's context"
        return f"{' and '.join(parts or ['every question'])} left out: {why}"


def choose_questions(folder: Path, clean: Path, check: ServeCheckConfig) -> Questions:
    """Returns the configured questions and held-out ones, evenly spread over those that fit into the context of the
    model in `folder` together with an answer of `max_tokens`; a plain greeting if no held-out question exists or fits.
    """
    tokenizer = Tokenizer.load(folder)
    room = load_config(folder).max_seq_len - check.max_tokens

    def fits(question: str) -> bool:
        return len(tokenizer.chat.encode_prompt([{"role": "user", "content": question}])) <= room

    configured = [(question, "") for question in check.questions if fits(question)]
    pairs: list[tuple[str, str]] = []
    if check.num_validation_questions:
        documents = islice(read_kept(clean, split="heldout", kinds=("qa",)), _MAX_READ)
        pairs = [(str(one.meta["question"]), str(one.meta["answer"])) for one in documents if "question" in one.meta]
    fitting = [pair for pair in pairs if fits(pair[0])]
    # Spread over all of them: questions of one source follow each other.
    stride = max(1, len(fitting) // max(1, check.num_validation_questions))
    chosen = fitting[::stride][: check.num_validation_questions]
    if not chosen and fits(GREETING):
        chosen = [(GREETING, "")]
    return Questions(
        asked=configured + chosen,
        room=room,
        num_heldout=len(pairs),
        num_heldout_too_long=len(pairs) - len(fitting),
        num_configured_too_long=len(check.questions) - len(configured),
    )


@contextmanager
def start_server(
    folder: Path, server: ServeConfig, log_folder: Path, timeout_s: float, requests: RequestsConfig = NOTHING_KEPT
) -> Iterator[Server]:
    """Runs `modelwright serve folder` as a process; on exit it receives SIGTERM and its exit code is recorded."""
    settings = [*_options(dump(server)), *_options(dump(requests), "requests.")]
    command = [sys.executable, "-m", "modelwright.cli.main", "serve", str(folder), "--exit-with-parent", *settings]
    log = log_folder / "server.log"
    started = time.monotonic()
    with open(log, "w", encoding="utf-8") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            # The address is in the line that announces that the server is ready.
            urls: list[str] = []

            def read() -> None:
                assert process.stdout is not None
                for line in process.stdout:  # to the end: a full pipe would block the server
                    match = _URL.search(line)
                    if match and not urls:
                        urls.append(match[1])

            reader = threading.Thread(target=read, daemon=True)
            reader.start()
            deadline = time.monotonic() + timeout_s
            while not urls:
                if process.poll() is not None or time.monotonic() > deadline:
                    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                    last = lines[-1] if lines else "it said nothing"
                    what = "ended at once" if process.poll() is not None else f"did not answer within {timeout_s:g} s"
                    raise ModelwrightError(f"the server {what}: {last} (full log in {log})")
                time.sleep(0.02)
            running = Server(urls[0], time.monotonic() - started, process, log=log)
            yield running
            running.peak_bytes = _peak_bytes(process.pid)  # before the signal: /proc forgets a process that has ended
            process.send_signal(signal.SIGTERM)
            running.exit_code = process.wait(server.drain_timeout_s + 30)
        except subprocess.TimeoutExpired:
            raise ModelwrightError(f"the server did not exit after SIGTERM; see {log}") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdout:
                process.stdout.close()


def _ask(server: Server, config: RunConfig, question: str, reference: str, *, stream: bool) -> dict[str, Any]:
    """Asks a question with the official client, plain or streamed. Raises `ModelwrightError` if it is rejected."""
    from openai import OpenAI, OpenAIError

    result: dict[str, Any] = {"question": question, "reference": reference}
    try:
        # Without retries: a server that fails once must fail the stage.
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            model = client.models.list().data[0].id
            requested: dict[str, Any] = {
                "model": model,
                "messages": [{"role": "user", "content": question}],
                "max_tokens": config.section(SERVE_CHECK).max_tokens,
                "temperature": config.section(SERVE_CHECK).temperature,
                "seed": config.seed,
            }
            started = time.monotonic()
            if stream:
                pieces, first_s = [], 0.0
                for event in client.chat.completions.create(stream=True, **requested):
                    text = event.choices[0].delta.content if event.choices else None
                    if text:
                        first_s = first_s or time.monotonic() - started
                        pieces.append(text)
                result |= {"answer": "".join(pieces), "first_text_s": first_s, "num_pieces": len(pieces)}
            else:
                reply = client.chat.completions.create(**requested)
                result |= {
                    "answer": reply.choices[0].message.content or "",
                    "finish_reason": reply.choices[0].finish_reason,
                    "num_tokens": reply.usage.completion_tokens if reply.usage else 0,
                }
            return result | {"latency_s": time.monotonic() - started}
    except OpenAIError as error:
        shown = question if len(question) <= 80 else f"{question[:80]}..."
        raise ModelwrightError(f"the server did not answer {shown!r}: {error}; see {server.log}") from error


def _options(plain: dict[str, Any], prefix: str = "") -> list[str]:
    """Returns settings as options of the command line, without empty ones."""
    words = {name: str(value).lower() if isinstance(value, bool) else value for name, value in flatten(plain)}
    return [f"--{prefix}{name}={word}" for name, word in words.items() if word != ""]


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as reply:
        return reply.read().decode("utf-8")


def _peak_bytes(pid: int) -> int:
    """Adds up the peak memory of a process and of those that it has started."""
    folder = Path(f"/proc/{pid}")
    try:
        status = (folder / "status").read_text()
        children = [child for listed in folder.glob("task/*/children") for child in listed.read_text().split()]
    except OSError:
        return 0
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    return (int(match[1]) * 1024 if match else 0) + sum(_peak_bytes(int(child)) for child in children)


def _estimate(config: RunConfig, run: RunDir, rates: Rates) -> StageEstimate:
    # Peak memory: this process, or the server with its engines if they use more.
    model, num_engines = config.model, config.serve.engines
    cached = 2 * model.num_layers * model.num_kv_heads * model.head_dim * config.serve.engine.kv_cache_tokens
    engine_bytes = SERVER_PROCESS_BYTES + FP32_BYTES * (model.num_parameters + cached)
    served_bytes = SERVER_PROCESS_BYTES + num_engines * engine_bytes
    asking = fixed_estimate(SERVE_CHECK.name, seconds=20.0, library_bytes=70 * 2**20)
    return replace(asking, peak_bytes=max(asking.peak_bytes, served_bytes))


SERVE_CHECK = StageSpec(
    name="serve_check",
    title="Serving and asking",
    config=ServeCheckConfig,
    needs=lambda config: (CLEAN.name, *needed_model(config)),
    build=_build,
    extras=lambda config: {"serve_check": "serve"},
    estimate=_estimate,
    report=serving_section,
    highlight=serving_highlight,
    closing=lambda data, stage: [
        f"{one['question']} ▸ {textwrap.shorten(one['answer'], LINE_LEN, placeholder=' …')}"
        for one in stage.json(ANSWERS).get("answers", [])[:NUM_SHOWN_ANSWERS]
    ],
)
