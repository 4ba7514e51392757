"""One step of the model over a paged cache: flatten the plan's tokens, compute, return the rows that need logits.

All tokens of a step pass through the linears as one flat row of N tokens; only attention is computed per sequence. To
keep every sequence's numbers independent of its neighbors, a decoding token attends over its own context rounded up to
`CONTEXT_STEP` and shares a call only with tokens of the same rounded context. The tokens of a draft are decoding tokens
like any other, so that verifying them gives the bits that decoding one by one gives. Layers with a window read the last
blocks of that length only. Where layers select heads, chunks of prompts on a CPU compute only the open ones; tokens
that PyTorch decodes compute all heads, the operator below only the open ones.

Where one operator decodes (`decode_operator`), it takes the decoding tokens without an adapter, and the model computes
the others and the chunks of prompts.

Legend: N tokens, B sequences, C tokens of a chunk, D model width, H query heads, K key/value heads, G = H / K,
d head width, V vocabulary.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from modelwright.infer.decode_operator import DecodeOperator
from modelwright.infer.kv_cache import PagedCache
from modelwright.infer.products import Product
from modelwright.infer.sampler import score
from modelwright.infer.scheduler import Chunk, SchedulerOutput
from modelwright.infer.sequence import DecodeRow, Sequence
from modelwright.model.adapter_bank import AdapterSet
from modelwright.model.attention import causal_attend
from modelwright.model.decoder import Attend, AttentionSpec, Decoder, Insert
from modelwright.model.vision.image_prefix import image_prefix, replaced
from modelwright.ops.attention import masked_attention, packed_tiles
from modelwright.ops.capped_attention import masked_capped_attention
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
    """Decoding tokens of equal rounded context: rows [start, end) of the step. contexts: by the layers' windows,
    with masks [B, 1, 1, L].
    """

    start: int
    end: int
    contexts: dict[int, CachedContext]


@dataclass(frozen=True)
class ChunkPiece:
    """A chunk of one prompt: rows [start, end) of the step. contexts: by the layers' windows, with masks [1, 1, C, L];
    unused when the chunk opens its prompt.
    """

    start: int
    end: int
    opens_prompt: bool
    contexts: dict[int, CachedContext]


@dataclass(frozen=True)
class StepTensors:
    """A plan as tensors. `lengths_1N`: tokens known of each token's sequence when it was first computed: the whole
    prompt, or all up to the token itself. `logit_rows` are the rows whose next token is needed, in the order of
    `sampled`, where a sequence with a draft stands once for each of its rows, in their order. `adapters`: numbers of
    those that the rows are computed with.
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
    adapters: sets which adapter each row is computed with; operator: decodes the rows without one, if there is any.
    """

    def __init__(
        self,
        model: Decoder,
        head: Product,
        cache: PagedCache,
        adapters: AdapterSet,
        *,
        row_multiple: int,
        operator: DecodeOperator | None = None,
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
            rest = SchedulerOutput([one for one in plan.decodes if one.adapter], plan.chunks)
            if own := [one for one in plan.decodes if not one.adapter]:
                parts.append(self._decode_by_operator(self._operator, own))
        if rest.decodes or rest.chunks or not parts:
            parts.append(self._run_model(rest))
        for sequence in plan.decodes:
            sequence.num_cached += 1
        for chunk in plan.chunks:
            chunk.sequence.num_cached = chunk.end
            self._fork(chunk)
        sampled = [sequence for sequences, _ in parts for sequence in sequences]
        hidden_BD = parts[0][1] if len(parts) == 1 else torch.cat([hidden.float() for _, hidden in parts])
        return sampled, hidden_BD, self._logits(hidden_BD) if sampled else hidden_BD

    def _decode_by_operator(self, operator: DecodeOperator, decodes: list[Sequence]) -> tuple[list[Sequence], Tensor]:
        rows = _decode_rows(decodes)
        hidden_ND = operator.hidden(rows)
        chosen = [number for number, row in enumerate(rows) if not row.sequence.is_replaying]
        sampled = [rows[number].sequence for number in chosen]
        return sampled, hidden_ND if len(chosen) == len(rows) else hidden_ND[chosen]

    def _run_model(self, plan: SchedulerOutput) -> tuple[list[Sequence], Tensor]:
        step = self._prepare(plan)
        with self._adapters.chosen(step.adapters, self._device):
            hidden_1ND = self._model(
                step.tokens_1N, step.positions_1N, self._attend(step), step.lengths_1N, self._insert(plan, step)
            )
        for chunk, piece in zip(plan.chunks, step.pieces, strict=True):
            if chunk.sequence.wants_prompt_scores:
                self._score_prompt(chunk, hidden_1ND[0, piece.start : piece.end])
            if chunk.sequence.pooling == "mean":
                _add_up(chunk, hidden_1ND[0, piece.start : piece.end])
        return step.sampled, hidden_1ND[0].index_select(0, step.logit_rows)

    def _logits(self, hidden_BD: Tensor) -> Tensor:
        if self._operator is not None:
            return self._operator.logits(hidden_BD)
        return self._head(self._padded(hidden_BD))[: len(hidden_BD)]

    def _padded(self, hidden_ND: Tensor) -> Tensor:
        return F.pad(hidden_ND, (0, 0, 0, -len(hidden_ND) % self._row_multiple))

    def _insert(self, plan: SchedulerOutput, step: StepTensors) -> Insert | None:
        """What takes the place of the image tokens in the chunks of a plan; None if there is none."""
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

    def _fork(self, chunk: Chunk) -> None:
        """Complete the caches of the sequences that follow a prompt: they share its full blocks already."""
        index, num_in_last = divmod(chunk.end, self._cache.block_len)
        if chunk.followers and num_in_last:
            targets = [follower.block_table[index] for follower in chunk.followers]
            self._cache.copy([chunk.sequence.block_table[index]] * len(targets), targets)
        for follower in chunk.followers:
            follower.num_cached = chunk.end

    def _score_prompt(self, chunk: Chunk, hidden_CD: Tensor) -> None:
        """Score the tokens after those of a chunk. The head gets the chunk alone, so that a prompt's scores do not
        depend on what else the step computes.
        """
        sequence = chunk.sequence
        start = sequence.params.prompt_logprobs_start
        first = max(chunk.start + 1, start)
        following = sequence.token_ids[first : min(chunk.end + 1, sequence.num_prompt)]
        del sequence.prompt_scores[first - start :]
        hidden_CD = hidden_CD[first - 1 - chunk.start :]
        if following:
            logits_CV = self._head(self._padded(hidden_CD))
            sequence.prompt_scores += score(logits_CV, following, sequence.params.num_prompt_logprobs or 0)

    def _prepare(self, plan: SchedulerOutput) -> StepTensors:
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        # Rows: decoding tokens grouped by rounded context, then the chunks of prompts, then padding. `adapters`,
        # `lengths_1N` and `logit_rows` rely on this order.
        rows = _decode_rows(plan.decodes)
        ordered = [row for members in _by_context(rows) for row in members]
        groups = self._decode_groups(rows, tokens, positions, slots)
        pieces = [self._chunk_piece(chunk, tokens, positions, slots) for chunk in plan.chunks]
        # A token sees the length that its sequence had when it was first computed, also when it is replayed after a
        # preemption, so that rotary frequencies that depend on the length are the same both times.
        first = [row.sequence.num_prefill for row in ordered]
        first += [chunk.sequence.num_prefill for chunk in plan.chunks for _ in range(chunk.start, chunk.end)]
        lengths = [max(prefill, position + 1) for prefill, position in zip(first, positions, strict=True)]
        owners = [row.sequence for row in ordered] + [
            chunk.sequence for chunk in plan.chunks for _ in range(chunk.start, chunk.end)
        ]
        sampled = [(row, one.sequence) for row, one in enumerate(ordered) if not one.sequence.is_replaying]
        sampled += [
            (piece.end - 1, sequence)
            for piece, chunk in zip(pieces, plan.chunks, strict=True)
            for sequence in (chunk.sequence, *chunk.followers)  # followers share their leader's row of logits
            if chunk.end == len(sequence.token_ids)
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

    def _decode_groups(
        self, rows: list[DecodeRow], tokens: list[int], positions: list[int], slots: list[int]
    ) -> list[DecodeGroup]:
        groups = []
        for members in _by_context(rows):
            start, context = len(tokens), _context(members[0])
            tables, at = [], []
            for row in members:
                tokens.append(row.sequence.token_at(row.position))
                slots.append(self._slot(row.sequence, row.position))
                tables.append(self._padded_table(row.sequence, context))
                at.append(row.position)
            positions += at
            contexts = self._contexts(tables, self._ints(at)[:, None], earliest=context - CONTEXT_STEP)
            groups.append(DecodeGroup(start, len(tokens), contexts))
        return groups

    def _chunk_piece(self, chunk: Chunk, tokens: list[int], positions: list[int], slots: list[int]) -> ChunkPiece:
        start, sequence = len(tokens), chunk.sequence
        span = range(chunk.start, chunk.end)
        tokens += sequence.token_ids[chunk.start : chunk.end]
        positions += span
        slots += [self._slot(sequence, position) for position in span]
        table = self._padded_table(sequence, _round_up(chunk.end, self._cache.block_len))
        contexts = self._contexts([table], self._ints(list(span))[None], earliest=chunk.start)
        return ChunkPiece(start, len(tokens), chunk.start == 0, contexts)

    def _contexts(self, tables: list[list[int]], positions_BC: Tensor, *, earliest: int) -> dict[int, CachedContext]:
        """The context of each window of the model. tables: of B sequences, equally long; earliest: lower bound of the
        queries' positions.
        """
        contexts = {}
        for window in self._windows:
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
                    keys = _seen_keys(self._cache, spec, piece, k_1NKd, v_1NKd)
                    out_1NHd[:, rows] = _selected(spec, q_1NHd[:, rows], *keys, spec.open_BTH[:, rows])
                elif piece.opens_prompt:
                    out_1NHd[:, rows] = self._attend_within(spec, q_1NHd[:, rows], k_1NKd[:, rows], v_1NKd[:, rows])
                else:
                    out_1NHd[:, rows] = self._extend(spec, q_1NHd[:, rows], piece.contexts[spec.window])
            return out_1NHd

        return attend

    def _decode(self, spec: AttentionSpec, q_BHd: Tensor, context: CachedContext) -> Tensor:
        """One query token per sequence: the query heads of a group take the place of query tokens, [B, H, d]."""
        k_BLKd, v_BLKd = self._cache.read(spec.layer, context.table, q_BHd.shape[0], q_BHd.dtype)
        if spec.soft_cap:
            return masked_capped_attention(q_BHd[:, None], k_BLKd, v_BLKd, context.mask, spec.soft_cap)[:, 0]
        q_BKGd = q_BHd.unflatten(1, (k_BLKd.shape[2], -1))
        out_BKGd = F.scaled_dot_product_attention(
            q_BKGd, k_BLKd.transpose(1, 2), v_BLKd.transpose(1, 2), attn_mask=context.mask
        )
        return out_BKGd.flatten(1, 2)

    def _extend(self, spec: AttentionSpec, q_1CHd: Tensor, context: CachedContext) -> Tensor:
        """A chunk of a prompt whose beginning is in the cache, [1, C, H, d]."""
        keys, values = self._cache.read(spec.layer, context.table, 1, q_1CHd.dtype)
        if spec.soft_cap:
            return masked_capped_attention(q_1CHd, keys, values, context.mask, spec.soft_cap)
        return masked_attention(q_1CHd, keys, values, context.mask)

    def _slot(self, sequence: Sequence, position: int) -> int:
        block_len = self._cache.block_len
        return sequence.block_table[position // block_len] * block_len + position % block_len

    def _padded_table(self, sequence: Sequence, num_tokens: int) -> list[int]:
        num_blocks = num_tokens // self._cache.block_len
        table = sequence.block_table[:num_blocks]
        return table + [0] * (num_blocks - len(table))

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)


def _seen_keys(
    cache: PagedCache, spec: AttentionSpec, piece: ChunkPiece, k_1NKd: Tensor, v_1NKd: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values [1, L, K, d] that the queries of a chunk see, its own at the end."""
    rows = slice(piece.start, piece.end)
    if piece.opens_prompt:
        return k_1NKd[:, rows], v_1NKd[:, rows]
    context = piece.contexts[spec.window]
    num_seen = int(context.mask[0, 0, -1].nonzero()[-1]) + 1
    keys, values = cache.read(spec.layer, context.table, 1, k_1NKd.dtype)
    return keys[:, :num_seen], values[:, :num_seen]


