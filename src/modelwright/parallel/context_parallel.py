"""Context parallelism: the ranks of one axis share the tokens of each row.

A row of T tokens is split into two chunks per rank, and rank r takes chunk r from the front and chunk r from the back,
so that the causal work of a long document is the same on every rank. Queries stay. Keys and values of all tokens are
gathered in every layer (as in Llama 3, section 3.3.2), and their gradients summed and scattered; or they are passed
from rank to rank. A document attends only to itself, wherever rows are split. Sums over the tokens of all ranks equal
those over whole rows.

Ring attention (Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context"): every rank
starts with its own keys and values and passes them on, so that after R steps its queries have seen all of them; the
next block is in flight while the present one is computed. In backward the blocks travel once more, each with its
gradients, which return to their owner after the last step. No rank holds the keys of whole rows, as it does with the
all-gather; both send about the same bytes. A softmax over all keys is a weighted sum of softmaxes over disjoint sets of
keys; the weights follow from the logarithm of each softmax's denominator (log-sum-exp), so that keys can be visited one
block after another (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax").

No device holds scores or a mask of all pairs: on a CPU documents are computed block by block, on CUDA by one fused
kernel under a block mask that knows the places of a rank's tokens (`ops/flex_attention.py`).

Legend: B rows, T tokens of a whole row, S those on this rank (queries), N keys, H query heads, K key/value heads, d
head width, R ranks. Query head h reads key/value head h // (H / K).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable imports TorchDynamo at once, which takes 0.5 s
from torch.nn.attention.flex_attention import BlockMask

from modelwright.core.config import ConfigError
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.attention import ALL_TOKENS, packed_attend
from modelwright.model.decoder import Attend, AttentionSpec, ModelConfig
from modelwright.ops.flex_attention import Span, fused_partial_attention, packed_block_mask, places_of
from modelwright.ops.matmul import upcast
from modelwright.parallel.mesh import ContextAttention, World, gathered, summed_slice, with_gradient


class VisibleBlock(NamedTuple):
    """Queries and keys of one row that see each other: all of them, or, on the diagonal, each query the keys up to its
    own position. All four bounds are positions in the tensors of queries and keys, which may hold only some of the
    row's tokens.
    """

    row: int
    query_start: int
    query_end: int
    key_start: int
    key_end: int
    is_diagonal: bool


@dataclass(frozen=True)
class Blocks:
    """The keys of one rank that the queries of another see, as a list of blocks, for a CPU."""

    blocks: Sequence[VisibleBlock]


Visible = Blocks | BlockMask
"""The latter, by `packed_block_mask`, for any device."""


def visible_blocks(segments_BT: Tensor, query_spans: Sequence[Span], key_spans: Sequence[Span]) -> Blocks:
    """Finds the keys at `key_spans` that the queries at `query_spans` see: earlier tokens of their own document, and
    themselves. segments_BT: the document of each token of the whole rows, on the CPU. Two spans are equal or do not
    overlap. A tensor of queries or keys holds the spans concatenated.
    """
    blocks: list[VisibleBlock] = []
    for row, segments_T in enumerate(segments_BT):
        start = 0
        for length in torch.unique_consecutive(segments_T, return_counts=True)[1].tolist():
            document = (start, start + length)
            for query, query_place in _within(document, query_spans):
                for key, key_place in _within(document, key_spans):
                    if key[0] <= query[0]:
                        ends = query_place + query[1] - query[0], key_place + key[1] - key[0]
                        blocks.append(VisibleBlock(row, query_place, ends[0], key_place, ends[1], key == query))
            start += length
    return Blocks(blocks)


def _within(document: Span, spans: Sequence[Span]) -> Iterator[tuple[Span, int]]:
    """Yields the part of each span within the document, and its position in the tensor of all spans."""
    offset = 0
    for start, end in spans:
        first, last = max(start, document[0]), min(end, document[1])
        if first < last:
            yield (first, last), offset + first - start
        offset += end - start


def empty_output(q_BSHd: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the output [B, S, H, d] and log-sum-exp [B, S, H] of attention to no keys, in FP32 at least."""
    dtype = torch.promote_types(q_BSHd.dtype, torch.float32)
    return q_BSHd.new_zeros(q_BSHd.shape, dtype=dtype), q_BSHd.new_full(q_BSHd.shape[:3], -math.inf, dtype=dtype)


