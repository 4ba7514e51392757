"""Where the time of a decode step goes: `python benchmarks/decode.py --profile`.

The operator's own clock (`DecodeStep.seconds`) divides its call; head, sampler and the whole step are timed from
outside. `call` is what Python spends on one call of the operator, `engine` what is left: scheduler, sequences, outputs.
Times are wall time, each the median over all steps, so that a step that something else interrupted does not count.
"""

import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from modelwright.compress.int8 import weight_bytes
from modelwright.infer import engine as engine_module
from modelwright.infer.decode_operator import DecodeOperator
from modelwright.infer.engine import Engine
from modelwright.ops.decode_step import PARTS, DecodeStep

RESULTS = Path(__file__).parent / "results"
COLUMNS = (*PARTS, "call", "head", "sampler", "engine", "step")


class Stopwatch:
    """Adds up the seconds of calls by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed."""

        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

        return timed


def step_of(engine: Engine) -> DecodeStep:
    """The kernel of an engine that decodes by one operator."""
    operator = engine._runner._operator
    assert isinstance(operator, DecodeOperator)
    return operator._step


@contextmanager
def profiled(engine: Engine) -> Iterator[Callable[[], dict[str, float]]]:
    """Within the block a function that makes a step of the engine and returns its seconds by `COLUMNS`."""
    watch, kernel = Stopwatch(), step_of(engine)
    hidden, logits, sample = DecodeOperator.hidden, DecodeOperator.logits, engine_module.sample  # pyright: ignore[reportPrivateImportUsage]

    def step() -> dict[str, float]:
        watch.seconds.clear()
        kernel.seconds = array("d", [0.0] * len(PARTS))
        watch.around("step", engine.step)()
        parts = dict(zip(PARTS, kernel.seconds, strict=True))
        call = watch.seconds.pop("hidden") - sum(parts.values())
        rest = watch.seconds["step"] - sum(parts.values()) - call - watch.seconds["head"] - watch.seconds["sampler"]
        return {**parts, "call": call, "engine": rest, **watch.seconds}

    try:
        with (
            mock.patch.object(DecodeOperator, "hidden", watch.around("hidden", hidden)),
            mock.patch.object(DecodeOperator, "logits", watch.around("head", logits)),
            mock.patch.object(engine_module, "sample", watch.around("sampler", sample)),
        ):
            yield step
    finally:
        kernel.seconds = None


def row(engine: Engine, steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Microseconds of each part in the median step, and how fast products read the weights, in GB/s: of the embedding
    few rows are read.
    """
    found = {name: 1e6 * statistics.median(step[name] for step in steps) for name in COLUMNS}
    model = engine.model
    num_bytes = weight_bytes(model) - (0 if model.config.tie_embeddings else weight_bytes(model.embedding))
    products = found["projections"] + found["feed-forward"] + found["head"]
    return {**found, "GB/s": num_bytes / products / 1e3}


def header() -> str:
    return f"{'streams':>7}  {'weights':<11}" + "".join(f"{name:>13}" for name in (*COLUMNS, "GB/s"))


def line(count: int, name: str, figures: Mapping[str, float]) -> str:
    """Microseconds, and each part's share of the step in percent."""
    cells = [f"{figures[one]:.0f} {100 * figures[one] / figures['step']:.0f}%" for one in COLUMNS]
    return f"{count:>7}  {name:<11}" + "".join(f"{cell:>13}" for cell in (*cells, f"{figures['GB/s']:.1f}"))
