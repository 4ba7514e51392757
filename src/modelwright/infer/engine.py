"""The engine: requests of token ids go in, tokens come out step by step.

One thread calls it. A request's tokens depend on the model, its prompt, its parameters and its seed, and not on what
else is running: see `model_runner`, `scheduler` and `products`.
"""

import math
from collections.abc import Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from modelwright.core.config import ConfigError, constant
from modelwright.infer.decode_operator import decode_operator
from modelwright.infer.graph_decoder import BLOCK_LEN, graph_decoder
from modelwright.infer.kv_cache import BlockManager, PagedCache, PrefixCache
from modelwright.infer.model_runner import CONTEXT_STEP, ModelRunner
from modelwright.infer.products import (
    MULTIPLES,
    Product,
    adapter_row_multiple,
    fastest_head_kind,
    head_of,
    stable_row_multiple,
)
from modelwright.infer.sampler import SampleRequest, sample
from modelwright.infer.scheduler import PromptLookup, Scheduler
from modelwright.infer.sequence import (
    Pixels,
    Pooling,
    SamplingParams,
    ScoredToken,
    Sequence,
    TokenConstraint,
    prompt_images,
)
from modelwright.model.adapter_bank import BASE, AdapterSet, PreparedAdapter
from modelwright.model.decoder import Decoder
from modelwright.model.hf import SCORE
from modelwright.ops.tensor_heap import use_tensor_heap


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of the inference engine."""

    max_num_seqs: int = 32
    """Sequences that are computed at once."""
    kv_cache_tokens: int = 16_384
    """Tokens in the key/value cache, shared by all sequences; at least the model's `max_seq_len`."""
    block_size: int = constant(16)
    """Tokens per cache block on a CPU; on CUDA a block has 64."""
    prefill_chunk_size: int = 256
    """Prompts are computed in chunks of this many tokens."""
    max_num_batched_tokens: int = constant(512)
    """About how many prompt tokens join one step, so that long prompts do not hold up running answers."""
    enable_prefix_caching: bool = True
    """Keep the keys and values of prompts for later ones that begin with the same chunks of `prefill_chunk_size`
    tokens. It changes no answer."""
    batch_invariant: bool = True
    """Pad products so that load cannot change a request's bits; off, a lone stream decodes somewhat faster."""
    num_speculative_tokens: int = 0
    """Draft tokens per sequence and step, guessed from its own earlier text and verified in the same pass (prompt
    lookup); 0 for none. It changes no token; it pays for answers that repeat what the prompt says, and needs
    `batch_invariant`."""

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 0:
            raise ConfigError(f"num_speculative_tokens: must not be negative, got {self.num_speculative_tokens}")
        if self.num_speculative_tokens and not self.batch_invariant:
            raise ConfigError(
                "num_speculative_tokens: needs batch_invariant, because without it verified tokens could differ from "
                "those that are decoded one by one; turn batch_invariant on, or set it to 0"
            )
        for name in ("max_num_seqs", "kv_cache_tokens", "block_size", "prefill_chunk_size", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, got {getattr(self, name)}")
        if CONTEXT_STEP % self.block_size:
            raise ConfigError(f"block_size: must divide {CONTEXT_STEP}, got {self.block_size}; use 16")

    def num_blocks(self, block_len: int, max_seq_len: int) -> int:
        """Returns the number of blocks of the cache. Raises `ConfigError` if they cannot hold one whole context."""
        num_blocks, fewest = math.ceil(self.kv_cache_tokens / block_len), math.ceil(max_seq_len / block_len)
        if num_blocks < fewest:
            raise ConfigError(
                f"kv_cache_tokens: {self.kv_cache_tokens} cannot hold a sequence of {max_seq_len} tokens, the context; "
                f"raise it to at least {fewest * block_len}"
            )
        return num_blocks


@dataclass(frozen=True)
class StepOutput:
    """Output of one step for one request: one new token, or the result of `Engine.embed`. `finish_reason`: "" while the
    request is running, else "stop" (a stop token, which is `token_id`), "length", "error" (the model's output was not
    finite; `token_id` is meaningless then), or "constraint" (its constraint can go no further; likewise). `logprob` is
    under the model's own distribution, before temperature; `alternatives` are (token, log-probability), likeliest
    first. `prompt_scores`: with the first token, if they were asked for. `embedding`: the answer to `Engine.embed`,
    else empty. `num_cached_tokens`: tokens of the prompt that did not have to be computed.
    """

    request_id: str
    token_id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...]
    finish_reason: str
    prompt_scores: tuple[ScoredToken, ...] = ()
    embedding: tuple[float, ...] = ()
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason != ""


