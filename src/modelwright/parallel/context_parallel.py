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
all-gather; both send about the same bytes.

Legend: B rows, T tokens of a whole row, S those on this rank, H query heads, K key/value heads, d head width, R ranks.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable imports TorchDynamo at once, which takes 0.5 s

from modelwright.core.errors import ConfigError
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.attention import ALL_TOKENS, packed_attend, tiled_attention
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Attend, AttentionSpec
from modelwright.ops.attention import capped_attention, masked_attention, masked_capped_attention, packed_tiles
from modelwright.ops.partial_attention import (
    Visible,
    add_keys,
    empty_output,
    gradients_of_keys,
    visible_blocks,
    visible_mask,
)
from modelwright.parallel.config import ContextAttention
from modelwright.parallel.mesh import World, gathered, summed_slice, with_gradient

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
    row_len, on_cpu = segments_BT.shape[1], segments_BT.device.type == "cpu"
    own_S = _places(row_len, context.size, context.rank).to(segments_BT.device)
    spans = [local_spans(row_len, context.size, rank) for rank in range(context.size)]
    own_spans = spans[context.rank]
    # Tiles, masks and visible blocks are made once for all layers.
    if kind == "ring":
        visible = [
            visible_blocks(segments_BT, own_spans, keys) if on_cpu else visible_mask(segments_BT, own_spans, keys)
            for keys in spans
        ]

        def attend(spec: AttentionSpec, q_BSHd: Tensor, k_BSKd: Tensor, v_BSKd: Tensor) -> Tensor:
            return ring_attention(q_BSHd, k_BSKd, v_BSKd, context, visible)  # pyright: ignore

    elif on_cpu:
        tiles = {window: packed_tiles(segments_BT, spans=own_spans, window=window) for window in windows}

        def attend(spec: AttentionSpec, q_BSHd: Tensor, k_BSKd: Tensor, v_BSKd: Tensor) -> Tensor:
            whole = _whole_rows(k_BSKd, v_BSKd, context)
            if spec.soft_cap:
                return capped_attention(q_BSHd, *whole, tiles[spec.window], spec.soft_cap)  # pyright: ignore
            return tiled_attention(spec, q_BSHd, *whole, tiles[spec.window])

    else:
        same_BST = segments_BT[:, own_S, None] == segments_BT[:, None, :]
        distance_ST = own_S[:, None] - torch.arange(row_len, device=own_S.device)
        masks_B1ST = {
            window: (same_BST & (distance_ST >= 0) & (distance_ST < (window or row_len))).unsqueeze(1)
            for window in windows
        }

        def attend(spec: AttentionSpec, q_BSHd: Tensor, k_BSKd: Tensor, v_BSKd: Tensor) -> Tensor:
            k_BTKd, v_BTKd = _whole_rows(k_BSKd, v_BSKd, context)
            mask_B1ST = masks_B1ST[spec.window]
            if spec.soft_cap:
                return masked_capped_attention(q_BSHd, k_BTKd, v_BTKd, mask_B1ST, spec.soft_cap)
            return masked_attention(q_BSHd.to(v_BTKd.dtype), k_BTKd, v_BTKd, mask_B1ST)

    return attend, part.take_tokens(own_S)


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


def local_spans(row_len: int, num_ranks: int, rank: int) -> Sequence[tuple[int, int]]:
    """Returns `(start, end)` of the two runs of tokens that `rank` holds, in storage order."""
    if row_len % (2 * num_ranks):
        raise ConfigError(
            f"context: rows of {row_len} tokens do not divide into two equal chunks for each of {num_ranks} ranks; "
            f"choose a row length that is a multiple of {2 * num_ranks}"
        )
    chunk = row_len // (2 * num_ranks)
    return [(first * chunk, (first + 1) * chunk) for first in (rank, 2 * num_ranks - 1 - rank)]


def _places(row_len: int, num_ranks: int, rank: int) -> Tensor:
    return torch.cat([torch.arange(start, end) for start, end in local_spans(row_len, num_ranks, rank)])


def _whole_rows(k_BSKd: Tensor, v_BSKd: Tensor, context: World) -> tuple[Tensor, Tensor]:
    """Gathers keys and values of all tokens in row order, in the format of the values, as one message."""
    num_ranks, row_len = context.size, k_BSKd.shape[1] * context.size
    order_T = torch.cat([_places(row_len, num_ranks, rank) for rank in range(num_ranks)]).to(k_BSKd.device)
    sorted_T = order_T.argsort()
    both_BTKd = with_gradient(
        torch.cat([k_BSKd.to(v_BSKd.dtype), v_BSKd], dim=2),
        lambda both: gathered(both, context, 1)[:, sorted_T],
        lambda gradient: summed_slice(gradient[:, order_T], context, 1),
    )
    k_BTKd, v_BTKd = both_BTKd.chunk(2, dim=2)
    return k_BTKd, v_BTKd
