"""How much attention each token of a row receives from the others.

Legend: B rows, T tokens, H query heads, K key/value heads, d head width, G = H / K.
"""

import torch
from torch import Tensor

from modelwright.ops.attention import document_mask
from modelwright.ops.lowp_emulation import product


@torch.no_grad()
def received_attention(q_BTHd: Tensor, k_BTKd: Tensor, segments_BT: Tensor) -> Tensor:
    """The softmax weight on each token [B, T], FP32, summed over the queries of its document from itself on, relative
    to uniform attention over all preceding tokens; the mean over heads.

    The unit matters: without it, the first tokens of a document would always receive most. Row by row, so only the
    weights [H, T, T] of one row are in memory at a time.
    """
    group = q_BTHd.shape[2] // k_BTKd.shape[2]
    received = []
    for q_THd, k_TKd, segments_T in zip(q_BTHd, k_BTKd, segments_BT, strict=True):
        mask_TT = document_mask(segments_T[None])[0, 0]
        q_HTd, k_HTd = q_THd.transpose(0, 1), k_TKd.repeat_interleave(group, dim=1).transpose(0, 1)
        scores_HTT = product(q_HTd, k_HTd.transpose(1, 2)).float() / q_THd.shape[-1] ** 0.5
        weights_HTT = scores_HTT.masked_fill_(~mask_TT, float("-inf")).softmax(dim=-1)
        even_TT = mask_TT / mask_TT.sum(dim=-1, keepdim=True)
        received.append(weights_HTT.sum(dim=1).mean(dim=0) / even_TT.sum(dim=0))
    return torch.stack(received)