@dataclass(frozen=True)
class EngineStats:
    """Load of the engine. Prefix queries and hits are prompt tokens that were looked up and found in the cache since
    the start; drafts are the verified guesses of several tokens each, with the number of their tokens that were
    accepted.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_preemptions: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class Engine:
    """Continuous batching over a paged cache. head: product that makes the logits. None takes the fastest, which is
    measured, so that two engines may differ in the last bits. adapters: those that requests may name
    (`model/adapter_bank.py`).
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        *,
        head: Product | None = None,
        adapters: Mapping[str, PreparedAdapter] | None = None,
    ) -> None:
        use_tensor_heap()  # before the cache is made, and before the first long prompt
        self.config = config
        self.model = model
        self.adapters = AdapterSet(model)
        self.max_seq_len = model.config.max_seq_len
        self.vocab_size = model.config.vocab_size
        self.num_parameters = model.config.num_parameters
        self.score_head = dict(model.heads.items()).get(SCORE)
        """Head of a model that scores texts instead of generating any; None for a language model."""
        rope = model.config.rope
        # At this length LongRoPE changes from its short to its long factors; 0 where the model never changes them.
        self._switch_len = rope.original_max_len + 1 if rope.kind == "longrope" else 0
        weight = model.norm.weight
        block_len = BLOCK_LEN if weight.is_cuda else config.block_size
        num_blocks = config.num_blocks(block_len, self.max_seq_len)
        model.eval()
        cache = PagedCache(
            model.config, num_blocks, block_len, dtype=weight.dtype, device=weight.device, heads_first=weight.is_cuda
        )
        head = head or head_of(model, fastest_head_kind(model))
        # Measured with the head that serves: each kernel has its own row counts at which it sums in another order.
        multiple = stable_row_multiple(model, head) if config.batch_invariant else 1
        self.is_batch_invariant = config.batch_invariant and multiple > 0
        self.row_multiple = multiple or MULTIPLES[-1]
        if config.num_speculative_tokens and self.score_head is not None:
            raise ConfigError("num_speculative_tokens: this model scores texts and generates none; set it to 0")
        if config.num_speculative_tokens and not multiple:
            raise ConfigError(
                "num_speculative_tokens: on this machine no padding makes products independent of the number of rows, "
                "so verified tokens could differ from those that are decoded one by one; set it to 0"
            )
        operator, self.why_no_operator = (
            graph_decoder(model, cache, head, self.row_multiple) if weight.is_cuda else decode_operator(model, cache)
        )
        """Reason why PyTorch's operators decode; "" if the project's own operator does."""
        self._runner = ModelRunner(model, head, cache, self.adapters, row_multiple=self.row_multiple, operator=operator)
        blocks = BlockManager(num_blocks, block_len)
        self._lookup = PromptLookup(config.num_speculative_tokens, self._switch_len)
        self._scheduler = Scheduler(
            blocks,
            PrefixCache(blocks, rope, prefill_chunk=config.prefill_chunk_size, enabled=config.enable_prefix_caching),
            max_running=config.max_num_seqs,
            prefill_chunk=config.prefill_chunk_size,
            prefill_budget=config.max_num_batched_tokens,
            lookup=self._lookup,
        )
        self._sequences: dict[str, Sequence] = {}
        for name, adapter in (adapters or {}).items():
            self.add_adapter(name, adapter)

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
            num_prefix_queries=scheduler.prefixes.num_queries,
            num_prefix_hits=scheduler.prefixes.num_hits,
            num_drafts=self._lookup.num_drafts,
            num_draft_tokens=self._lookup.num_draft_tokens,
            num_accepted_tokens=self._lookup.num_accepted_tokens,
        )

    def add_adapter(self, name: str, adapter: PreparedAdapter) -> None:
        """Let requests name an adapter from now on. Raises `ConfigError` for a name that is in use."""
        # An adapter's narrow products may need another multiple than the model's, so they are measured on their own.
        multiple = adapter_row_multiple(adapter, self.model) if self.config.batch_invariant else 1
        self.adapters.add(name, adapter, row_multiple=multiple or MULTIPLES[-1])
        self.is_batch_invariant = self.is_batch_invariant and multiple > 0

    def remove_adapter(self, name: str) -> None:
        """Refuse an adapter's name from now on; running requests finish with it. Raises `ConfigError` if unknown."""
        self.adapters.remove(name)
        self.adapters.drop_unused({sequence.adapter for sequence in self._sequences.values()})

    def add(
        self,
        request_id: str,
        prompt_ids: Ids[int],
        params: SamplingParams,
        constraint: TokenConstraint | None = None,
        *,
        cache_salt: str = "",
        adapter: str = BASE,
        images: Ids[Pixels] = (),
    ) -> None:
        """Queue a request. `max_tokens` is capped by the context. constraint: the tokens that may follow, for this
        request alone; cache_salt: only requests with the same salt share cached prompts; adapter: name of the adapter
        to compute the request with; images: contents of the prompt's image tokens, in order. Raises `ConfigError` when
        the id is in use, the adapter is unknown, the prompt is empty, holds unknown tokens or leaves no room, the
        images do not fit it, or the model generates no text.
        """
        prompt = self._checked(request_id, prompt_ids)
        if self.score_head is not None:
            raise ConfigError("prompt: this model scores texts and generates none; serve a language model")
        named = [*(token for token, _ in params.logit_bias), *params.stop_ids]
        unknown = [token for token in named if not 0 <= token < self.vocab_size]
        if unknown:
            raise ConfigError(
                f"logit_bias, stop_ids: token ids must be between 0 and {self.vocab_size - 1}, got {unknown[0]}"
            )
        room = self.max_seq_len - len(prompt)
        params = replace(params, max_tokens=min(params.max_tokens, room), min_tokens=min(params.min_tokens, room))
        number = self.adapters.number_of(adapter)
        sequence = Sequence(
            request_id, prompt, len(prompt), params, constraint=constraint, cache_salt=cache_salt, adapter=number
        )
        sequence.images = prompt_images(self.model, prompt, images)
        self._sequences[request_id] = sequence
        self._scheduler.waiting.append(sequence)

    def embed(
        self,
        request_id: str,
        prompt_ids: Ids[int],
        *,
        pooling: Pooling = "last",
        cache_salt: str = "",
        adapter: str = BASE,
    ) -> None:
        """Queue a request for one embedding or score of a whole text (`pooled`). Embeddings are hidden states after the
        final norm, which is how a model without a pooling layer embeds a text. Raises like `add`, and for a score of a
        model without a head for it.
        """
        prompt = self._checked(request_id, prompt_ids)
        if pooling == "score" and self.score_head is None:
            raise ConfigError("pooling: the model lacks a head that scores texts; serve a reward model")
        sequence = Sequence(
            request_id,
            prompt,
            len(prompt),
            SamplingParams(max_tokens=1),
            pooling=pooling,
            cache_salt=cache_salt,
            adapter=self.adapters.number_of(adapter),
        )
        sequence.images = prompt_images(self.model, prompt, ())
        self._sequences[request_id] = sequence
        self._scheduler.waiting.append(sequence)

    def _checked(self, request_id: str, prompt_ids: Ids[int]) -> list[int]:
        if request_id in self._sequences:
            raise ConfigError(f"request_id: {request_id!r} is already running; choose another")
        prompt = [int(token) for token in prompt_ids]
        if not prompt:
            raise ConfigError("prompt: is empty; give at least one token")
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            raise ConfigError(f"prompt: token ids must be between 0 and {self.vocab_size - 1}")
        if len(prompt) >= self.max_seq_len:
            raise ConfigError(
                f"prompt: has {len(prompt)} tokens; the model's context is {self.max_seq_len}; shorten it"
            )
        return prompt

    def abort(self, request_id: str) -> bool:
        """Abort a request and free its cache; false if it is unknown (already finished)."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._scheduler.remove(sequence)
            self.adapters.drop_unused({one.adapter for one in self._sequences.values()})
        return sequence is not None

    def step(self) -> list[StepOutput]:
        """Compute one step: one new token for each running request that is ready for one, and more where guesses of its
        next tokens are right. Returns no outputs if no request is in progress.
        """
        # A step without work must not run the model: a plan without rows still costs a forward pass.
        if not self._sequences:
            return []
        plan = self._scheduler.plan()
        sequences, hidden_BD, logits_BV = self._runner.run(plan)
        self._scheduler.complete(plan)
        rows: dict[Sequence, list[int]] = {}
        for row, sequence in enumerate(sequences):
            rows.setdefault(sequence, []).append(row)
        outputs: list[StepOutput] = []
        for sequence, (row, *_) in rows.items():
            if kind := sequence.pooling:
                self.abort(sequence.request_id)
                values = pooled(kind, hidden_BD[row], sequence.hidden_sum_D, sequence.num_prompt, self.score_head)
                reason = "stop" if values else "error"
                outputs.append(StepOutput(sequence.request_id, 0, 0.0, (), reason, embedding=tuple(values)))
        # A draft's rows are sampled one place after the other: a token counts only if the draft guessed the one before.
        live, place = [sequence for sequence in rows if not sequence.pooling], 0
        while live:
            outputs += self._sampled(live, [rows[sequence][place] for sequence in live], logits_BV)
            still_running = [one for one in live if self._sequences.get(one.request_id) is one]
            live = [one for one in still_running if self._lookup.accepts(one, place)]
            place += 1
        return outputs

    def _sampled(self, sequences: list[Sequence], rows: list[int], logits_BV: Tensor) -> list[StepOutput]:
        """Choose the next token of each sequence from its row of the logits; ends and restarts sequences."""
        outputs: list[StepOutput] = []
        chosen: list[Sequence] = []
        chosen_rows: list[int] = []
        requests: list[SampleRequest] = []
        for sequence, row in zip(sequences, rows, strict=True):
            params = sequence.params
            try:
                allowed_V = sequence.constraint.allowed() if sequence.constraint is not None else None
            except ConfigError:  # no token may follow: this request ends, the others go on
                self.abort(sequence.request_id)
                outputs.append(StepOutput(sequence.request_id, 0, 0.0, (), "constraint"))
                continue
            # Only the repetition penalty reads the prompt; a copy of a long one costs time at every token.
            prompt_ids = sequence.token_ids[: sequence.num_prompt] if params.repetition_penalty != 1 else ()
            requests.append(SampleRequest(params, sequence.num_new, sequence.counts, prompt_ids, allowed_V))
            chosen.append(sequence)
            chosen_rows.append(row)
        if not chosen:
            return outputs
        with torch.inference_mode():
            draws = sample(
                logits_BV if chosen_rows == list(range(len(logits_BV))) else logits_BV[chosen_rows], requests
            )
        for sequence, draw in zip(chosen, draws, strict=True):
            # Both are read before the token is appended, which makes it a sequence with new tokens.
            scores = tuple(sequence.prompt_scores) if sequence.wants_prompt_scores else ()
            num_cached = 0 if sequence.num_new else sequence.num_hit_tokens
            reason = sequence.append(draw.token_id) if math.isfinite(draw.logprob) else "error"
            if reason:
                self.abort(sequence.request_id)
            elif len(sequence.token_ids) == self._switch_len:
                # LongRoPE has other frequencies from here on, so that the keys in the cache are no longer valid
                self._scheduler.restart(sequence)
            values = (draw.token_id, draw.logprob, draw.alternatives)
            outputs.append(StepOutput(sequence.request_id, *values, reason, scores, num_cached_tokens=num_cached))
        return outputs


@torch.inference_mode()
def pooled(kind: Pooling, last_D: Tensor, sum_D: Tensor | None, num_tokens: int, head: nn.Module | None) -> list[float]:
    """Returns a text's embedding, scaled to unit length, or its score, one number; empty if a value is not finite.
    last_D: the last token's hidden state; sum_D: over all tokens, for "mean"; head: a product with `weight` [1, D], for
    "score". In FP64 and for one text at a time, so that nothing depends on what else is computed.
    """
    if kind == "score":
        assert head is not None
        values = (last_D.double() * head.get_parameter("weight")[0].double()).sum()[None]
    else:
        assert kind == "last" or sum_D is not None
        hidden_D = last_D.double() if sum_D is None or kind == "last" else sum_D / num_tokens
        # The floor is for a state of zeros, which has no direction.
        values = hidden_D / hidden_D.norm().clamp_min(1e-12)
    return values.float().tolist() if bool(torch.isfinite(values).all()) else []
