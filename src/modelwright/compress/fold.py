"""Changes of weights that keep a model's function, so that the rounded weights serve it better.

`fold_norms` and `fold_batch_norms` fold the factors of a layer's channels into its matrix, so that ranges are chosen
for the weights that are multiplied: the weights of RMS norms into the projections that read them, and batch norms, by
their running statistics, into the convolutions before them (Jacob et al. 2018, section 3.2). The final norm of a
decoder stays: hidden states after it are read by more than the head. So do norms of queries and keys and norms after a
layer, between which and the next matrix there is more than a product.

SmoothQuant moves the outliers of activations into the weights, so that INT8 rounds both well (Xiao et al. 2023, arXiv
2211.10438, equations 3 and 4): channel j of a layer's input is divided by s_j = max|x_j|^a / max|w_j|^(1 - a), and
column j of its weight multiplied by it. The maker of the input absorbs the division: the norm before query, key and
value projections and before gate and up projections, the value projection before the output projection, the up
projection before the down projection.

Legend: O outputs, D model width, C channels of a layer's input, K key/value heads, G query heads of one, d head width.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from modelwright.data.rows.batch import TokenBatch
from modelwright.model.attention import packed_attend
from modelwright.model.decoder import Block, Decoder, Linear, RMSNorm, StoredParameters
from modelwright.model.vision.classifier import BatchNorm, Convolution, ResidualBlock, ResNet


def norm_readers(block: Block) -> dict[str, list[str]]:
    """Lists the projections of a block that read a norm's output, by the name of the norm."""
    attention = ["q_proj", "k_proj", "v_proj"]
    attention += ["output_gate"] if block.attention.output_gate is not None else []
    attention += ["head_router"] if block.attention.head_router is not None else []
    return {"attention_norm": [f"attention.{name}" for name in attention], "ffn_norm": ["ffn.gate_proj", "ffn.up_proj"]}


def fold_norms(model: Decoder) -> None:
    """Fold the norms of all blocks, in place; of a model whose weights are still on disk, when they are read."""
    norms: dict[str, str] = {}
    for layer, block in model.blocks.items():
        assert isinstance(block, Block)
        for norm, readers in norm_readers(block).items():
            norms |= {f"blocks.{layer}.{name}.weight": f"blocks.{layer}.{norm}.weight" for name in readers}
    offset = 1.0 if model.config.norms.one_plus_weight else 0.0
    if model.stored is not None and model.norm.weight.is_meta:
        model.stored = FoldedWeights(stored=model.stored, norms=norms, offset=offset)
        return
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, norm in norms.items():
            parameters[name].mul_(offset + parameters[norm])
        for norm in set(norms.values()):
            # A norm that multiplies by 1, which is a weight of 0 where the norm adds 1 to it.
            parameters[norm].fill_(1.0 - offset)


