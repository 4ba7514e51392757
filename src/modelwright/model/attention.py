"""`Attend` functions for whole rows: causal, and causal within the documents of a packed row.

Tiled ones, which a CPU uses, compute only the heads that a layer has selected for each token; the others, and all with
a soft cap, compute all heads.
"""

from collections.abc import Sequence

from torch import Tensor

from modelwright.model.decoder import Attend, AttentionSpec
from modelwright.ops.attention import (
    Tiles,
    causal_attention,
    causal_mask,
    document_mask,
    masked_attention,
    packed_attention,
    packed_cuts,
)
from modelwright.ops.capped_attention import capped_attention, masked_capped_attention
from modelwright.ops.selected_attention import selected_attention

ALL_TOKENS = (0,)
"""The windows of a model whose layers have none."""


def causal_attend() -> Attend:
    """Returns causal attention: every token sees all tokens before it and itself, or those in the layer's window."""

    def attend(spec: AttentionSpec, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor) -> Tensor:
        if spec.soft_cap:
            mask_11TT = causal_mask(q_BTHd.shape[1], spec.window, q_BTHd.device)
            return masked_capped_attention(q_BTHd, k_BTKd, v_BTKd, mask_11TT, spec.soft_cap)
        return causal_attention(q_BTHd, k_BTKd, v_BTKd, spec.window)

    return attend


def packed_attend(segments_BT: Tensor, windows: Sequence[int] = ALL_TOKENS) -> Attend:
    """Returns causal attention within documents. segments_BT: document of each token; windows: `ModelConfig.windows`.

    On a CPU each document is computed separately, unless rows are short; elsewhere a mask over whole rows is used.
    """
    if segments_BT.device.type != "cpu":
        return masked_attend(segments_BT, windows)
    tiles = {window: packed_cuts(segments_BT, window) for window in windows}

    def attend_tiles(spec: AttentionSpec, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor) -> Tensor:
        if spec.soft_cap:
            return capped_attention(q_BTHd, k_BTKd, v_BTKd, tiles[spec.window], spec.soft_cap)  # pyright: ignore
        return tiled_attention(spec, q_BTHd, k_BTKd, v_BTKd, tiles[spec.window])

    return attend_tiles


def tiled_attention(spec: AttentionSpec, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, tiles: Tiles) -> Tensor:
    """Attention of a layer without a soft cap on a CPU, of the open heads if the layer selects heads."""
    if spec.open_BTH is None:
        return packed_attention(q_BTHd, k_BTKd, v_BTKd, tiles)
    return selected_attention(q_BTHd, k_BTKd, v_BTKd, spec.open_BTH, tiles)


def masked_attend(segments_BT: Tensor, windows: Sequence[int] = ALL_TOKENS) -> Attend:
    """`packed_attend` by a mask over whole rows: on a CPU for rows so short that tiles cost more than they save."""
    masks_B1TT = {window: document_mask(segments_BT, window) for window in windows}

    def attend_mask(spec: AttentionSpec, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor) -> Tensor:
        if spec.soft_cap:
            return masked_capped_attention(q_BTHd, k_BTKd, v_BTKd, masks_B1TT[spec.window], spec.soft_cap)
        return masked_attention(q_BTHd, k_BTKd, v_BTKd, masks_B1TT[spec.window])

    return attend_mask
