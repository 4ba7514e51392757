"""Attention over packed rows in one fused kernel on CUDA: PyTorch's FlexAttention (Dong et al. 2024, arXiv 2412.05496)
under a block mask that is computed from the documents' starts.

A query sees the keys from its document's first token, or the first in its window, up to itself. The first visible key
never decreases along a row, so that the keys which a block of queries sees are one range, and whether a pair of blocks
is visible in part, in full or not at all follows from the first visible keys of the block's first and last query.
PyTorch's create_block_mask would evaluate the mask for all T x T pairs; nothing here is larger than the pairs of
blocks. All of it runs on the device: the mask of a batch costs no synchronization with the host.

`torch.nn.attention.varlen` is not used: it needs the number of documents on the host for each microbatch, has no soft
cap and no FP32. `make gpu-check ARGS="--parts attention"` measures both.

Legend: B rows, T tokens, H query heads, K key/value heads, d head width, N blocks of tokens in a row.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo import config as dynamo
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128
"""Queries and keys of a block: FlexAttention's default."""
MIN_HEAD_DIM = 16
"""Narrowest heads of the kernel (`tl.dot` needs 16 columns); narrower ones are padded with zeros."""

KERNELS = 256
"""Most kernels of one process; each is compiled once. Dynamo's own limit is 8, which evaluation and alignment reach."""


def first_visible(segments_BT: Tensor, window: int = 0) -> Tensor:
    """First key that each query sees, int32 [B, T]. segments_BT: runs of equal numbers are documents."""
    place_T = torch.arange(segments_BT.shape[1], device=segments_BT.device, dtype=torch.int32)
    is_first_BT = F.pad(segments_BT[:, 1:] != segments_BT[:, :-1], (1, 0), value=True)
    first_BT = (place_T * is_first_BT).cummax(dim=1).values
    return first_BT.maximum(place_T - (window - 1)) if window else first_BT


def packed_block_mask(segments_BT: Tensor, window: int = 0) -> BlockMask:
    """The block mask of causal attention within documents, and within the last `window` tokens if it is not 0. Equals
    `document_mask` where equal segment numbers are adjacent.
    """
    first_BT, row_len = first_visible(segments_BT, window), segments_BT.shape[1]
    starts_N = torch.arange(0, row_len, BLOCK, device=segments_BT.device)
    ends_N = (starts_N + BLOCK).clamp(max=row_len) - 1
    first_of_first_BN1, first_of_last_BN1 = first_BT[:, starts_N, None], first_BT[:, ends_N, None]
    # Blocks of keys in the last dimension. Only the diagonal block has keys after a query.
    is_seen_BNN = (starts_N <= ends_N[:, None]) & (ends_N >= first_of_first_BN1)
    # A last block beyond the row's end is never full, as in PyTorch's create_block_mask.
    is_full_BNN = (ends_N <= starts_N[:, None]) & (starts_N >= first_of_last_BN1)
    is_full_BNN &= (starts_N + BLOCK <= row_len)[:, None]

    def is_visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= first_BT[row, query])

    (partial, partial_at), (full, full_at) = _listed(is_seen_BNN & ~is_full_BNN), _listed(is_full_BNN & is_seen_BNN)
    return BlockMask.from_kv_blocks(
        partial, partial_at, full, full_at, BLOCK_SIZE=BLOCK, mask_mod=is_visible, seq_lengths=(row_len, row_len)
    )


def _listed(is_chosen_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """Number of chosen blocks of keys for each block of queries [B, 1, N], and all blocks, those first [B, 1, N, N]."""
    order_BNN = is_chosen_BNN.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return is_chosen_BNN.sum(-1, dtype=torch.int32)[:, None], order_BNN.to(torch.int32)[:, None]


@cache
def compiled_kernel() -> Any:
    """FlexAttention outside of compiled blocks: uncompiled it would compute all scores.

    One kernel for each number of rows and tokens: with symbolic sizes, which Dynamo tries from the second size on,
    FlexAttention fails to trace. `fullgraph` makes a call beyond KERNELS an error: without it, Dynamo would run the
    uncompiled function, which holds all T x T scores.
    """
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)  # pyright: ignore[reportUnknownMemberType]


def fused_packed_attention(
    q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, mask: BlockMask, soft_cap: float = 0.0
) -> Tensor:
    """Causal attention within documents, [B, T, H, d] in the format of `v_BTKd`. mask: by `packed_block_mask`.
    soft_cap: scores s become soft_cap * tanh(s / soft_cap); 0 leaves them.
    """
    head_dim = q_BTHd.shape[-1]
    pad = (0, max(0, MIN_HEAD_DIM - head_dim))
    q, k, v = (F.pad(x.to(v_BTKd.dtype), pad).transpose(1, 2) for x in (q_BTHd, k_BTKd, v_BTKd))

    def capped(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return soft_cap * torch.tanh(score / soft_cap)

    def attend(run: Any) -> Tensor:
        score_mod = capped if soft_cap else None
        return run(q, k, v, score_mod=score_mod, block_mask=mask, scale=head_dim**-0.5, enable_gqa=True)

    if torch.compiler.is_compiling():
        out_BHTd = attend(flex_attention)
    else:
        with dynamo.patch(recompile_limit=KERNELS):
            out_BHTd = attend(compiled_kernel())
    return out_BHTd[..., :head_dim].transpose(1, 2)