@dataclass(frozen=True, kw_only=True)
class FoldedWeights:
    """Weights on disk that are folded when they are read, in FP32 at least. norms: name of the norm's weight that each
    matrix absorbs; offset: number that norms add to their weights.
    """

    stored: StoredParameters
    norms: Mapping[str, str]
    offset: float

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Reads like `StoredParameters.read`, with the norm folded in."""
        weight = self.stored.read(name, part)
        if name in self.norms:
            scale_D = self.stored.read(self.norms[name], part[1:])
            # In FP32 at least, so that the product is rounded once, when a parameter stores it.
            wide = torch.promote_types(scale_D.dtype, torch.float32)
            return weight.to(wide) * (self.offset + scale_D.to(wide))
        return torch.full_like(weight, 1.0 - self.offset) if name in self.norms.values() else weight


@torch.no_grad()
def fold_batch_norms(module: nn.Module) -> None:
    """Fold all batch norms of a vision model, in place; identities replace them. The model is for inference only
    afterwards: batch statistics no longer exist.
    """
    for block in list(module.modules()):
        if not isinstance(block, ResNet | ResidualBlock):
            continue
        for name, following in block.NORMS.items():
            convolution, norm = getattr(block, name), getattr(block, following)
            if not isinstance(norm, BatchNorm):
                continue
            layer = convolution.kernel if isinstance(convolution, Convolution) else convolution
            assert isinstance(layer, Linear | nn.Conv2d)
            factors_O = norm.weight * (norm.running_var + norm.eps).rsqrt()
            # Batch norm by running statistics is y = a x + b with constants per channel: a goes into the weight, b is
            # the bias.
            layer.weight.mul_(factors_O.view(-1, *[1] * (layer.weight.dim() - 1)))
            layer.bias = nn.Parameter(norm.bias - norm.running_mean * factors_O)
            if isinstance(layer, Linear):
                layer.has_bias = True
            setattr(block, following, nn.Identity())


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
    # The largest magnitude of each channel of every projection's input
    maxima = {name: torch.zeros(one.in_features) for name, one in result.projections().items()}
    for batch in batches:
        real_BT = batch.segments_BT >= 0

        def see(name: str, module: nn.Module, inputs: tuple[Tensor, ...], real_BT: Tensor = real_BT) -> None:
            maxima[name] = torch.maximum(maxima[name], inputs[0][real_BT].abs().amax(dim=0).float())

        hooks = [one.register_forward_pre_hook(partial(see, name)) for name, one in result.projections().items()]
        try:
            attend = packed_attend(batch.segments_BT, result.config.windows)
            result(batch.input_ids_BT, batch.positions_BT, attend)
        finally:
            for hook in hooks:
                hook.remove()
    for layer, block in result.blocks.items():
        assert isinstance(block, Block)
        attention, ffn, place = block.attention, block.ffn, f"blocks.{layer}"
        for norm_name, readers in norm_readers(block).items():
            norm = block.get_submodule(norm_name)
            assert isinstance(norm, RMSNorm)
            linears = [one for name in readers if isinstance(one := block.get_submodule(name), Linear)]
            weights_D = torch.stack([one.weight.abs().amax(dim=0) for one in linears]).amax(dim=0)
            scales_D = _scales(maxima[f"{place}.{readers[0]}"].to(weights_D.dtype), weights_D, strength)
            # Norms with `one_plus_weight` multiply by 1 + weight: the sum is divided, not the weight.
            offset = 1.0 if norm.one_plus_weight else 0.0
            norm.weight.copy_((offset + norm.weight) / scales_D - offset)
            for linear in linears:
                linear.weight.mul_(scales_D)
        weights_C = ffn.down_proj.weight.abs().amax(dim=0)
        scales_C = _scales(maxima[f"{place}.ffn.down_proj"].to(weights_C.dtype), weights_C, strength)
        ffn.up_proj.weight.div_(scales_C[:, None])
        if ffn.up_proj.has_bias:
            ffn.up_proj.bias.div_(scales_C)
        ffn.down_proj.weight.mul_(scales_C)
        # All query heads of a group read the same channels of their key/value head, so that they share its scales.
        num_channels = attention.v_proj.out_features
        shape_KGd = (-1, attention.o_proj.in_features // num_channels, attention.head_dim)
        weights_C = attention.o_proj.weight.abs().amax(dim=0)
        maxima_V, weights_V = (
            one_C.view(shape_KGd).amax(dim=1).flatten()
            for one_C in (maxima[f"{place}.attention.o_proj"].to(weights_C.dtype), weights_C)
        )
        scales_V = _scales(maxima_V, weights_V, strength)
        attention.v_proj.weight.div_(scales_V[:, None])
        if attention.v_proj.has_bias:
            attention.v_proj.bias.div_(scales_V)
        scales_KGd = scales_V.view(-1, 1, attention.head_dim).expand(shape_KGd)
        attention.o_proj.weight.mul_(scales_KGd.flatten())
    return result


def _scales(maxima_C: Tensor, weights_C: Tensor, strength: float) -> Tensor:
    """Computes equation 4, s = max|x|^a / max|w|^(1 - a)."""
    return maxima_C.clamp_min(SMALLEST) ** strength / weights_C.clamp_min(SMALLEST) ** (1 - strength)
