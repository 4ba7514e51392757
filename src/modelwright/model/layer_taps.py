"""Reads what layers compute inside a forward pass: outputs of blocks, and the queries, keys and values of attention.

Hooks on single-device code: what they keep is whole wherever a layout leaves the layers' outputs, or all heads of a
layer, on every rank (`LAYER_OUTPUTS` and `WHOLE_LAYERS` in `core/compatibility.py`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from modelwright.model.decoder import Attend, AttentionSpec, Block, Decoder


class HeadInputs(NamedTuple):
    """What the heads of one layer attend with, of all tokens, heads concatenated; with rotary positions."""

    q_BTC: Tensor
    k_BTE: Tensor
    v_BTE: Tensor


class LayerTaps:
    """Keeps what some layers of a model compute in its newest forward pass, until it is taken.

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
        """What the newest forward pass computed, in the order of `outputs` and `heads`; nothing is kept after that, so
        that layers which are recomputed in backward leave nothing behind.
        """
        outputs = [self._outputs[layer] for layer in self.outputs]
        heads = [self._heads[layer] for layer in self.heads]
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
            *others, attend = inputs
            return (*others, self._watched(layer, attend))

        return watch

    def _watched(self, layer: int, attend: Attend) -> Attend:
        def keep(spec: AttentionSpec, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor) -> Tensor:
            if self._is_open:
                self._heads[layer] = HeadInputs(q_BTHd.flatten(2), k_BTKd.flatten(2), v_BTKd.flatten(2))
            return attend(spec, q_BTHd, k_BTKd, v_BTKd)

        return keep
