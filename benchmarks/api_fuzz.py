"""Requests made from /openapi.json by schemathesis, valid and invalid ones, against real servers: no 5xx.

    python benchmarks/api_fuzz.py [--cases 10000] [--seed 0]

A language model and a reward model, both small and random, run in servers of this process. Every answer has to have a
status that /openapi.json names, with a body of the form that it names. Prints the number of answers by route and
status, and what was wrong, and exits with 1 if anything was.
"""

import argparse
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
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

from modelwright.data.tokenizer import TokenizerConfig, train_tokenizer
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.model.hf import SCORE
from modelwright.serve.config import ServeConfig
from modelwright.serve.engines import engine_in_thread
from modelwright.serve.keys import ALL_SCOPES, key_hash
from modelwright.serve.server import ServerThread
from modelwright.serve.tokenizer import Codec

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
KEY = "root"
TIMEOUT_S = 120.0
HEADERS = {"Authorization": f"Bearer {KEY}"}
TEXT = ["the quick brown fox jumps over the lazy dog", "größer — 日本語 🙂"]
WRONG_MODEL_EVERY = 8
"""One request of so many names a model that there is not."""


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
        codec = Codec.load(Path(name))
        keys = Path(name) / "keys.yaml"
        entry = {"name": KEY, "sha256": key_hash(KEY), "scopes": list(ALL_SCOPES)}
        keys.write_text(yaml.safe_dump({"keys": [entry]}), encoding="utf-8")
        settings = ServeConfig(port=0, keys_file=str(keys))
        with ServerThread(engine_in_thread(model, settings), codec, settings, model_name="tiny") as server:
            yield server


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    num_problems = 0
    for scores in (False, True):
        with small_server(scores=scores) as server:
            findings = fuzz(server.url, "tiny", options.cases // 2, seed=options.seed)
        print(f"{'reward' if scores else 'language'} model: {findings.answers.total()} answers")
        for (route, mode, status), count in sorted(findings.answers.items()):
            print(f"  {route:32} {mode:9} {status} {count:6}")
        for (route, title, status), example in findings.problems.items():
            print(f"PROBLEM {route} {status}: {title}\n{example}\n")
        num_problems += len(findings.problems)
    return 1 if num_problems else 0


if __name__ == "__main__":
    sys.exit(main())