def add_keys(
    out_BSHd: Tensor, lse_BSH: Tensor, q_BSHd: Tensor, k_BNKd: Tensor, v_BNKd: Tensor, visible: Visible
) -> None:
    """Accumulates attention to further keys: `out_BSHd` and `lse_BSH` are changed in place. Keys of which every query
    sees at least one must come first.
    """
    q_BSHd, k_BNKd, v_BNKd = upcast(q_BSHd, k_BNKd, v_BNKd)
    if isinstance(visible, BlockMask):
        _merge(out_BSHd, lse_BSH, *fused_partial_attention(q_BSHd, k_BNKd, v_BNKd, visible))
        return
    for block in visible.blocks:
        query, key = _slices(block)
        part_HSd, part_lse_HS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _heads(q_BSHd[query]), *_repeated(q_BSHd, k_BNKd[key], v_BNKd[key]), is_causal=block.is_diagonal
        )
        _merge(out_BSHd[query], lse_BSH[query], part_HSd[0].transpose(0, 1), part_lse_HS[0].transpose(0, 1))


def gradients_of_keys(
    grad_BSHd: Tensor,
    out_BSHd: Tensor,
    lse_BSH: Tensor,
    q_BSHd: Tensor,
    k_BNKd: Tensor,
    v_BNKd: Tensor,
    visible: Visible,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the contribution of some keys to the gradients of the queries [B, S, H, d], and the gradients of these
    keys and values from these queries [B, N, K, d], in at least FP32. out_BSHd, lse_BSH: of the whole softmax, after
    all keys were added.
    """
    dtype = lse_BSH.dtype
    grad_BSHd, out_BSHd, q_BSHd, k_BNKd, v_BNKd = upcast(grad_BSHd, out_BSHd, q_BSHd, k_BNKd, v_BNKd)
    if isinstance(visible, BlockMask):
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in (q_BSHd, k_BNKd, v_BNKd))
            part_BSHd, part_lse_BSH = fused_partial_attention(q, k, v, visible)
        # The whole softmax is the sum over parts of exp(part's lse - lse) times the part: by its derivatives.
        grad_part_BSHd = (part_lse_BSH - lse_BSH).exp().unsqueeze(-1) * grad_BSHd
        grad_lse_BSH = (grad_part_BSHd * (part_BSHd - out_BSHd)).sum(-1)
        outer = grad_part_BSHd.to(part_BSHd.dtype), grad_lse_BSH.to(part_lse_BSH.dtype)
        parts = torch.autograd.grad((part_BSHd, part_lse_BSH), (q, k, v), outer)
        grad_q, grad_k, grad_v = (part.to(dtype) for part in parts)
        return grad_q, grad_k, grad_v
    grad_q, grad_k, grad_v = (torch.zeros(x.shape, dtype=dtype) for x in (q_BSHd, k_BNKd, v_BNKd))
    for block in visible.blocks:
        query, key = _slices(block)
        part_q, part_k, part_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _heads(grad_BSHd[query]),
            _heads(q_BSHd[query]),
            *_repeated(q_BSHd, k_BNKd[key], v_BNKd[key]),
            _heads(out_BSHd[query]),
            lse_BSH[query].transpose(0, 1).unsqueeze(0),
            0.0,
            block.is_diagonal,
        )
        grad_q[query] += part_q[0].transpose(0, 1)
        for total, part in ((grad_k, part_k), (grad_v, part_v)):
            total[key] += part[0].unflatten(0, (total.shape[2], -1)).sum(1, dtype=dtype).transpose(0, 1)
    return grad_q, grad_k, grad_v


def _slices(block: VisibleBlock) -> tuple[tuple[int, slice], tuple[int, slice]]:
    return (block.row, slice(block.query_start, block.query_end)), (block.row, slice(block.key_start, block.key_end))


def _heads(x_SHd: Tensor) -> Tensor:
    return x_SHd.transpose(0, 1).unsqueeze(0)


def _repeated(q_BSHd: Tensor, *keys_and_values_NKd: Tensor) -> list[Tensor]:
    """[1, H, N, d]: each key/value head once for every query head that reads it."""
    num_heads = q_BSHd.shape[2]
    return [_heads(x.repeat_interleave(num_heads // x.shape[1], dim=1)) for x in keys_and_values_NKd]


def _merge(out_xHd: Tensor, lse_xH: Tensor, part_xHd: Tensor, part_lse_xH: Tensor) -> None:
    """Combines with a softmax over further keys, in place."""
    # Each part's weight is its share of the joint denominator, exp(lse - lse of both).
    lse_after_xH = torch.logaddexp(lse_xH, part_lse_xH.to(lse_xH.dtype))
    out_xHd *= (lse_xH - lse_after_xH).exp().unsqueeze(-1)
    out_xHd += part_xHd * (part_lse_xH - lse_after_xH).exp().unsqueeze(-1)
    lse_xH.copy_(lse_after_xH)


_KEYS, _GRADIENTS = 0, 1
"""Tags of the two kinds of messages, which may be in flight between two ranks at once."""


@_disable_dynamo
def ring_attention(
    q_BSHd: Tensor, k_BSKd: Tensor, v_BSKd: Tensor, context: World, visible: Sequence[Visible]
) -> Tensor:
    """Computes attention of this rank's queries to the keys of all ranks of `context`, [B, S, H, d] in the dtype of
    `v_BSKd`. visible: for each rank of the axis, the keys of that rank that this rank's queries see; every query sees a
    key of its own rank. Every rank calls it with tensors of the same shape. Differentiable once.
    """
    return _RingAttention.apply(q_BSHd.to(v_BSKd.dtype), k_BSKd.to(v_BSKd.dtype), v_BSKd, context, visible)  # type: ignore


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BSHd, k_BSKd, v_BSKd, context: World, visible: Sequence[Visible]):
        both = torch.stack([k_BSKd, v_BSKd])
        out_BSHd, lse_BSH = empty_output(q_BSHd)
        for source, (k, v) in _visits(both, context):
            add_keys(out_BSHd, lse_BSH, q_BSHd, k, v, visible[source])
        out_BSHd = out_BSHd.to(v_BSKd.dtype)
        ctx.save_for_backward(q_BSHd, both, out_BSHd, lse_BSH)
        ctx.context, ctx.visible = context, visible
        return out_BSHd

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_BSHd):
        q_BSHd, both, out_BSHd, lse_BSH = ctx.saved_tensors
        grad_q_BSHd = torch.zeros_like(q_BSHd, dtype=lse_BSH.dtype)
        arriving: Callable[[], Tensor] | None = None
        for source, (k, v) in _visits(both, ctx.context):
            part_q, *parts = gradients_of_keys(grad_BSHd, out_BSHd, lse_BSH, q_BSHd, k, v, ctx.visible[source])
            grad_q_BSHd += part_q
            gradients = torch.stack(parts) if arriving is None else arriving() + torch.stack(parts)
            # Gradients follow their block one step later, so the last shift takes each to its owner.
            arriving = ctx.context.start_ring_shift(gradients, tag=_GRADIENTS)
        assert arriving is not None
        grad_k_BSKd, grad_v_BSKd = arriving().to(both.dtype)
        return grad_q_BSHd.to(q_BSHd.dtype), grad_k_BSKd, grad_v_BSKd, None, None


def _visits(both: Tensor, context: World) -> Iterator[tuple[int, Tensor]]:
    """Yields `(rank, its keys and values)` for every rank of the axis: this rank first, then the one before it."""
    for step in range(context.size):
        is_last = step == context.size - 1
        arriving = None if is_last else context.start_ring_shift(both, tag=_KEYS)
        yield (context.rank - step) % context.size, both
        if arriving is not None:
            both = arriving()


def shard_sequence(
    part: TokenBatch, context: World, kind: ContextAttention = "all_gather", windows: Sequence[int] = ALL_TOKENS
) -> tuple[Attend, TokenBatch]:
    """Returns the `Attend` of packed rows, and this rank's tokens of them. kind: how ranks attend to each other's
    tokens; windows: those of the model's layers. All ranks of the axis pass the same rows. Raises `ConfigError` if the
    tokens of a row do not divide evenly.
    """
    segments_BT = part.segments_BT
    if context.size == 1:
        return packed_attend(segments_BT, windows), part
    row_len, device = segments_BT.shape[1], segments_BT.device
    spans = [local_spans(row_len, context.size, rank) for rank in range(context.size)]
    own_spans = spans[context.rank]
    # Tiles, masks and visible blocks are made once for all layers.
    if kind == "ring":
        visible = [
            visible_blocks(segments_BT, own_spans, keys)
            if device.type == "cpu"
            else packed_block_mask(segments_BT, 0, own_spans, keys)
            for keys in spans
        ]

        def attend(spec: AttentionSpec, q_BSHd: Tensor, k_BSKd: Tensor, v_BSKd: Tensor) -> Tensor:
            return ring_attention(q_BSHd, k_BSKd, v_BSKd, context, visible)  # pyright: ignore

    else:
        attend_whole = packed_attend(segments_BT, windows, own_spans)
        order_T = places_of([span for of_rank in spans for span in of_rank], device)
        sorted_T = order_T.argsort()

        def attend(spec: AttentionSpec, q_BSHd: Tensor, k_BSKd: Tensor, v_BSKd: Tensor) -> Tensor:
            # Keys and values of all tokens in row order, in the format of the values, as one message
            both_BTKd = with_gradient(
                torch.cat([k_BSKd.to(v_BSKd.dtype), v_BSKd], dim=2),
                lambda both: gathered(both, context, 1)[:, sorted_T],
                lambda gradient: summed_slice(gradient[:, order_T], context, 1),
            )
            return attend_whole(spec, q_BSHd, *both_BTKd.chunk(2, dim=2))

    return attend, part.take_tokens(places_of(own_spans, device))


def check_context(model: ModelConfig, num_ranks: int, kind: ContextAttention) -> None:
    """Raises `ConfigError` if the tokens of a row cannot be divided for such a model."""
    if num_ranks == 1:
        return
    if model.rope.depends_on_length:
        raise ConfigError(
            f"context: the model's rotary scaling ({model.rope.kind}) depends on the length of each document, which no "
            f"rank of {num_ranks} sees; use context 1 and another axis"
        )
    if kind == "ring" and (model.windows != ALL_TOKENS or model.attention.soft_cap):
        raise ConfigError(
            "context_attention: ring supports neither sliding windows nor soft caps of scores, which this model has; "
            "use all_gather"
        )


def local_spans(row_len: int, num_ranks: int, rank: int) -> Sequence[Span]:
    """Returns `(start, end)` of the two runs of tokens that `rank` holds, in storage order."""
    if row_len % (2 * num_ranks):
        raise ConfigError(
            f"context: rows of {row_len} tokens do not divide into two equal chunks for each of {num_ranks} ranks; "
            f"choose a row length that is a multiple of {2 * num_ranks}"
        )
    chunk = row_len // (2 * num_ranks)
    return [(first * chunk, (first + 1) * chunk) for first in (rank, 2 * num_ranks - 1 - rank)]