def _selected(spec: AttentionSpec, q_1CHd: Tensor, k_1LKd: Tensor, v_1LKd: Tensor, open_1CH: Tensor) -> Tensor:
    """Attention of a chunk at its open heads; its queries are the last C of L tokens."""
    num_keys, num_queries = k_1LKd.shape[1], q_1CHd.shape[1]
    one_document = torch.zeros(1, num_keys, dtype=torch.int64)
    tiles = packed_tiles(one_document, spans=[(num_keys - num_queries, num_keys)], window=spec.window)
    return selected_attention(q_1CHd, k_1LKd, v_1LKd, open_1CH, tiles)


def _add_up(chunk: Chunk, hidden_CD: Tensor) -> None:
    sum_D, sequence = hidden_CD.double().sum(dim=0), chunk.sequence
    before_D = None if chunk.start == 0 else sequence.hidden_sum_D
    sequence.hidden_sum_D = sum_D if before_D is None else before_D + sum_D


def _decode_rows(decodes: list[Sequence]) -> list[DecodeRow]:
    return [DecodeRow(s, s.num_cached + place) for s in decodes for place in range(1 + len(s.draft))]


def _by_context(rows: list[DecodeRow]) -> list[list[DecodeRow]]:
    groups: defaultdict[int, list[DecodeRow]] = defaultdict(list)
    for row in rows:
        groups[_context(row)].append(row)
    return [groups[context] for context in sorted(groups)]


def _context(row: DecodeRow) -> int:
    return _round_up(row.position + 1, CONTEXT_STEP)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
