"""Requests made from /openapi.json by schemathesis, valid and invalid ones, against real servers: no 5xx.

    python benchmarks/api_fuzz.py [--cases 10000] [--minutes 18] [--seed 0]

A language model and a reward model, both small and random, run in servers of this process, each idle and then under
load from other clients. `schemathesis run` tests each with all its phases and modes for a quarter of the time. Every
answer has to have a status that /openapi.json names, with a body of the form that it names. Prints the number of cases
and what was wrong, and exits with 1 if anything was, if there were fewer cases, or if a server does not answer
afterwards.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import schemathesis
import torch
import yaml
from hypothesis import HealthCheck, Phase
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from api_fuzz_hooks import MODEL_VARIABLE, WRONG_MODEL_EVERY
from modelwright.data.tokenizer.tokenizer import TokenizerConfig, train_tokenizer
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.model.hf import SCORE
from modelwright.serve.config import ServeConfig
from modelwright.serve.engines.backends import engine_in_thread
from modelwright.serve.keys import ALL_SCOPES, key_hash
from modelwright.serve.load import ServedTokenizer
from modelwright.serve.server import ServerThread

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
KEY = "root"
TIMEOUT_S = 120.0
HEADERS = {"Authorization": f"Bearer {KEY}"}
TEXT = ["the quick brown fox jumps over the lazy dog", "größer — 日本語 🙂"]
NUM_CLIENTS = 4
"""Clients that make the load beside the tests."""
MODES = ("idle", "under load")
SCHEMATHESIS = (
    "--mode=all",
    "--phases=examples,coverage,fuzzing,stateful",
    "--continue-on-failure",
    "--no-color",
    "--workers=2",
)


@dataclass
class Findings:
    """Answers by route, mode and status, and for each kind of problem one example."""

    answers: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    problems: dict[tuple[str, str, int], str] = field(default_factory=dict)


def fuzz(url: str, model: str, num_cases: int, *, seed: int, headers: Mapping[str, str] = HEADERS) -> Findings:
    """About `num_cases` requests to the server at `url`, in equal shares for all routes with a body and half of them
    invalid. model: its name there, which most requests get.
    """
    findings = Findings()
    document = httpx.get(f"{url}/openapi.json", timeout=TIMEOUT_S).json()
    schema = schemathesis.openapi.from_dict(document)
    operations = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    with_bodies = [operation for operation in operations if operation.body]
    share = max(1, num_cases // (2 * len(with_bodies)))
    for operation, mode in itertools.product(operations, GenerationMode):
        count = share if operation.body else 2
        _send(url, operation, mode, count, findings, model=model, seed=seed, headers=headers)
    return findings


def _send(
    url: str,
    operation: Any,
    mode: GenerationMode,
    count: int,
    findings: Findings,
    *,
    model: str,
    seed: int,
    headers: Mapping[str, str],
) -> None:
    numbers = itertools.count(1)

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        is_named = isinstance(case.body, dict) and isinstance(case.body.get("model"), str)
        if is_named and next(numbers) % WRONG_MODEL_EVERY:
            case.body["model"] = model
        response = case.call(base_url=url, headers=dict(headers), timeout=TIMEOUT_S)
        findings.answers[operation.label, mode.name.lower(), response.status_code] += 1
        try:
            case.validate_response(response, checks=CHECKS)
        except (Failure, FailureGroup) as error:
            for one in getattr(error, "exceptions", [error]):
                kind = (operation.label, one.title, response.status_code)
                findings.problems.setdefault(kind, f"{one}\nfor {str(case.body)[:2000]}")

    try:
        send()
    except Unsatisfiable:
        return  # no request to this route can be invalid


@contextmanager
def small_server(*, scores: bool, context: int = 64) -> Iterator[ServerThread]:
    """A server of a random model, called "tiny", that asks for the key `KEY`, which may do everything."""
    tokenizer = train_tokenizer(TEXT, TokenizerConfig(vocab_size=300))
    config = ModelConfig(
        vocab_size=304, num_layers=2, model_dim=32, num_heads=2, num_kv_heads=1, head_dim=16, ffn_dim=64,
        max_seq_len=context, init_std=0.2, tie_embeddings=False,
    )  # fmt: skip
    model = Decoder(config)
    model.init_weights(0)
    if scores:
        model.heads[SCORE] = torch.nn.Linear(config.model_dim, 1, bias=False)
    with tempfile.TemporaryDirectory() as name:
        tokenizer.save(Path(name))
        served = ServedTokenizer.load(Path(name))
        keys = Path(name) / "keys.yaml"
        entry = {"name": KEY, "sha256": key_hash(KEY), "scopes": list(ALL_SCOPES)}
        keys.write_text(yaml.safe_dump({"keys": [entry]}), encoding="utf-8")
        settings = ServeConfig(port=0, keys_file=str(keys))
        with ServerThread(engine_in_thread(model, settings), served, settings, model_name="tiny") as server:
            yield server


@dataclass(frozen=True)
class Arm:
    """What schemathesis found on one server. failures: titles with routes; output: what it printed."""

    name: str
    num_cases: int
    failures: list[str]
    output: str


def run_schemathesis(url: str, name: str, seconds: float, folder: Path, *, seed: int) -> Arm:
    """All phases and modes of the command itself, which repeats its random phases until the time is spent."""
    report = folder / f"{name.replace(' ', '-')}.json"
    checks = ",".join(check.__name__ for check in CHECKS)
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", *SCHEMATHESIS, f"--checks={checks}",
        f"--max-time={max(1, round(seconds))}", f"--seed={seed}", f"--request-timeout={TIMEOUT_S:g}",
        "--header", f"Authorization: Bearer {KEY}", "--report=json", f"--report-json-path={report}",
        "--generation-database=none",
    ]  # fmt: skip
    hooks = {"SCHEMATHESIS_HOOKS": "api_fuzz_hooks", MODEL_VARIABLE: "tiny"}
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **hooks, "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)
    output = done.stdout + done.stderr
    if not report.exists():
        raise SystemExit(f"schemathesis made no report (exit code {done.returncode}):\n{output[-4000:]}")
    found = json.loads(report.read_text(encoding="utf-8"))
    problems = [f"{one['title']} x {one['count']}: {', '.join(one['operations'])}" for one in found["failures"]]
    problems += [f"{one['title']} x {one['count']}" for one in found["errors"]]
    if not found["complete"] or done.returncode not in (0, 1):
        problems.append(f"schemathesis has ended with {found['stop_reason']} (exit code {done.returncode})")
    return Arm(name, found["test_cases"]["generated"], problems, output)


def send_load(url: str, scores: bool, stop: Event) -> None:
    """A client that sends one request after the other."""
    route, body = "/v1/completions", {"prompt": "the quick", "max_tokens": 40, "stream": True}
    if scores:
        route, body = "/v1/score", {"text_1": "the quick", "text_2": ["brown fox"] * 8}
    with httpx.Client(base_url=url, headers=HEADERS, timeout=TIMEOUT_S) as client:
        while not stop.is_set():
            try:
                client.post(route, json={"model": "tiny", **body})
            except httpx.HTTPError:
                time.sleep(0.1)  # the server may close connections that it has no room for


@contextmanager
def load_beside(url: str, *, scores: bool, is_on: bool) -> Iterator[None]:
    """Clients in processes of their own while the block runs."""
    spawn = multiprocessing.get_context("spawn")
    stop = spawn.Event()
    clients = [
        spawn.Process(target=send_load, args=(url, scores, stop), daemon=True)
        for _ in range(NUM_CLIENTS if is_on else 0)
    ]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        stop.set()
        for client in clients:
            client.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="the least number that has to be run")
    parser.add_argument("--minutes", type=float, default=18.0, help="for all four servers together")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    num_cases, problems = 0, list[str]()
    arms = list(itertools.product((False, True), MODES))
    with tempfile.TemporaryDirectory() as folder:
        for number, (scores, mode) in enumerate(arms):
            name = f"{'reward' if scores else 'language'} model, {mode}"
            with small_server(scores=scores) as server:
                with load_beside(server.url, scores=scores, is_on=mode == MODES[1]):
                    seconds = 60 * options.minutes / len(arms)
                    arm = run_schemathesis(server.url, name, seconds, Path(folder), seed=options.seed + number)
                is_well = httpx.get(f"{server.url}/readyz", timeout=TIMEOUT_S).status_code == httpx.codes.OK
            print(f"{name}: {arm.num_cases} cases, {len(arm.failures)} kinds of problems", flush=True)
            if arm.failures:
                print(arm.output)
            num_cases += arm.num_cases
            problems += [f"{name}: {failure}" for failure in arm.failures]
            problems += [] if is_well else [f"{name}: the server is not ready afterwards"]
    problems += [f"{num_cases} cases, fewer than {options.cases}"] if num_cases < options.cases else []
    print("\n".join(problems) or f"{num_cases} cases, nothing wrong")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
