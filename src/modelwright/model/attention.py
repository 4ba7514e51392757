"""`Attend` functions for whole rows, causal and within the documents of a packed row, and hooks that keep activations.

Tiled attention, which a CPU uses, computes only the heads that a layer has selected for each token; the others, and all
with a soft cap, compute all heads.

The hooks see single-device code: the tensors are whole wherever a layout leaves the layers' outputs, or all heads of a
layer, on every rank (`LAYER_OUTPUTS` and `WHOLE_LAYERS` in `core/compatibility.py`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from modelwright.model.decoder import Attend, AttentionSpec, Block, Decoder
from modelwright.ops.attention import (
    Tiles,
    capped_attention,
    causal_attention,
    causal_mask,
    document_mask,
    masked_attention,
    masked_capped_attention,
    packed_attention,
    packed_cuts,
    packed_tiles,
)
from modelwright.ops.flex_attention import Span, fused_packed_attention, packed_block_mask, places_of
from modelwright.ops.matmul import triton_compiles
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


def packed_attend(
    segments_BT: Tensor, windows: Sequence[int] = ALL_TOKENS, spans: Sequence[Span] | None = None
) -> Attend:
    """Returns causal attention within documents. segments_BT: document of each token; windows: `ModelConfig.windows`;
    spans: tokens whose queries are computed, concatenated in the tensor of queries; all by default.

    On a CPU each document is computed separately, unless rows are short; on CUDA all are in one fused kernel; without
    Triton, and on other devices, a mask over whole rows is used.
    """
    if segments_BT.device.type != "cpu":
        is_fused = segments_BT.is_cuda and triton_compiles()
        return (fused_attend if is_fused else masked_attend)(segments_BT, windows, spans)
    tiles = {
        window: packed_tiles(segments_BT, spans=spans, window=window) if spans else packed_cuts(segments_BT, window)
        for window in windows
    }

    def attend_tiles(spec: AttentionSpec, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor) -> Tensor:
        if spec.soft_cap:
            return capped_attention(q_BTHd, k_BTKd, v_BTKd, tiles[spec.window], spec.soft_cap)  # pyright: ignore
        return tiled_attention(spec, q_BTHd, k_BTKd, v_BTKd, tiles[spec.window])

    return attend_tiles


def fused_attend(
    segments_BT: Tensor, windows: Sequence[int] = ALL_TOKENS, spans: Sequence[Span] | None = None
) -> Attend:
    """`packed_attend` by one fused kernel for all layers of a batch, which computes all heads (`ops/flex_attention.py`:
    CUDA only). Layers of the same window share a block mask.
    """
    masks = {window: packed_block_mask(segments_BT, window, spans) for window in dict.fromkeys(windows)}

    def attend_fused(spec: AttentionSpec, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor) -> Tensor:
        return fused_packed_attention(q_BTHd, k_BTKd, v_BTKd, masks[spec.window], spec.soft_cap)

    return attend_fused


def tiled_attention(spec: AttentionSpec, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, tiles: Tiles) -> Tensor:
    """Attention of a layer without a soft cap on a CPU, of the open heads if the layer selects heads."""
    if spec.open_BTH is None:
        return packed_attention(q_BTHd, k_BTKd, v_BTKd, tiles)
    return selected_attention(q_BTHd, k_BTKd, v_BTKd, spec.open_BTH, tiles)


def masked_attend(
    segments_BT: Tensor, windows: Sequence[int] = ALL_TOKENS, spans: Sequence[Span] | None = None
) -> Attend:
    """`packed_attend` by a mask over whole rows: on a CPU for rows so short that tiles cost more than they save."""
    masks_B1ST = {window: document_mask(segments_BT, window) for window in windows}
    if spans:
        place_S = places_of(spans, segments_BT.device)
        masks_B1ST = {window: mask_B1TT[:, :, place_S] for window, mask_B1TT in masks_B1ST.items()}

    def attend_mask(spec: AttentionSpec, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor) -> Tensor:
        if spec.soft_cap:
            return masked_capped_attention(q_BTHd, k_BTKd, v_BTKd, masks_B1ST[spec.window], spec.soft_cap)
        return masked_attention(q_BTHd.to(v_BTKd.dtype), k_BTKd.to(v_BTKd.dtype), v_BTKd, masks_B1ST[spec.window])

    return attend_mask


class HeadInputs(NamedTuple):
    """Queries, keys and values of all tokens of one layer, heads concatenated, with rotary positions."""

    q_BTC: Tensor
    k_BTE: Tensor
    v_BTE: Tensor


class LayerTaps:
    """Keeps activations of some layers of a model in its newest forward pass, until they are taken.

    outputs: layers whose output [B, T, D] is kept, which is the residual stream after them. heads: layers whose
    queries, keys and values are kept.
    """

    def __init__(self, model: Decoder, *, outputs: Sequence[int] = (), heads: Sequence[int] = ()) -> None:
        self.outputs = tuple(outputs)
        self.heads = tuple(heads)
        self._outputs: dict[int, Tensor] = {}
        self._heads: dict[int, HeadInputs] = {}
        self._is_open = False
        self._hooks: list[RemovableHandle] = [model.register_forward_pre_hook(self._begin)]
        for layer in dict.fromkeys((*outputs, *heads)):
            block = model.blocks[str(layer)]
            assert isinstance(block, Block)
            if layer in outputs:
                self._hooks.append(block.register_forward_hook(self._output_hook(layer)))
            if layer in heads:
                self._hooks.append(block.attention.register_forward_pre_hook(self._heads_hook(layer)))

    def take(self) -> tuple[list[Tensor], list[HeadInputs]]:
        """Returns the activations of the newest forward pass, in the order of `outputs` and `heads`, and drops them."""
        outputs = [self._outputs[layer] for layer in self.outputs]
        heads = [self._heads[layer] for layer in self.heads]
        # Closed until the next forward pass: layers that backward recomputes must not fill the taps again
        self._close()
        return outputs, heads

    def remove(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()
        self._close()

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        self._close()
        self._is_open = True

    def _close(self) -> None:
        self._outputs.clear()
        self._heads.clear()
        self._is_open = False

    def _output_hook(self, layer: int) -> Any:
        def keep(block: nn.Module, inputs: Any, output_BTD: Tensor) -> None:
            if self._is_open:
                self._outputs[layer] = output_BTD

        return keep

    def _heads_hook(self, layer: int) -> Any:
        def watch(attention: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            # Attention's last input is its `Attend` function, which gets queries and keys with their positions
            attend: Attend = inputs[-1]

            def keep(spec: AttentionSpec, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor) -> Tensor:
                if self._is_open:
                    self._heads[layer] = HeadInputs(q_BTHd.flatten(2), k_BTKd.flatten(2), v_BTKd.flatten(2))
                return attend(spec, q_BTHd, k_BTKd, v_BTKd)

            return (*inputs[:-1], keep)

        return watch
