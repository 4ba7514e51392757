"""The engine: requests of token ids go in, tokens come out step by step.

One thread calls it. A request's tokens depend on the model, its prompt, its parameters and its seed, and not on what
else is running: see `model_runner`, `scheduler` and `batch_invariance`.
"""

import math
from collections.abc import Sequence as Ids
from dataclasses import dataclass, replace

import torch

from modelwright.core.errors import ConfigError
from modelwright.infer.batch_invariance import MULTIPLES, stable_row_multiple
from modelwright.infer.kv_cache import BlockManager, PagedCache
from modelwright.infer.lm_head import Product, fastest_head
from modelwright.infer.model_runner import CONTEXT_STEP, ModelRunner
from modelwright.infer.sampler import SampleRequest, sample
from modelwright.infer.scheduler import Scheduler
from modelwright.infer.sequence import SamplingParams, Sequence
from modelwright.model.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of the inference engine."""

    max_num_seqs: int = 32
    """Sequences that are computed at once."""
    kv_cache_tokens: int = 16_384
    """Tokens in the key/value cache, shared by all sequences; at least the model's `max_seq_len`."""
    block_size: int = 16
    """Tokens per cache block."""
    prefill_chunk_size: int = 256
    """Prompts are computed in chunks of this many tokens."""
    max_num_batched_tokens: int = 512
    """About how many prompt tokens join one step, so that long prompts do not hold up running answers."""
    batch_invariant: bool = True
    """Pad products so that load cannot change a request's bits; off, a lone stream decodes somewhat faster."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "kv_cache_tokens", "block_size", "prefill_chunk_size", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, got {getattr(self, name)}")
        if CONTEXT_STEP % self.block_size:
            raise ConfigError(f"block_size: must divide {CONTEXT_STEP}, got {self.block_size}; use 16")


@dataclass(frozen=True)
class StepOutput:
    """One new token of one request.

    `finish_reason`: "" while the request is running, else "stop" (a stop token, which is `token_id`), "length", or
    "error" (the model's output was not finite; `token_id` is meaningless then). `logprob` is under the model's own
    distribution, before temperature; `alternatives` are (token, log-probability), likeliest first.
    """

    request_id: str
    token_id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...]
    finish_reason: str

    @property
    def finished(self) -> bool:
        return self.finish_reason != ""


@dataclass(frozen=True)
class EngineStats:
    """Load of the engine."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_preemptions: int


class Engine:
    """Continuous batching over a paged cache.

    head: how logits are made. None takes the fastest way, which is measured, so that two engines may differ in the last
    bits.
    """

    def __init__(self, model: Decoder, config: EngineConfig, *, head: Product | None = None) -> None:
        self.config = config
        self.max_seq_len = model.config.max_seq_len
        self.vocab_size = model.config.vocab_size
        self.num_parameters = model.config.num_parameters
        num_blocks = config.kv_cache_tokens // config.block_size
        fewest = math.ceil(self.max_seq_len / config.block_size)
        if num_blocks < fewest:
            raise ConfigError(
                f"kv_cache_tokens: {config.kv_cache_tokens} cannot hold a sequence of {self.max_seq_len} tokens, the "
                f"context; raise it to at least {fewest * config.block_size}"
            )
        model.eval()
        weight = model.norm.weight
        cache = PagedCache(model.config, num_blocks, config.block_size, dtype=weight.dtype, device=weight.device)
        head = head or fastest_head(model)
        multiple = stable_row_multiple(model, head) if config.batch_invariant else 1
        self.is_batch_invariant = config.batch_invariant and multiple > 0
        self._runner = ModelRunner(model, head, cache, row_multiple=multiple or MULTIPLES[-1])
        self._scheduler = Scheduler(
            BlockManager(num_blocks, config.block_size),
            max_running=config.max_num_seqs,
            prefill_chunk=config.prefill_chunk_size,
            prefill_budget=config.max_num_batched_tokens,
        )
        self._sequences: dict[str, Sequence] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=scheduler.blocks.num_blocks,
            num_free_blocks=scheduler.blocks.num_free,
            num_preemptions=scheduler.num_preemptions,
        )

    def add(self, request_id: str, prompt_ids: Ids[int], params: SamplingParams) -> None:
        """Queue a request. `max_tokens` is capped by the context.

        Raises `ConfigError` when the id is in use, or the prompt is empty, holds unknown tokens or leaves no room.
        """
        if request_id in self._sequences:
            raise ConfigError(f"request_id: {request_id!r} is already running; choose another")
        prompt = [int(token) for token in prompt_ids]
        if not prompt:
            raise ConfigError("prompt: is empty; give at least one token")
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            raise ConfigError(f"prompt: token ids must be between 0 and {self.vocab_size - 1}")
        room = self.max_seq_len - len(prompt)
        if room < 1:
            raise ConfigError(
                f"prompt: has {len(prompt)} tokens; the model's context is {self.max_seq_len}; shorten it"
            )
        params = replace(params, max_tokens=min(params.max_tokens, room))
        sequence = Sequence(request_id, prompt, len(prompt), params)
        self._sequences[request_id] = sequence
        self._scheduler.add(sequence)

    def abort(self, request_id: str) -> bool:
        """Abort a request and free its cache; false if it is unknown (already finished)."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._scheduler.remove(sequence)
        return sequence is not None

    def step(self) -> list[StepOutput]:
        """Compute one step: at most one new token per running request. Without work there are no outputs."""
        if not self._sequences:
            return []
        sequences, logits_BV = self._runner.run(self._scheduler.plan())
        if not sequences:
            return []
        with torch.inference_mode():
            draws = sample(logits_BV, [SampleRequest(s.params, s.num_new, s.counts) for s in sequences])
        outputs = []
        for sequence, draw in zip(sequences, draws, strict=True):
            reason = sequence.append(draw.token_id) if math.isfinite(draw.logprob) else "error"
            outputs.append(StepOutput(sequence.request_id, draw.token_id, draw.logprob, draw.alternatives, reason))
            if reason:
                self.abort(sequence.request_id)
        return outputs
