"""Computes one step of the model over a paged cache: flattens the plan's tokens and returns the rows that need logits.

All tokens of a step pass through the linears as one flat row of N tokens; only attention is computed per sequence. To
keep every sequence's numbers independent of its neighbors, a decoding token attends over its own context rounded up to
`CONTEXT_STEP` and shares a call only with tokens of the same rounded context. The tokens of a draft are decoding tokens
like any other, so that verifying them gives the bits that decoding one by one gives. Layers with a window read the last
blocks of that length only. Where layers select heads, chunks of prompts on a CPU compute only the open ones; tokens
that PyTorch decodes compute all heads, the operator below only the open ones.

Where one operator decodes (`decode_operator`; `graph_decoder` on CUDA), it takes the decoding tokens without an adapter
and the beginnings of their prompts, as rows of their own; the model computes the others.

Legend: N tokens, B sequences, C tokens of a chunk, D model width, H query heads, K key/value heads, G = H / K,
d head width, V vocabulary.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from modelwright.infer.decode_operator import DecodeOperator
from modelwright.infer.graph_decoder import GraphDecoder
from modelwright.infer.kv_cache import PagedCache
from modelwright.infer.products import Product
from modelwright.infer.sampler import score
from modelwright.infer.scheduler import Chunk, SchedulerOutput
from modelwright.infer.sequence import DecodeRow, Sequence
from modelwright.model.adapter_bank import AdapterSet
from modelwright.model.attention import causal_attend
from modelwright.model.decoder import Attend, AttentionSpec, Decoder, Insert
from modelwright.model.vision.llava import image_prefix, replaced
from modelwright.ops import cpu_kernels
from modelwright.ops.attention import masked_attention, masked_capped_attention, packed_tiles
from modelwright.ops.selected_attention import selected_attention

CONTEXT_STEP = 64
"""Decoding contexts are rounded up to a multiple of this many tokens; a multiple of the block length."""


@dataclass(frozen=True)
class CachedContext:
    """The part of the cache that the queries of one attention span read: a block table for each sequence, concatenated,
    and which of its L tokens each query sees.
    """

    table: Tensor
    mask: Tensor


@dataclass(frozen=True)
class DecodeGroup:
    """Decoding tokens of equal rounded context: rows [start, end) of the step. contexts: one for each window length of
    the model's layers, with masks [B, 1, 1, L].
    """

    start: int
    end: int
    contexts: dict[int, CachedContext]


@dataclass(frozen=True)
class ChunkPiece:
    """A chunk of one prompt: rows [start, end) of the step. contexts: one for each window length of the model's layers,
    with masks [1, 1, C, L]; unused when the chunk opens its prompt.
    """

    start: int
    end: int
    opens_prompt: bool
    contexts: dict[int, CachedContext]


@dataclass(frozen=True)
class StepTensors:
    """A plan as tensors. `lengths_1N`: for each token, the length of its sequence when the token was first computed:
    the whole prompt, or all up to the token itself. `logit_rows` are the rows whose next token is needed, in the order
    of `sampled`, where a sequence with a draft occurs once for each of its rows, in their order. `adapters`: adapter
    number of each row, padding included.
    """

    tokens_1N: Tensor
    positions_1N: Tensor
    lengths_1N: Tensor
    slots: Tensor
    groups: list[DecodeGroup]
    pieces: list[ChunkPiece]
    sampled: list[Sequence]
    logit_rows: Tensor
    adapters: list[int]


class ModelRunner:
    """Runs plans on one model and one cache. `row_multiple`: the rows of every product are padded to a multiple.
    adapters: sets which adapter each row is computed with; operator: decodes the rows without an adapter.
    """

    def __init__(
        self,
        model: Decoder,
        head: Product,
        cache: PagedCache,
        adapters: AdapterSet,
        *,
        row_multiple: int,
        operator: DecodeOperator | GraphDecoder | None = None,
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._head = head
        self._cache = cache
        self._row_multiple = row_multiple
        self._operator = operator
        self._windows = model.config.windows
        self._attend_within = causal_attend()
        self._device = model.norm.weight.device

    @torch.inference_mode()
    def run(self, plan: SchedulerOutput) -> tuple[list[Sequence], Tensor, Tensor]:
        """Compute a plan; returns the sequences whose next token can be chosen, hidden states [B, D] and logits
        [B, V]. A sequence with a draft has a row for its last token and one for each token of the draft, in this order.
        """
        parts: list[tuple[list[Sequence], Tensor]] = []
        rest = plan
        if self._operator is not None:
            part, rest = run_operator(self._operator, plan, self._read_prompt)
            parts += [part] if part is not None else []
        if rest.decodes or rest.chunks or not parts:
            step = self._prepare(rest)
            if self._device.type == "cpu":
                cpu_kernels.spread_threads()
            with self._adapters.chosen(step.adapters, self._device):
                hidden_1ND = self._model(
                    step.tokens_1N, step.positions_1N, self._attend(step), step.lengths_1N, self._insert(rest, step)
                )
            for chunk, piece in zip(rest.chunks, step.pieces, strict=True):
                self._read_prompt(chunk, hidden_1ND[0, piece.start : piece.end])
            parts.append((step.sampled, hidden_1ND[0].index_select(0, step.logit_rows)))
        for sequence in plan.decodes:
            sequence.num_cached += 1
        for chunk in plan.chunks:
            chunk.sequence.num_cached = chunk.end
            # Followers share the full blocks of the prompt already; the last block, which is not full, is copied for
            # each of them, because their new tokens go into it.
            index, num_in_last = divmod(chunk.end, self._cache.block_len)
            if chunk.followers and num_in_last:
                targets = [follower.block_table[index] for follower in chunk.followers]
                self._cache.copy([chunk.sequence.block_table[index]] * len(targets), targets)
            for follower in chunk.followers:
                follower.num_cached = chunk.end
        sampled = [sequence for sequences, _ in parts for sequence in sequences]
        hidden_BD = parts[0][1] if len(parts) == 1 else torch.cat([hidden.float() for _, hidden in parts])
        if not sampled:
            return sampled, hidden_BD, hidden_BD
        return sampled, hidden_BD, self._logits(hidden_BD)

    def _logits(self, hidden_ND: Tensor) -> Tensor:
        if self._operator is not None:
            return self._operator.logits(hidden_ND)
        return self._head(F.pad(hidden_ND, (0, 0, 0, -len(hidden_ND) % self._row_multiple)))[: len(hidden_ND)]

    def _read_prompt(self, chunk: Chunk, hidden_CD: Tensor) -> None:
        """Take from a chunk's hidden states what the request wants of its prompt."""
        sequence = chunk.sequence
        if sequence.wants_prompt_scores:
            self._score_prompt(chunk, hidden_CD)
        if sequence.pooling == "mean":
            # Chunk by chunk in FP64; the first chunk of a prompt replaces a sum from before a preemption.
            sum_D, before_D = hidden_CD.double().sum(dim=0), sequence.hidden_sum_D
            sequence.hidden_sum_D = sum_D if chunk.start == 0 or before_D is None else before_D + sum_D

    def _insert(self, plan: SchedulerOutput, step: StepTensors) -> Insert | None:
        """Returns the function that puts image embeddings in place of image tokens in a plan's chunks; None if the
        chunks have none.
        """
        places: list[int] = []
        parts: list[Tensor] = []
        for chunk, piece in zip(plan.chunks, step.pieces, strict=True):
            for image in chunk.sequence.images:
                if image.has_tokens_in(chunk.start, chunk.end):
                    start, end = max(image.start, chunk.start), min(image.end, chunk.end)
                    first = piece.start - chunk.start
                    places += range(first + start, first + end)
                    prefix = image_prefix(self._model)
                    assert prefix is not None
                    parts.append(image.embeddings(prefix)[start - image.start : end - image.start])
        if not parts:
            return None
        return lambda hidden_1ND: replaced(hidden_1ND, self._ints(places), torch.cat(parts))

    def _score_prompt(self, chunk: Chunk, hidden_CD: Tensor) -> None:
        """Score the tokens after those of a chunk. The head computes the chunk alone, so that a prompt's scores do not
        depend on what else the step computes.
        """
        sequence = chunk.sequence
        start = sequence.params.prompt_logprobs_start
        first = max(chunk.start + 1, start)
        following = sequence.token_ids[first : min(chunk.end + 1, sequence.num_prompt)]
        del sequence.prompt_scores[first - start :]  # a chunk that is computed again after a preemption
        hidden_CD = hidden_CD[first - 1 - chunk.start :]
        if following:
            sequence.prompt_scores += score(
                self._logits(hidden_CD), following, sequence.params.num_prompt_logprobs or 0
            )

    def _prepare(self, plan: SchedulerOutput) -> StepTensors:
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        # Rows: decoding tokens grouped by rounded context, then the chunks of prompts, then padding. `adapters`,
        # `lengths_1N` and `logit_rows` rely on this order.
        by_context: defaultdict[int, list[DecodeRow]] = defaultdict(list)
        for row in _decode_rows(plan.decodes):
            by_context[_round_up(row.position + 1, CONTEXT_STEP)].append(row)
        ordered = [row for context in sorted(by_context) for row in by_context[context]]
        groups: list[DecodeGroup] = []
        for context in sorted(by_context):
            members, start = by_context[context], len(tokens)
            tokens += [row.sequence.token_at(row.position) for row in members]
            slots += [self._slot(row.sequence, row.position) for row in members]
            tables = [self._padded_table(row.sequence, context) for row in members]
            at = [row.position for row in members]
            positions += at
            contexts = self._contexts(tables, self._ints(at)[:, None], earliest=context - CONTEXT_STEP)
            groups.append(DecodeGroup(start, len(tokens), contexts))
        pieces: list[ChunkPiece] = []
        for chunk in plan.chunks:
            start, sequence, span = len(tokens), chunk.sequence, range(chunk.start, chunk.end)
            tokens += sequence.token_ids[chunk.start : chunk.end]
            positions += span
            slots += [self._slot(sequence, position) for position in span]
            table = self._padded_table(sequence, _round_up(chunk.end, self._cache.block_len))
            contexts = self._contexts([table], self._ints(list(span))[None], earliest=chunk.start)
            pieces.append(ChunkPiece(start, len(tokens), chunk.start == 0, contexts))
        owners = [row.sequence for row in ordered]
        owners += [chunk.sequence for chunk in plan.chunks for _ in range(chunk.start, chunk.end)]
        # A token sees the length that its sequence had when it was first computed, also when it is replayed after a
        # preemption, so that rotary frequencies that depend on the length are the same both times.
        lengths = [max(owner.num_prefill, position + 1) for owner, position in zip(owners, positions, strict=True)]
        sampled = [(row, one.sequence) for row, one in enumerate(ordered) if not one.sequence.is_replaying]
        sampled += [
            (piece.end - 1, sequence)
            for piece, chunk in zip(pieces, plan.chunks, strict=True)
            for sequence in finished(chunk)
        ]
        padding = [0] * (-len(tokens) % self._row_multiple)
        return StepTensors(
            tokens_1N=self._ints(tokens + padding)[None],
            positions_1N=self._ints(positions + padding)[None],
            lengths_1N=self._ints(lengths + padding)[None],
            slots=self._ints(slots),
            groups=groups,
            pieces=pieces,
            sampled=[sequence for _, sequence in sampled],
            logit_rows=self._ints([row for row, _ in sampled]),
            adapters=[sequence.adapter for sequence in owners] + [0] * len(padding),
        )

    def _contexts(self, tables: list[list[int]], positions_BC: Tensor, *, earliest: int) -> dict[int, CachedContext]:
        """Context of each window length of the model. tables: equally long block tables of B sequences; earliest: lower
        bound of the queries' positions.
        """
        contexts = {}
        for window in self._windows:
            # Blocks before the window of the earliest query are not read.
            first_block = max(0, earliest - window + 1) // self._cache.block_len if window else 0
            places_L = torch.arange(
                first_block * self._cache.block_len, len(tables[0]) * self._cache.block_len, device=self._device
            )
            mask_BCL = places_L <= positions_BC[..., None]
            if window:
                mask_BCL &= places_L > positions_BC[..., None] - window
            blocks = [block for table in tables for block in table[first_block:]]
            contexts[window] = CachedContext(self._ints(blocks), mask_BCL.unsqueeze(1))
        return contexts

    def _attend(self, step: StepTensors) -> Attend:
        # Rows of padding have no slot and are not stored.
        num_tokens = len(step.slots)

        def attend(spec: AttentionSpec, q_1NHd: Tensor, k_1NKd: Tensor, v_1NKd: Tensor) -> Tensor:
            self._cache.write(spec.layer, step.slots, k_1NKd[0, :num_tokens], v_1NKd[0, :num_tokens])
            out_1NHd = torch.zeros_like(q_1NHd)
            for group in step.groups:
                rows = slice(group.start, group.end)
                out_1NHd[0, rows] = self._decode(spec, q_1NHd[0, rows], group.contexts[spec.window])
            for piece in step.pieces:
                rows = slice(piece.start, piece.end)
                if spec.open_BTH is not None and self._device.type == "cpu" and not spec.soft_cap:
                    out_1NHd[:, rows] = _selected(self._cache, spec, piece, q_1NHd[:, rows], k_1NKd, v_1NKd)
                elif piece.opens_prompt:
                    # Nothing of this prompt is in the cache before the chunk, so training's causal attention serves.
                    out_1NHd[:, rows] = self._attend_within(spec, q_1NHd[:, rows], k_1NKd[:, rows], v_1NKd[:, rows])
                else:
                    context = piece.contexts[spec.window]
                    keys, values = self._cache.read(spec.layer, context.table, 1, q_1NHd.dtype)
                    if spec.soft_cap:
                        out = masked_capped_attention(q_1NHd[:, rows], keys, values, context.mask, spec.soft_cap)
                    else:
                        out = masked_attention(q_1NHd[:, rows], keys, values, context.mask)
                    out_1NHd[:, rows] = out
            return out_1NHd

        return attend

    def _decode(self, spec: AttentionSpec, q_BHd: Tensor, context: CachedContext) -> Tensor:
        """Attention of one query token per sequence, [B, H, d]. The query heads of a group take the place of query
        tokens, so that the keys of a group are read once.
        """
        k_BLKd, v_BLKd = self._cache.read(spec.layer, context.table, q_BHd.shape[0], q_BHd.dtype)
        if spec.soft_cap:
            return masked_capped_attention(q_BHd[:, None], k_BLKd, v_BLKd, context.mask, spec.soft_cap)[:, 0]
        q_BKGd = q_BHd.unflatten(1, (k_BLKd.shape[2], -1))
        out_BKGd = F.scaled_dot_product_attention(
            q_BKGd, k_BLKd.transpose(1, 2), v_BLKd.transpose(1, 2), attn_mask=context.mask
        )
        return out_BKGd.flatten(1, 2)

    def _slot(self, sequence: Sequence, position: int) -> int:
        block_len = self._cache.block_len
        return sequence.block_table[position // block_len] * block_len + position % block_len

    def _padded_table(self, sequence: Sequence, num_tokens: int) -> list[int]:
        num_blocks = num_tokens // self._cache.block_len
        table = sequence.block_table[:num_blocks]
        return table + [0] * (num_blocks - len(table))

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)


