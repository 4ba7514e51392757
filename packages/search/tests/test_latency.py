"""Latency: measured until the fastest step stands, and a promise is measured again before it counts as broken."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest

from modelwright.infer.engine import EngineConfig
from modelwright.parallel.mesh import single
from modelwright_search import candidates
from modelwright_search.candidates import decode_latency_ms, load_for
from modelwright_search.result import promise_of
from refusals import config_error
from tiny_decoder import make_config


def test_rounds_end_when_the_fastest_step_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def steps(engine: Any, load: Any, number: int) -> list[float]:
        seen.append(number)
        return [9.0, {0: 5.0, 2: 4.0, 3: 3.99}.get(number, 8.0)]

    monkeypatch.setattr(candidates, "PATIENCE_ROUNDS", 3)
    monkeypatch.setattr(candidates, "MAX_ROUNDS", 20)
    monkeypatch.setattr(candidates, "_step_times_ms", steps)
    shape = make_config()
    assert decode_latency_ms(shape, load_for(shape, EngineConfig(), 1), single()) == 3.99
    assert seen == [0, 1, 2, 3, 4, 5]  # the third gain is too small to count


@pytest.mark.parametrize("num_streams", [1, 3])
def test_the_serving_engine_is_measured(num_streams: int) -> None:
    shape = make_config()
    load = load_for(shape, EngineConfig(kv_cache_tokens=64), num_streams)
    assert load.prompt_len < shape.max_seq_len
    assert decode_latency_ms(shape, load, single()) > 0


def test_a_context_without_room_for_a_token_together_is_refused() -> None:
    shape = make_config(max_seq_len=2)
    with config_error("streams", match="--streams: 1 answers never decode together within a context of 2"):
        decode_latency_ms(shape, load_for(shape, EngineConfig(), 1), single())


@dataclass
class Clock:
    """Candidates whose measurements are given."""

    promised_ms: float
    measured: Iterator[float]

    def latency_ms(self, shape: Any) -> float:
        return self.promised_ms

    def measure(self, shape: Any) -> float:
        return next(self.measured)


@pytest.mark.parametrize(
    ("measured", "expected_ms", "is_kept"),
    [
        ([1.05], 1.05, True),
        ([1.5, 1.4, 1.02], 1.02, True),
        ([1.5, 1.4, 1.3], 1.3, False),
        ([0.8], 0.8, False),
    ],
)
def test_a_promise_is_measured_again_before_it_is_broken(
    measured: list[float], expected_ms: float, is_kept: bool
) -> None:
    promise = promise_of(cast(Any, Clock(1.0, iter(measured))), make_config())
    assert (promise.measured_ms, promise.is_kept) == (expected_ms, is_kept)
