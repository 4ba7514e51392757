"""Attention over packed rows, and over a paged cache, in one fused kernel on CUDA: PyTorch's FlexAttention (Dong et al.
2024, arXiv 2412.05496) under a block mask that is computed from the documents' starts, or from block tables.

A query sees the keys from its document's first token, or the first in its window, up to itself. The first visible key
never decreases along a row, so that the keys which a block of queries sees are one range, and whether a pair of blocks
is visible in part, in full or not at all follows from the first visible keys of the block's first and last query.
PyTorch's create_block_mask would evaluate the mask for all T x T pairs; nothing here is larger than the pairs of
blocks. All of it runs on the device: the mask of a batch costs no synchronization with the host.

`torch.nn.attention.varlen` is not used: it needs the number of documents on the host for each microbatch, has no soft
cap and no FP32. `make gpu-check ARGS="--parts attention"` measures both.

Legend: B rows, T tokens, H query heads, K key/value heads, d head width, M blocks of queries, N blocks of keys; of some
tokens of a row, S queries and U keys; of a paged cache, R decoding tokens, M blocks in a table, L blocks of S tokens in
the cache.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from modelwright.core.config import ModelwrightError
from modelwright.ops.matmul import triton_compiles

Span = tuple[int, int]
"""`(start, end)` of consecutive tokens of a row."""

BLOCK = 128
"""Queries and keys of a block: FlexAttention's default."""
MIN_HEAD_DIM = 16
"""Narrowest heads of the kernel (`tl.dot` needs 16 columns); narrower ones are padded with zeros."""

KERNELS = 256
"""Most kernels of one process; each is compiled once. Dynamo's own limit is 8, which evaluation and alignment reach."""

SPLITS = 8
"""Parts of a decoding token's keys that are computed at once. PyTorch's own number follows the number of rows, and with
it the order of a sum, so that neighbors would change a request's last bits."""


def first_visible(segments_BT: Tensor, window: int = 0) -> Tensor:
    """First key that each query sees, int32 [B, T]. segments_BT: runs of equal numbers are documents."""
    place_T = torch.arange(segments_BT.shape[1], device=segments_BT.device, dtype=torch.int32)
    is_first_BT = F.pad(segments_BT[:, 1:] != segments_BT[:, :-1], (1, 0), value=True)
    first_BT = (place_T * is_first_BT).cummax(dim=1).values
    return first_BT.maximum(place_T - (window - 1)) if window else first_BT


def places_of(spans: Sequence[Span], device: torch.device) -> Tensor:
    """Places in the row of the tokens of some spans, int64, made on the device: nothing is copied from the host."""
    return torch.cat([torch.arange(start, end, device=device) for start, end in spans])


