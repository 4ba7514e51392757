"""The latency of a decoded token, measured on the engine that serves: a model of the shape, random weights, and steps
of `infer/engine.py` timed one by one.

Random weights suffice, because the engine does the same work whatever the weights are, and no stop token is set.
"""

import time
from dataclasses import dataclass, replace

from modelwright.core.errors import ConfigError
from modelwright.infer.engine import Engine, EngineConfig
from modelwright.infer.sequence import SamplingParams
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.parallel.mesh import World

PATIENCE_ROUNDS, MAX_ROUNDS = 6, 30
"""Rounds of decoding go on until so many have not made the fastest step faster by more than `GAIN`, and end at the
latter number. The fastest step counts, because what else the machine does only ever adds time: with six processes on
two cores six measurements of a shape spread over 2% by the fastest step, and over 15% by the lower quartile."""
GAIN = 0.01
ROUND_TOKENS = 24
"""Timed tokens of each stream in a round."""
WARMUP_TOKENS = 4
"""Decoded tokens of a round that are not timed."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the engine decodes while it is timed."""

    engine: EngineConfig
    num_streams: int
    """Answers that are decoded at once."""
    prompt_len: int
    """Tokens of each prompt."""


def load_for(model: ModelConfig, engine: EngineConfig, num_streams: int) -> Load:
    """Prompts of half of the context, so that the cache's share of the time counts as in use."""
    prompt_len = max(1, min(model.max_seq_len // 2, model.max_seq_len - ROUND_TOKENS - WARMUP_TOKENS - 1))
    needed = num_streams * model.max_seq_len
    return Load(
        engine=replace(
            engine,
            kv_cache_tokens=max(engine.kv_cache_tokens, needed),
            max_num_seqs=max(engine.max_num_seqs, num_streams),
            enable_prefix_caching=False,
        ),
        num_streams=num_streams,
        prompt_len=prompt_len,
    )


def decode_latency_ms(shape: ModelConfig, load: Load, world: World) -> float:
    """Milliseconds of the fastest decoding step of a fresh engine with a model of this shape: what each of
    `load.num_streams` answers waits for a token at least.
    """
    model = Decoder(shape)
    model.init_weights(0)
    engine = Engine(model.to(world.device).eval(), load.engine)
    best_ms, last_gain = min(_step_times_ms(engine, load, 0)), 0
    for number in range(1, MAX_ROUNDS):
        if number - last_gain > PATIENCE_ROUNDS:
            break
        round_ms = min(_step_times_ms(engine, load, number))
        last_gain = number if round_ms < (1.0 - GAIN) * best_ms else last_gain
        best_ms = min(best_ms, round_ms)
    return best_ms


def _step_times_ms(engine: Engine, load: Load, number: int) -> list[float]:
    """The decoding steps of one round. Raises `ConfigError` if the answers never decode all at once."""
    params = SamplingParams(max_tokens=engine.max_seq_len, temperature=0.0)
    names = [f"{number}/{stream}" for stream in range(load.num_streams)]
    for stream, name in enumerate(names):
        engine.add(name, [(stream + number + place) % engine.vocab_size for place in range(load.prompt_len)], params)
    begun: set[str] = set()
    while len(begun) < load.num_streams and engine.has_work:  # prompts, in chunks
        begun |= {output.request_id for output in engine.step()}
    times: list[float] = []
    while engine.has_work and len(times) < WARMUP_TOKENS + ROUND_TOKENS:
        started = time.perf_counter()
        outputs = engine.step()  # the sampled tokens are on the host when it returns
        if len(outputs) < load.num_streams:
            break  # an answer has ended at the end of its context
        times.append(1e3 * (time.perf_counter() - started))
    for name in names:
        engine.abort(name)
    if not times:
        raise ConfigError(
            f"--streams: {load.num_streams} answers never decode together within a context of {engine.max_seq_len} "
            "tokens (model.max_seq_len); lower the one or raise the other"
        )
    return times[WARMUP_TOKENS:] or times
