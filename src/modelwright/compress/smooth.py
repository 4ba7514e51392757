"""SmoothQuant: moves the outliers of activations into the weights, so that INT8 rounds both well.

Xiao et al. 2023 (arXiv 2211.10438), equations 3 and 4: channel j of a layer's input is divided by
s_j = max|x_j|^a / max|w_j|^(1 - a), and column j of its weight multiplied by it. What makes the input absorbs the
division: the norm before query, key and value projections and before gate and up projections, the value projection
before the output projection, the up projection before the down projection. The model computes the same function as
before.

Legend: D model width, C channels of a layer's input, K key/value heads, d head width.
"""

import copy
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from modelwright.compress.fold import norm_readers
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.attention import packed_attend
from modelwright.model.decoder import Block, Decoder, Linear, RMSNorm

STRENGTH = 0.5
"""How much of the difficulty moves to the weights: the paper's value for most models (section 4)."""
SMALLEST = 1e-5
"""Smallest magnitude that a scale derives from: a channel that is always zero keeps its scale finite."""


@torch.no_grad()
def smoothed(model: Decoder, batches: Iterable[TokenBatch], *, strength: float = STRENGTH) -> Decoder:
    """A decoder that computes what `model` does, with activations that are easier to quantize. batches: rows that the
    maxima of activations are measured on.
    """
    result = copy.deepcopy(model)
    maxima = _input_maxima(result, batches)
    for layer, block in result.blocks.items():
        assert isinstance(block, Block)
        ffn, place = block.ffn, f"blocks.{layer}"
        for norm, readers in norm_readers(block).items():
            linears = [block.get_submodule(name) for name in readers]
            _move_into_norm(block.get_submodule(norm), linears, maxima[f"{place}.{readers[0]}"], strength)
        _move(ffn.up_proj, ffn.down_proj, _scales([ffn.down_proj], maxima[f"{place}.ffn.down_proj"], strength))
        _smooth_values(block, maxima[f"{place}.attention.o_proj"], strength)
    return result


def _input_maxima(model: Decoder, batches: Iterable[TokenBatch]) -> dict[str, Tensor]:
    """The largest magnitude of each channel of every projection's input, over the tokens of some rows."""
    found = {name: torch.zeros(one.in_features) for name, one in model.projections().items()}
    for batch in batches:
        real_BT = batch.segments_BT >= 0

        def see(name: str, module: nn.Module, inputs: tuple[Tensor, ...], real_BT: Tensor = real_BT) -> None:
            found[name] = torch.maximum(found[name], inputs[0][real_BT].abs().amax(dim=0).float())

        hooks = [one.register_forward_pre_hook(partial(see, name)) for name, one in model.projections().items()]
        try:
            attend = packed_attend(batch.segments_BT, model.config.windows)
            model(batch.input_ids_BT, batch.positions_BT, attend)
        finally:
            for hook in hooks:
                hook.remove()
    return found


def _scales(readers: Sequence[Linear], maxima_C: Tensor, strength: float) -> Tensor:
    """Equation 4, with the maxima of all weights that read the channel."""
    weights_C = torch.stack([one.weight.abs().amax(dim=0) for one in readers]).amax(dim=0)
    maxima_C = maxima_C.to(weights_C.dtype)
    return maxima_C.clamp_min(SMALLEST) ** strength / weights_C.clamp_min(SMALLEST) ** (1 - strength)


def _move_into_norm(norm: nn.Module, readers: Sequence[nn.Module], maxima_D: Tensor, strength: float) -> None:
    assert isinstance(norm, RMSNorm)
    readers = [one for one in readers if isinstance(one, Linear)]
    scales_D = _scales(readers, maxima_D, strength)
    offset = 1.0 if norm.one_plus_weight else 0.0
    norm.weight.copy_((offset + norm.weight) / scales_D - offset)
    for one in readers:
        one.weight.mul_(scales_D)


def _move(maker: Linear, reader: Linear, scales_C: Tensor) -> None:
    maker.weight.div_(scales_C[:, None])
    if maker.has_bias:
        maker.bias.div_(scales_C)
    reader.weight.mul_(scales_C)


def _smooth_values(block: Block, maxima_C: Tensor, strength: float) -> None:
    """Each channel of a key/value head is read by all query heads of its group, which share a scale."""
    attention = block.attention
    num_channels, width = attention.v_proj.out_features, attention.head_dim
    num_kv_heads = num_channels // width
    group = attention.o_proj.in_features // num_channels
    weights_C = attention.o_proj.weight.abs().amax(dim=0)

    def of_values(channels_C: Tensor) -> Tensor:
        return channels_C.view(num_kv_heads, group, width).amax(dim=1).flatten()

    maxima_V, weights_V = of_values(maxima_C.to(weights_C.dtype)), of_values(weights_C)
    scales_V = maxima_V.clamp_min(SMALLEST) ** strength / weights_V.clamp_min(SMALLEST) ** (1 - strength)
    attention.v_proj.weight.div_(scales_V[:, None])
    if attention.v_proj.has_bias:
        attention.v_proj.bias.div_(scales_V)
    scales_KGd = scales_V.view(num_kv_heads, 1, width).expand(-1, group, -1)
    attention.o_proj.weight.mul_(scales_KGd.flatten())
