"""SmoothQuant: moves the outliers of activations into the weights, so that INT8 rounds both well.

Xiao et al. 2023 (arXiv 2211.10438), equations 3 and 4: channel j of a layer's input is divided by
s_j = max|x_j|^a / max|w_j|^(1 - a), and column j of its weight multiplied by it. What makes the input absorbs the
s_j = max|x_j|^a / max|w_j|^(1 - a), and column j of its weight multiplied by it. The maker of the input absorbs the
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
"""Exponent a: the share of the difficulty that moves to the weights, the paper's value for most models (section 4)."""
SMALLEST = 1e-5
"""Smallest magnitude that a scale derives from: a channel that is always zero keeps its scale finite."""


@torch.no_grad()
def smoothed(model: Decoder, batches: Iterable[TokenBatch], *, strength: float = STRENGTH) -> Decoder:
    """Returns a decoder that computes the same function as `model` with activations that are easier to quantize.
    batches: rows on which the maxima of activations are measured.
    """
    result = copy.deepcopy(model)
    maxima = _input_maxima(result, batches)
    for layer, block in result.blocks.items():
        assert isinstance(block, Block)
        ffn, place = block.ffn, f"blocks.{layer}"
        for norm_name, readers in norm_readers(block).items():
            norm = block.get_submodule(norm_name)
            assert isinstance(norm, RMSNorm)
            linears = [one for name in readers if isinstance(one := block.get_submodule(name), Linear)]
            scales_D = _scales(linears, maxima[f"{place}.{readers[0]}"], strength)
            # Norms with `one_plus_weight` multiply by 1 + weight: the sum is divided, not the weight.
            offset = 1.0 if norm.one_plus_weight else 0.0
            norm.weight.copy_((offset + norm.weight) / scales_D - offset)
            for linear in linears:
                linear.weight.mul_(scales_D)
        scales_C = _scales([ffn.down_proj], maxima[f"{place}.ffn.down_proj"], strength)
        ffn.up_proj.weight.div_(scales_C[:, None])
        if ffn.up_proj.has_bias:
            ffn.up_proj.bias.div_(scales_C)
        ffn.down_proj.weight.mul_(scales_C)
        _smooth_values(block, maxima[f"{place}.attention.o_proj"], strength)
    return result


def _input_maxima(model: Decoder, batches: Iterable[TokenBatch]) -> dict[str, Tensor]:
    """Measures the largest magnitude of each channel of every projection's input, over the tokens of some rows."""
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
    """Computes equation 4, with the maxima of all weights that read the channel."""
    weights_C = torch.stack([one.weight.abs().amax(dim=0) for one in readers]).amax(dim=0)
    maxima_C = maxima_C.to(weights_C.dtype)
    # s = max|x|^a / max|w|^(1 - a)
    return maxima_C.clamp_min(SMALLEST) ** strength / weights_C.clamp_min(SMALLEST) ** (1 - strength)


def _smooth_values(block: Block, maxima_C: Tensor, strength: float) -> None:
    """Smooth the inputs of the output projection. All query heads of a group read the same channels of their key/value
    head, so that they share its scales.
    """
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
