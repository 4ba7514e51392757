"""GPTQ: 4-bit weights, rounded one after another; later weights compensate the rounding errors of earlier ones.

Frantar et al. 2023, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (arXiv
2210.17323), algorithm 1. A layer y = W x is quantized input by input; the error of each is spread over the later ones
by the inverse Hessian of the layer's squared output error, H = 2 E[x x'], so that the outputs on calibration rows stay
as close as possible. Layers are quantized one after another, each on what the quantized layers before it give.

Legend: O outputs, I inputs, N calibration tokens, L inputs of one lazy block.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modelwright.compress.fold import norm_readers
from modelwright.core.config import ModelError
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.attention import packed_attend
from modelwright.model.decoder import Block, Decoder, Linear
from modelwright.ops.int_grid import Codes, WeightGrid

DAMPING = 0.01
"""Share of the mean diagonal that is added to the Hessian's diagonal (section 3.3, step 3)."""
LAZY_BLOCK = 128
"""Inputs whose updates of later ones are made at once (section 3.3, step 2)."""


@dataclass(frozen=True, kw_only=True)
class LayerError:
    """Squared error of a layer's outputs on calibration rows, relative to the outputs' square."""

    gptq: float
    nearest: float
    """The error of rounding to the nearest code of the same grid."""


@torch.no_grad()
def gptq(
    model: Decoder,
    batches: Sequence[TokenBatch],
    grid: WeightGrid,
    *,
    show: Callable[[str, LayerError], None] = lambda name, error: None,
) -> dict[str, Codes]:
    """Quantizes every projection of a decoder on the CPU; returns the codes by name. `model` is not changed. batches:
    calibration rows. show: called with each finished layer.
    """
    for name, one in model.projections().items():
        grid.check(name, one.in_features)
    states = [_Stream(model, batch) for batch in batches]
    found: dict[str, Codes] = {}
    for layer, block in model.blocks.items():
        assert isinstance(block, Block)
        # Groups of projections that read the same inputs, in the order in which they are computed: each is quantized on
        # the outputs of the quantized ones before it.
        readers = norm_readers(block)
        for group in (readers["attention_norm"], ["attention.o_proj"], readers["ffn_norm"], ["ffn.down_proj"]):
            with _quantized(model, found, grid):
                moments = _moments(block, group, states)
            for name in group:
                full, linear = f"blocks.{layer}.{name}", block.get_submodule(name)
                assert isinstance(linear, Linear)
                codes = quantize_layer(linear.weight, moments[name], grid)
                found[full] = codes
                # |(W - Q) x|^2 = tr (W - Q) H (W - Q)' for H = E[x x'].
                weight_OI, hessian_II = linear.weight.detach().double(), moments[name].double()
                nearest = grid.codes(weight_OI, *grid.ranges(weight_OI))
                differences = [weight_OI, *(weight_OI - grid.dequantized(one).double() for one in (codes, nearest))]
                whole, *others = (float(((one_OI @ hessian_II) * one_OI).sum()) for one_OI in differences)
                of_codes, of_nearest = (one / max(whole, 1e-300) for one in others)
                show(full, LayerError(gptq=of_codes, nearest=of_nearest))
        with _quantized(model, found, grid):
            for state in states:
                state.hidden_BTD = state.output(block)
    return found