def _selected(
    cache: PagedCache, spec: AttentionSpec, piece: ChunkPiece, q_1CHd: Tensor, k_1NKd: Tensor, v_1NKd: Tensor
) -> Tensor:
    """Attention of a chunk at its open heads only."""
    assert spec.open_BTH is not None
    rows = slice(piece.start, piece.end)
    if piece.opens_prompt:
        keys, values = k_1NKd[:, rows], v_1NKd[:, rows]
    else:
        # Cut after the last visible key, because the queries must be the last of the tokens that the kernel gets.
        context = piece.contexts[spec.window]
        num_seen = int(context.mask[0, 0, -1].nonzero()[-1]) + 1
        keys, values = cache.read(spec.layer, context.table, 1, k_1NKd.dtype)
        keys, values = keys[:, :num_seen], values[:, :num_seen]
    num_keys, num_queries = keys.shape[1], q_1CHd.shape[1]
    one_document = torch.zeros(1, num_keys, dtype=torch.int64)
    tiles = packed_tiles(one_document, spans=[(num_keys - num_queries, num_keys)], window=spec.window)
    return selected_attention(q_1CHd, keys, values, spec.open_BTH[:, rows], tiles)


def _decode_rows(decodes: list[Sequence]) -> list[DecodeRow]:
    """The next token to compute of each sequence, and the tokens of its draft."""
    return [DecodeRow(s, s.num_cached + place) for s in decodes for place in range(1 + len(s.draft))]


