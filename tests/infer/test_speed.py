"""What the two models' speed is measured on: steps of the engine."""

from typing import Any

import pytest

from infer.engine_runs import make_model
from modelwright.infer import generate as speed
from modelwright.infer.engine import Engine


class Watch:
    """Stands for the timer: runs what is timed, notes what came of it, and takes half a second."""

    def __init__(self) -> None:
        self.timed: list[Any] = []

    def seconds_of(self, call: Any, device: str) -> float:
        self.timed.append(call())
        return 0.5


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    made = Watch()
    monkeypatch.setattr(speed, "seconds_of", made.seconds_of)
    return made


def test_timed_steps_of_decoding_give_a_token_to_every_stream(watch: Watch) -> None:
    pairs = speed.measure_speed(make_model(), make_model(num_layers=1), [(3, 1)], num_rounds=2)
    assert [pair.reference_tokens_per_s for pair in pairs] == [3 / 0.5]
    assert pairs[0].ratio == 1.0
    assert len(watch.timed) == 3 * 2 * (speed.WARMUP_STEPS + speed.TIMED_STEPS)
    assert all(len(outputs) == 3 for outputs in watch.timed)


def test_a_prompt_is_timed_whole_and_cut_to_the_context(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, steps, add, step = [], [], Engine.add, Engine.step
    monkeypatch.setattr(Engine, "add", lambda *given: (lengths.append(len(given[2])), add(*given))[1])
    monkeypatch.setattr(Engine, "step", lambda engine: steps.append(step(engine)) or steps[-1])
    (pair,) = speed.measure_speed(make_model(max_seq_len=80), make_model(), [(1, 256)], num_rounds=1)
    assert pair.num_tokens == 79
    assert set(lengths) == {79}
    assert pair.reference_tokens_per_s == 79 / 0.5
    assert sum(output.finished for outputs in steps for output in outputs) == 4  # two rounds of two models
    assert sum(output.num_cached_tokens for outputs in steps for output in outputs) == 0


def test_a_short_context_is_enough(watch: Watch) -> None:
    (pair,) = speed.measure_speed(make_model(max_seq_len=16), make_model(max_seq_len=16), [(2, 1)], num_rounds=1)
    assert pair.num_streams == 2
