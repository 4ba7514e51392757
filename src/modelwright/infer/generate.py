"""The engine without a server: completions of many prompts at once, for rollouts, evaluation and data generation; and
tokens per second of two models as the engine serves them, with scheduler, cache and sampler, and decoding by one
operator wherever the engine does.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from torch.distributed.tensor import DTensor

from modelwright.core.config import ConfigError
from modelwright.infer.engine import Engine, EngineConfig
from modelwright.infer.sequence import Pixels, SamplingParams
from modelwright.model.decoder import Decoder
from modelwright.ops.microbenchmark import in_turn, seconds_of


@dataclass
class Completion:
    """The new tokens of one prompt, with their log-probabilities under the model, before temperature (nats).
    finish_reason: as in `StepOutput`.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    config: EngineConfig | None = None,
    *,
    images: Sequence[Sequence[Pixels]] = (),
    on_step: Callable[[int], None] = lambda num_finished: None,
) -> list[Completion]:
    """Generates one completion for each prompt, in order. params: one for each prompt; model: whole, with any weights;
    it may be in training mode and keeps its mode. Two calls with the same weights, prompts and seeds return the same
    completions. images: of each prompt, in the order of their tokens; empty for none. on_step: called after each step
    of the engine with the number of finished completions. Raises `ConfigError` for a prompt that the engine rejects,
    and for a model of which this rank holds only a part.
    """
    if len(model.blocks) < model.config.num_layers or any(isinstance(p, DTensor) for p in model.parameters()):
        raise ConfigError(
            "parallel: generation needs a whole model on every rank, and this layout divides the model; train with "
            "data parallelism alone (an objective says so in advance with needs = {WHOLE_MODEL}), or generate with "
            "ModelLayout.whole_model, which gathers it"
        )
    # The engine puts the model into evaluation mode.
    was_training = model.training
    try:
        # Not the fastest head: it is measured anew in each call, and two calls could then differ in the last bits.
        engine = Engine(model, config or EngineConfig(), head=model.logits)
        completions = [Completion() for _ in prompts]
        for number, (prompt, chosen) in enumerate(zip(prompts, params, strict=True)):
            engine.add(str(number), prompt, chosen, images=images[number] if images else ())
        num_finished = 0
        while engine.has_work:
            for output in engine.step():
                completion = completions[int(output.request_id)]
                completion.finish_reason = output.finish_reason
                num_finished += output.finished
                if output.finish_reason != "error":
                    completion.token_ids.append(output.token_id)
                    completion.logprobs.append(output.logprob)
            on_step(num_finished)
        return completions
    finally:
        model.train(was_training)


PROMPT_LEN = 32
"""Tokens that each stream has before its decoding is timed."""
WARMUP_STEPS, TIMED_STEPS = 2, 8
"""Untimed and timed steps of each round of decoding."""


@dataclass(frozen=True, kw_only=True)
class SpeedPair:
    """Tokens per second of the engine with either model, medians of alternated rounds. num_tokens: 1 for decoding, by
    `num_streams` streams at once; more for prompts of so many tokens.
    """

    num_streams: int
    num_tokens: int
    reference_tokens_per_s: float
    int8_tokens_per_s: float

    @property
    def ratio(self) -> float:
        return self.int8_tokens_per_s / self.reference_tokens_per_s


def measure_speed(
    reference: Decoder, other: Decoder, shapes: Sequence[tuple[int, int]], *, num_rounds: int = 7
) -> tuple[SpeedPair, ...]:
    """Time both models on the CPU, in turn. shapes: number of streams, and of tokens in each; prompts are cut to the
    shorter context of the two models.
    """
    longest = min(model.config.max_seq_len for model in (reference, other)) - 1
    shapes = [(num_streams, min(num_tokens, longest)) for num_streams, num_tokens in shapes]
    engines: dict[str, Engine] = {}
    for name, model in (("reference", reference), ("other", other)):
        config = EngineConfig(
            max_num_seqs=max(num_streams for num_streams, _ in shapes),
            kv_cache_tokens=2 * model.config.max_seq_len + sum(n * (length + 4 * PROMPT_LEN) for n, length in shapes),
            enable_prefix_caching=False,  # every round computes the same prompts again
        )
        engines[name] = Engine(model.eval(), config)
    pairs = []
    for num_streams, num_tokens in shapes:
        measures = {name: partial(_seconds, engine, num_streams, num_tokens) for name, engine in engines.items()}
        times = in_turn(measures, num_rounds=num_rounds, num_warmups=1)
        slow, fast = (num_streams * num_tokens / statistics.median(times[name]) for name in engines)
        pairs.append(
            SpeedPair(
                num_streams=num_streams, num_tokens=num_tokens, reference_tokens_per_s=slow, int8_tokens_per_s=fast
            )
        )
    return tuple(pairs)


def _seconds(engine: Engine, num_streams: int, num_tokens: int) -> float:
    """Seconds of one decoding step, or, for more than one token, of all prompts."""
    if num_tokens > 1:
        with _running(engine, num_streams, num_tokens, max_tokens=1):
            return seconds_of(partial(_drain, engine), "cpu")
    prompt_len = min(PROMPT_LEN, engine.max_seq_len // 2)
    # Short contexts leave room for fewer steps; one is timed in any case.
    num_steps = max(1, min(TIMED_STEPS, engine.max_seq_len - prompt_len - 2 * WARMUP_STEPS))
    with _running(engine, num_streams, prompt_len, max_tokens=engine.max_seq_len):
        while engine.has_work and len(engine.step()) < num_streams:
            pass  # prompts, in chunks
        times = [seconds_of(engine.step, "cpu") for _ in range(WARMUP_STEPS + num_steps)]
    return statistics.median(times[WARMUP_STEPS:])


def _drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


@contextmanager
def _running(engine: Engine, num_streams: int, num_tokens: int, *, max_tokens: int) -> Iterator[None]:
    names = [str(stream) for stream in range(num_streams)]
    for stream, name in enumerate(names):
        prompt = [(7 * stream + 3 * place) % engine.vocab_size for place in range(num_tokens)]
        engine.add(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0))
    try:
        yield
    finally:
        for name in names:
            engine.abort(name)
