"""`Attend` functions for whole rows: causal, and causal within the documents of a packed row."""

from torch import Tensor

from modelwright.model.decoder import Attend
from modelwright.ops.attention import (
    causal_attention,
    document_mask,
    masked_attention,
    packed_attention,
    packed_cuts,
)


def causal_attend() -> Attend:
    """Every token sees all tokens before it and itself."""

    def attend(layer: int, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor) -> Tensor:
        return causal_attention(q_BTHd, k_BTKd, v_BTKd)

    return attend


def packed_attend(segments_BT: Tensor) -> Attend:
    """Every token sees the tokens of its own document before it and itself; `segments_BT` names the documents.

    On a CPU each document is computed by itself, unless rows are short; elsewhere a mask over whole rows is used.
    """
    if segments_BT.device.type == "cpu":
        tiles = packed_cuts(segments_BT)

        def attend_tiles(layer: int, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor) -> Tensor:
            return packed_attention(q_BTHd, k_BTKd, v_BTKd, tiles)

        return attend_tiles
    return masked_attend(segments_BT)


def masked_attend(segments_BT: Tensor) -> Attend:
    """The same by a mask over whole rows: on a CPU for rows so short that splitting them costs more than it saves."""
    mask_B1TT = document_mask(segments_BT)

    def attend_mask(layer: int, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor) -> Tensor:
        return masked_attention(q_BTHd, k_BTKd, v_BTKd, mask_B1TT)

    return attend_mask
