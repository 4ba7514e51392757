"""The low-rank adapter of one projection: LoRA, and DoRA with a magnitude for each output.

LoRA (Hu et al. 2021): y = W x + s B A x. DoRA (Liu et al. 2024, equation 5): y = m / c * (W x + s B A x), where m is
trained and c is the length of each row of W + s B A, through which no gradient flows (section 4.3).

Legend: I inputs, O outputs, R rank.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from modelwright.core.seeds import derive_seed
from modelwright.ops.linear_gemms import multiply_add
from modelwright.ops.lowp_linear import in_float

A, B, MAGNITUDE = "lora_A", "lora_B", "magnitude"
"""Names of an adapter's parameters."""


class Factors(NamedTuple):
    """Factors of an adapter: A [R, I], B [O, R] and the magnitudes [O], empty without DoRA."""

    a_RI: Tensor
    b_OR: Tensor
    magnitude_O: Tensor


class LowRank(nn.Module):
    """Adds its product to the output of a projection.

    dropout: probability of ignoring an input feature in training. is_on: false while the model computes as without
    adapters.
    """

    def __init__(
        self, num_inputs: int, num_outputs: int, rank: int, *, scale: float, dropout: float, has_magnitude: bool
    ) -> None:
        super().__init__()
        self.rank = rank
        self.scale = scale
        self.dropout: nn.Module = nn.Identity()
        self.set_dropout(dropout)
        self.has_magnitude = has_magnitude
        self.is_on = True
        self.lora_A = nn.Parameter(torch.empty(rank, num_inputs))
        self.lora_B = nn.Parameter(torch.empty(num_outputs, rank))
        self.magnitude = nn.Parameter(torch.empty(num_outputs)) if has_magnitude else None

    def set_dropout(self, probability: float) -> None:
        """Set the probability of ignoring an input feature in training."""
        self.dropout = nn.Dropout(probability) if probability else nn.Identity()

    def factors(self) -> Factors:
        """Returns the parameters, under tensor parallelism this rank's parts."""
        magnitude_O = self.lora_B.new_empty(0) if self.magnitude is None else self.magnitude
        return Factors(self.lora_A, self.lora_B, magnitude_O)

    def sum_of_columns(self, partial: Tensor) -> Tensor:
        """Sums partial results from columns of the weight over ranks; here this process has all columns."""
        return partial

    def forward(self, x: Tensor, out: Tensor, row_blocks: Callable[[], Iterable[Tensor]]) -> Tensor:
        """Returns the adapted output for x [..., I] and `out` [..., O], the projection's product without bias, in whose
        format it computes. row_blocks: the projection's weight, some rows at a time, which DoRA reads.
        """
        if not self.is_on:
            return out
        factors = self.factors()
        # Scaled where the product is narrow, [..., R] instead of [..., O]
        low = in_float(out.dtype, self.dropout(x), factors.a_RI)
        out = multiply_add(out, low * self.scale, factors.b_OR.to(out.dtype))
        if not self.has_magnitude:
            return out
        lengths_O = self.row_lengths(row_blocks(), factors)
        return out * (factors.magnitude_O / lengths_O).to(out.dtype)

    def num_products(self, num_row_blocks: int) -> int:
        """Number of matrix products that `forward` computes for a weight in `num_row_blocks` blocks of rows."""
        return (2 + (num_row_blocks + 2 if self.has_magnitude else 0)) if self.is_on else 0

    @torch.no_grad()
    def row_lengths(self, row_blocks: Iterable[Tensor], factors: Factors) -> Tensor:
        """Length of each row of W + s B A, [O]: the root of |w|^2 + 2 s b.(A w) + s^2 b (A A') b'."""
        # Products as narrow as A, so that W + s B A never exists; s is inside b_OR
        wide = torch.promote_types(factors.a_RI.dtype, torch.float32)
        a_RI, b_OR = factors.a_RI.to(wide), self.scale * factors.b_OR.to(wide)
        sums = [(row_norms(rows).square(), rows.to(wide) @ a_RI.T) for rows in row_blocks]
        squares_O = self.sum_of_columns(torch.cat([squares for squares, _ in sums]))
        crossed_OR = self.sum_of_columns(torch.cat([crossed for _, crossed in sums]))
        own_RR = self.sum_of_columns(a_RI @ a_RI.T)
        return (squares_O + (b_OR * (2 * crossed_OR + b_OR @ own_RR)).sum(dim=1)).sqrt()

    @torch.no_grad()
    def merged(self, weight_OI: Tensor) -> Tensor:
        """Returns the weight whose product is that of projection and adapter together, in the same format."""
        wide = torch.promote_types(weight_OI.dtype, torch.float32)
        factors = self.factors()
        sum_OI: Tensor = weight_OI.to(wide) + self.scale * (factors.b_OR.to(wide) @ factors.a_RI.to(wide))
        if self.has_magnitude:
            sum_OI *= (factors.magnitude_O.to(wide) / row_norms(sum_OI))[:, None]
        return sum_OI.to(weight_OI.dtype)


def row_norms(weight_OI: Tensor) -> Tensor:
    """Length of each row, [O], in FP32 at least."""
    dtype = torch.promote_types(weight_OI.dtype, torch.float32)
    return torch.linalg.vector_norm(weight_OI, dim=1, dtype=dtype)  # pyright: ignore


def initial_a(seed: int, name: str, rank: int, num_inputs: int) -> Tensor:
    """Initial A [R, I] of a projection by name, in FP32: uniform within 1 / sqrt(I), as PEFT draws it."""
    # B starts as zeros, so that training starts from the model's own outputs.
    # A seed for each name, not one generator for all: a projection's A does not depend on which others have adapters
    generator = torch.Generator().manual_seed(derive_seed(seed, "lora", name))
    bound = 1.0 / math.sqrt(num_inputs)
    return torch.empty(rank, num_inputs).uniform_(-bound, bound, generator=generator)
