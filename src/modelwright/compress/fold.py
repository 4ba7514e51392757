"""Folds the factors of a layer's channels into its matrix, so that ranges are chosen for the weights that are
multiplied: the weights of RMS norms into the projections that read them, and batch norms, by their running statistics,
into the convolutions before them (Jacob et al. 2018, section 3.2). The model computes the same function as before.

The final norm of a decoder stays: hidden states after it are read by more than the head. So do norms of queries and
keys and norms after a layer, between which and the next matrix there is more than a product.

Legend: O outputs, D model width.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modelwright.model.decoder import Block, Decoder, Linear, StoredParameters
from modelwright.model.vision.batch_norm import BatchNorm
from modelwright.model.vision.resnet import Convolution, normed_convolutions


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
    for name, following in normed_convolutions(module).items():
        convolution, norm = module.get_submodule(name), module.get_submodule(following)
        assert isinstance(norm, BatchNorm)
        layer = convolution.kernel if isinstance(convolution, Convolution) else convolution
        assert isinstance(layer, Linear | nn.Conv2d)
        factors_O, offsets_O = norm.in_evaluation()
        # Batch norm by running statistics is y = a x + b with constants per channel: a goes into the weight, b is the
        # bias.
        layer.weight.mul_(factors_O.view(-1, *[1] * (layer.weight.dim() - 1)))
        layer.bias = nn.Parameter(offsets_O)
        if isinstance(layer, Linear):
            layer.has_bias = True
        parent, _, leaf = following.rpartition(".")
        setattr(module.get_submodule(parent), leaf, nn.Identity())
