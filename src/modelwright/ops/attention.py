"""Softmax attention over whole rows: the fast path (PyTorch's fused kernels) and its naive twin.

Legend: B rows, T tokens, H query heads, K key/value heads, d head width. Query head h reads key/value head h * K // H.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def document_mask(segments_BT: Tensor) -> Tensor:
    """Boolean [B, 1, T, T]: true where query token i may see key token j <= i of the same segment.

    A token always sees itself, padding too, so that no row of the softmax is empty.
    """
    same_BTT = segments_BT[:, :, None] == segments_BT[:, None, :]
    return same_BTT.tril().unsqueeze(1)


def causal_attention(q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor) -> Tensor:
    """Causal attention, [B, T, H, d]."""
    out_BHTd = F.scaled_dot_product_attention(
        q_BTHd.transpose(1, 2), k_BTKd.transpose(1, 2), v_BTKd.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    return out_BHTd.transpose(1, 2)


def masked_attention(q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, mask_B1TT: Tensor) -> Tensor:
    """Attention under a boolean mask (true = visible), [B, T, H, d]."""
    out_BHTd = F.scaled_dot_product_attention(
        q_BTHd.transpose(1, 2), k_BTKd.transpose(1, 2), v_BTKd.transpose(1, 2), attn_mask=mask_B1TT, enable_gqa=True
    )
    return out_BHTd.transpose(1, 2)


def masked_attention_naive(q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, mask_B1TT: Tensor) -> Tensor:
    """The definition, step by step; the twin of `masked_attention`."""
    group = q_BTHd.shape[2] // k_BTKd.shape[2]
    k_BTHd, v_BTHd = (x.repeat_interleave(group, dim=2) for x in (k_BTKd, v_BTKd))
    scores_BHTT = torch.einsum("bthd,bshd->bhts", q_BTHd, k_BTHd) / q_BTHd.shape[-1] ** 0.5
    weights_BHTT = scores_BHTT.masked_fill(~mask_B1TT, float("-inf")).softmax(dim=-1)
    return torch.einsum("bhts,bshd->bthd", weights_BHTT, v_BTHd)