def run_operator(
    operator: DecodeOperator | GraphDecoder, plan: SchedulerOutput, read_prompt: Callable[[Chunk, Tensor], None]
) -> tuple[tuple[list[Sequence], Tensor] | None, SchedulerOutput]:
    """Compute what the operator takes of a plan; returns the sequences whose next token can be chosen, with the hidden
    states [B, D] that these follow from, None if it takes nothing, and the rest of the plan. The adapter and the
    position in a prompt alone decide who computes a token, so its bits are the same whatever else runs, and however the
    prompt is divided into chunks. read_prompt: is given the hidden states of each chunk.
    """
    rows = _decode_rows([one for one in plan.decodes if not one.adapter])
    sampled = [(number, row.sequence) for number, row in enumerate(rows) if not row.sequence.is_replaying]
    first: list[Chunk] = []
    rest = SchedulerOutput([one for one in plan.decodes if one.adapter])
    for chunk in plan.chunks:
        sequence = chunk.sequence
        # What precedes the first image shares its blocks with prompts that have none.
        end = min([operator.prompt_len, chunk.end, *(image.start for image in sequence.images)])
        end = chunk.start if sequence.adapter else max(chunk.start, end)
        if end > chunk.start:
            first.append(replace(chunk, end=end))
            rows += [DecodeRow(sequence, position) for position in range(chunk.start, end)]
        if end < chunk.end:
            rest.chunks.append(replace(chunk, start=end))
    if not rows:
        return None, rest
    hidden_ND = operator.hidden(rows)
    at = len(rows) - sum(chunk.end - chunk.start for chunk in first)
    for chunk in first:
        start, at = at, at + chunk.end - chunk.start
        read_prompt(chunk, hidden_ND[start:at])
        sampled += [(at - 1, sequence) for sequence in finished(chunk)]
    # Followers repeat a row, so as many rows as there are need not be all of them.
    chosen, sequences = [number for number, _ in sampled], [sequence for _, sequence in sampled]
    return (sequences, hidden_ND if chosen == list(range(len(rows))) else hidden_ND[chosen]), rest


def finished(chunk: Chunk) -> list[Sequence]:
    """Returns the sequences whose prompt ends with the chunk; followers share their leader's row of logits."""
    return [one for one in (chunk.sequence, *chunk.followers) if chunk.end == len(one.token_ids)]


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