def quantize_layer(weight_OI: Tensor, hessian_II: Tensor, grid: WeightGrid) -> Codes:
    """Quantizes a weight to codes. hessian_II: E[x x'] of the layer's input; its factor 2 changes nothing. Steps and
    zero points span each group's weights at the moment when the group's first input is reached. Raises `ModelError` if
    the inputs are not finite.
    """
    weight_OI = weight_OI.detach().double().clone()
    hessian_II = hessian_II.double()
    # Inputs that are always zero get a weight of zero, and a diagonal that is not, or the Hessian has no inverse.
    is_dead_I = hessian_II.diagonal() == 0
    hessian_II = hessian_II + torch.diag(is_dead_I.to(hessian_II.dtype))
    weight_OI[:, is_dead_I] = 0
    damping = DAMPING * hessian_II.diagonal().mean()
    hessian_II = hessian_II + damping * torch.eye(len(hessian_II), dtype=hessian_II.dtype)
    try:
        # Row i of the factor is the first row of the inverse Hessian of the inputs from i on, over the root of its
        # first number (section 3.3).
        inverse_II = torch.cholesky_inverse(torch.linalg.cholesky(hessian_II))
        factor_II = torch.linalg.cholesky(inverse_II, upper=True)
    except torch.linalg.LinAlgError as error:  # pyright: ignore[reportPrivateImportUsage]
        raise ModelError(
            f"GPTQ: the inputs of a layer are not finite or degenerate ({error}); check the model"
        ) from None
    num_outputs, num_inputs = weight_OI.shape
    size = grid.group_size or num_inputs
    steps, zeros = grid.ranges(weight_OI)
    # Steps and zero points as [O, P]; those of a whole matrix are repeated.
    per_output = max(1, steps.numel() // num_outputs)
    step_OP, zero_OP = (one.view(-1, per_output).expand(num_outputs, per_output).clone() for one in (steps, zeros))
    codes_OI = torch.zeros_like(weight_OI)
    low, high = grid.bounds
    for start in range(0, num_inputs, LAZY_BLOCK):
        end = min(start + LAZY_BLOCK, num_inputs)
        errors_OL = torch.zeros(num_outputs, end - start, dtype=weight_OI.dtype)
        for place in range(start, end):
            group = place // size
            # A group gets its range from the weights as the earlier columns' errors have changed them.
            if grid.group_size and place % size == 0:
                channel = WeightGrid(bits=grid.bits, symmetric=grid.symmetric, granularity="channel")
                step_OP[:, group], zero_OP[:, group] = channel.ranges(weight_OI[:, place : place + size])
            column_O, step_O, zero_O = weight_OI[:, place], step_OP[:, group], zero_OP[:, group]
            codes_O = ((column_O / step_O).round() + zero_O).clamp(low, high)
            codes_OI[:, place] = codes_O
            error_O = (column_O - (codes_O - zero_O) * step_O) / factor_II[place, place]
            weight_OI[:, place:end] -= error_O[:, None] * factor_II[place, place:end]
            errors_OL[:, place - start] = error_O
        # Later columns get the errors of the whole block in one product: the same sums, with L times fewer passes over
        # the weight.
        weight_OI[:, end:] -= errors_OL @ factor_II[start:end, end:]
    step, zero = (steps, zeros) if grid.granularity == "tensor" else (step_OP.flatten(), zero_OP.flatten())
    return Codes(codes_OI.to(torch.int8), step.float(), zero.float())


class _Stream:
    """The residual stream of some rows on its way through the blocks."""

    def __init__(self, model: Decoder, batch: TokenBatch) -> None:
        self.real_BT = batch.segments_BT >= 0
        self.attend = packed_attend(batch.segments_BT, model.config.windows)
        self.rotary = model.rotary_tables(batch.positions_BT)
        self.hidden_BTD = model.embed(batch.input_ids_BT, batch.positions_BT)

    def output(self, block: Block) -> Tensor:
        return block(self.hidden_BTD, *self.rotary.of(block), self.attend)


def _moments(block: Block, names: Sequence[str], states: Sequence[_Stream]) -> dict[str, Tensor]:
    """E[x x'] of the inputs of projections, which read the same."""
    first = block.get_submodule(names[0])
    assert isinstance(first, Linear)
    total_II = torch.zeros(first.in_features, first.in_features, dtype=torch.float64)
    count = 0
    for state in states:

        def add(module: nn.Module, inputs: tuple[Tensor, ...], real_BT: Tensor = state.real_BT) -> None:
            x_ND = inputs[0][real_BT].double()
            total_II.addmm_(x_ND.T, x_ND)

        # One hook serves: the projections of a group read the same input.
        hook = first.register_forward_pre_hook(add)
        try:
            state.output(block)
        finally:
            hook.remove()
        count += int(state.real_BT.sum())
    return dict.fromkeys(names, total_II / max(1, count))


@contextmanager
def _quantized(model: Decoder, codes: dict[str, Codes], grid: WeightGrid) -> Iterator[None]:
    """Within the block the projections that have codes multiply by the weights that these encode."""
    projections = model.projections()
    plain = {name: projections[name].product for name in codes}
    for name, own in codes.items():
        weight_OI = grid.dequantized(own).to(projections[name].weight.dtype)
        projections[name].product = lambda x, _, weight_OI=weight_OI: nn.functional.linear(x, weight_OI)
    try:
        yield
    finally:
        for name, product in plain.items():
            projections[name].product = product