def packed_block_mask(
    segments_BT: Tensor,
    window: int = 0,
    query_spans: Sequence[Span] | None = None,
    key_spans: Sequence[Span] | None = None,
) -> BlockMask:
    """The block mask of causal attention within documents, and within the last `window` tokens if it is not 0. Equals
    `document_mask` where equal segment numbers are adjacent. query_spans, key_spans: tokens of the row that the tensors
    of queries and keys hold, in ascending order; by default all of them.
    """
    first_BT, row_len, device = first_visible(segments_BT, window), segments_BT.shape[1], segments_BT.device
    query_S, key_U = (places_of(spans or [(0, row_len)], device) for spans in (query_spans, key_spans))

    def blocks(place_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Place of the first token of each block, of its last one, and whether it has all of its tokens."""
        starts_M = torch.arange(0, len(place_S), BLOCK, device=device)
        ends_M = (starts_M + BLOCK).clamp(max=len(place_S)) - 1
        return place_S[starts_M], place_S[ends_M], starts_M + BLOCK <= len(place_S)

    (first_query_M, last_query_M, is_whole_M), (first_key_N, last_key_N, is_whole_N) = blocks(query_S), blocks(key_U)
    first_of_first_BM1, first_of_last_BM1 = first_BT[:, first_query_M, None], first_BT[:, last_query_M, None]
    # Where spans have a gap within a block, some blocks count as seen of which no query sees a key.
    is_seen_BMN = (first_key_N <= last_query_M[:, None]) & (last_key_N >= first_of_first_BM1)
    # A block beyond the last token is never full, as in PyTorch's create_block_mask.
    is_full_BMN = (last_key_N <= first_query_M[:, None]) & (first_key_N >= first_of_last_BM1)
    is_full_BMN &= is_whole_M[:, None] & is_whole_N

    # Booleans, because the compiler would make a kernel for each value of captured spans.
    has_all_queries, has_all_keys = query_spans is None, key_spans is None

    def is_visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query, key = query if has_all_queries else query_S[query], key if has_all_keys else key_U[key]
        return (key <= query) & (key >= first_BT[row, query])

    (partial, partial_at), (full, full_at) = _listed(is_seen_BMN & ~is_full_BMN), _listed(is_full_BMN & is_seen_BMN)
    sizes = len(query_S), len(key_U)
    return BlockMask.from_kv_blocks(
        partial, partial_at, full, full_at, BLOCK_SIZE=BLOCK, mask_mod=is_visible, seq_lengths=sizes
    )


def _listed(is_chosen_BMN: Tensor) -> tuple[Tensor, Tensor]:
    """Number of chosen blocks of keys for each block of queries [B, 1, M], and all blocks, those first [B, 1, M, N]."""
    order_BMN = is_chosen_BMN.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return is_chosen_BMN.sum(-1, dtype=torch.int32)[:, None], order_BMN.to(torch.int32)[:, None]


@cache
def compiled_kernel() -> Any:
    """FlexAttention outside of compiled blocks: uncompiled it would compute all scores, as on CUDA without Triton.

    One kernel for each number of rows and tokens: with symbolic sizes, which Dynamo tries from the second size on,
    FlexAttention fails to trace. `fullgraph` makes a call beyond KERNELS an error: without it, Dynamo would run the
    uncompiled function, which holds all T x T scores.
    """
    if torch.cuda.is_available() and not triton_compiles():
        return flex_attention
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)  # pyright: ignore[reportUnknownMemberType]


def fused_packed_attention(
    q_BSHd: Tensor, k_BUKd: Tensor, v_BUKd: Tensor, mask: BlockMask, soft_cap: float = 0.0
) -> Tensor:
    """Causal attention within documents, [B, S, H, d] in the format of `v_BUKd`. mask: by `packed_block_mask`.
    soft_cap: scores s become soft_cap * tanh(s / soft_cap); 0 leaves them.
    """
    return _packed(q_BSHd, k_BUKd, v_BUKd, mask, soft_cap)[0]


def fused_partial_attention(q_BSHd: Tensor, k_BUKd: Tensor, v_BUKd: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """`fused_packed_attention` to some of the keys that the queries see, and the log-sum-exp of the scores [B, S, H] in
    at least FP32: 0 and minus infinity where a query sees none of them. Both are differentiable.
    """
    out_BSHd, lse_BHS = _packed(q_BSHd, k_BUKd, v_BUKd, mask, with_lse=True)
    assert lse_BHS is not None
    return out_BSHd, lse_BHS.transpose(1, 2)


def _packed(
    q_BSHd: Tensor, k_BUKd: Tensor, v_BUKd: Tensor, mask: BlockMask, soft_cap: float = 0.0, with_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    head_dim = q_BSHd.shape[-1]
    pad = (0, max(0, MIN_HEAD_DIM - head_dim))
    q, k, v = (F.pad(x.to(v_BUKd.dtype), pad).transpose(1, 2) for x in (q_BSHd, k_BUKd, v_BUKd))
    out_BHSd, lse_BHS = _attend(q, k, v, mask, head_dim, soft_cap, with_lse=with_lse)
    return out_BHSd[..., :head_dim].transpose(1, 2), lse_BHS


def paged_block_mask(tables_RM: Tensor, positions_R: Tensor, num_blocks: int, block_len: int, window: int) -> BlockMask:
    """The block mask of decoding tokens over a cache of `num_blocks` blocks in storage order: each sees the keys of its
    own block table up to its position, or the last `window` of them if it is not 0. tables_RM: int64 block numbers,
    from the sequence's first block; entries after the token's own block are not read.
    """
    num_rows, table_len = tables_RM.shape
    place_M = torch.arange(table_len, device=tables_RM.device)
    # Where a stored block is in its sequence. Blocks that a row does not list keep what is there: they are not visited.
    place_RL = tables_RM.new_zeros(num_rows, num_blocks, dtype=torch.int32)
    place_RL.scatter_(1, tables_RM, place_M.to(torch.int32).expand(num_rows, -1))
    first_R = (positions_R - (window - 1)).clamp(min=0) // block_len if window else torch.zeros_like(positions_R)
    listed_RM = tables_RM.gather(1, (first_R[:, None] + place_M).clamp(max=table_len - 1))
    # As many columns as the cache has blocks, which FlexAttention's kernel for CPUs asks for
    blocks_R11L = F.pad(listed_RM.to(torch.int32), (0, num_blocks - table_len))[:, None, None]
    count_R11 = (positions_R // block_len - first_R + 1).to(torch.int32)[:, None, None]

    last_R = positions_R.to(torch.int32)

    def is_visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = place_RL[row, key // block_len] * block_len + key % block_len
        is_earlier = position <= last_R[row]
        return is_earlier & (position > last_R[row] - window) if window else is_earlier

    return BlockMask.from_kv_blocks(
        count_R11,
        blocks_R11L,
        BLOCK_SIZE=(BLOCK, block_len),
        mask_mod=is_visible,
        seq_lengths=(1, num_blocks * block_len),
        compute_q_blocks=False,  # for gradients
    )


def fused_paged_attention(
    q_RHd: Tensor, k_KLSd: Tensor, v_KLSd: Tensor, mask: BlockMask, soft_cap: float = 0.0
) -> Tensor:
    """Attention of one query for each row, [R, H, d] in the format of the queries, over the keys and values of a whole
    cache. mask: by `paged_block_mask`.
    """
    k, v = k_KLSd.flatten(1, 2)[None], v_KLSd.flatten(1, 2)[None]
    out_RH1d, _ = _attend(q_RHd.to(k.dtype)[:, :, None], k, v, mask, q_RHd.shape[-1], soft_cap, splits=SPLITS)
    return out_RH1d[:, :, 0].to(q_RHd.dtype)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, head_dim: int, soft_cap: float, *, splits: int = 0,
    with_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    def capped(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return soft_cap * torch.tanh(score / soft_cap)

    def run(kernel: Any) -> tuple[Tensor, Tensor | None]:
        result = kernel(
            q,
            k,
            v,
            score_mod=capped if soft_cap else None,
            block_mask=mask,
            scale=head_dim**-0.5,
            enable_gqa=True,
            kernel_options={"SPLIT_KV": splits} if splits and q.is_cuda else None,
            return_aux=AuxRequest(lse=True) if with_lse else None,
        )
        return (result[0], result[1].lse) if with_lse else (result, None)

    if torch.compiler.is_compiling():
        return run(flex_attention)
    # Here, because every process would pay 2.5 s and 80 MB for this import.
    from torch._dynamo import config as dynamo
    from torch._dynamo.exc import FailOnRecompileLimitHit

    try:
        with dynamo.patch(recompile_limit=KERNELS):
            return run(compiled_kernel())
    except FailOnRecompileLimitHit as error:
        raise ModelwrightError(
            f"attention: compiled for {KERNELS} sizes of batches in this process, the most that it keeps; give batches "
            "fewer numbers of rows and row lengths"
        ) from error
