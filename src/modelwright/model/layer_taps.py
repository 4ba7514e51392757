"""Hooks that keep layers' activations of a forward pass: outputs of blocks, and queries, keys and values of attention.

The hooks see single-device code: the tensors are whole wherever a layout leaves the layers' outputs, or all heads of a
layer, on every rank (`LAYER_OUTPUTS` and `WHOLE_LAYERS` in `core/compatibility.py`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from modelwright.model.decoder import Attend, AttentionSpec, Block, Decoder


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
