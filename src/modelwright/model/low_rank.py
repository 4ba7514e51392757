"""The parts of a projection with a low-rank adapter: its settings, the adapter, and the frozen weight in few bits.

LoRA (Hu et al. 2021): y = W x + s B A x. DoRA (Liu et al. 2024, equation 5): y = m / c * (W x + s B A x), where m is
trained and c is the length of each row of W + s B A, through which no gradient flows (section 4.3).

A frozen weight W may have four or eight bits (QLoRA, Dettmers et al. 2023). Forward and backward dequantize a few rows
at a time, so that the whole weight never exists in a wider format.

Legend: I inputs, O outputs, R rank, P stored columns of codes.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from modelwright.core.compatibility import FLOAT_PRODUCTS, TRAINED_WEIGHTS, Feature, feature
from modelwright.core.config import ConfigError, derive_seed, only_for
from modelwright.ops.lowp_linear import in_float
from modelwright.ops.matmul import multiply_add
from modelwright.ops.quantize import (
    RUN_LEN,
    RUNS,
    Product,
    dequantize,
    dequantize_nf4,
    packed_product,
    quantize,
    quantize_nf4,
)

BaseFormat = Literal["full", "int8", "nf4"]

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The projections of a block."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Low-rank adapters (LoRA, Hu et al. 2021): the model's own weights are frozen, and each chosen projection adds
    scale * B A x to its output W x.

    A pattern is a regular expression for one or several consecutive parts of a projection's name: `q_proj`, `ffn`,
    `q_proj|v_proj`, `blocks\\.[01]`. Names are those of this project: `blocks.0.attention.q_proj`,
    `blocks.0.ffn.up_proj`.
    """

    r: int = 0
    """Rank of the adapters; 0 trains the model's own weights instead."""
    lora_alpha: float = field(default=16.0, metadata=only_for("r"))
    """The adapters' output is scaled by lora_alpha / r."""
    lora_dropout: float = field(default=0.0, metadata=only_for("r"))
    """Probability with which an adapter ignores an input feature of a token in training."""
    target_modules: tuple[str, ...] = field(default=PROJECTIONS, metadata=only_for("r"))
    """Patterns of the projections that get adapters."""
    rank_pattern: dict[str, int] = field(default_factory=dict[str, int], hash=False, metadata=only_for("r"))
    """Ranks of the projections that a pattern matches, in place of `r`; the first match counts."""
    alpha_pattern: dict[str, float] = field(default_factory=dict[str, float], hash=False, metadata=only_for("r"))
    """`lora_alpha` of the projections that a pattern matches; the first match counts."""
    use_rslora: bool = field(default=False, metadata=only_for("r"))
    """Scale by lora_alpha / sqrt(r), which keeps the size of updates at high ranks (Kalajdzievski 2023)."""
    use_dora: bool = field(default=False, metadata=only_for("r"))
    """Also train the length of each row of the adapted weights (DoRA, Liu et al. 2024)."""
    base_format: BaseFormat = field(default="full", metadata=only_for("r"))
    """Storage format of the frozen projections: `nf4`, four bits and a scale for each 64 weights, dequantized on every
    use (QLoRA, Dettmers et al. 2023); `int8`, the same in eight bits; `full`, the model's own format."""

    def __post_init__(self) -> None:
        if self.r < 0:
            raise ConfigError(f"r: must not be negative, got {self.r}; 8 is usual, 0 trains without adapters")
        if not 0.0 <= self.lora_dropout < 1.0:
            raise ConfigError(f"lora_dropout: must be at least 0 and below 1, got {self.lora_dropout}")
        if not self.target_modules:
            raise ConfigError(f"target_modules: is empty; name projections, such as {', '.join(PROJECTIONS)}")
        if wrong := [pattern for pattern, rank in self.rank_pattern.items() if rank < 1]:
            raise ConfigError(f"rank_pattern: the rank of {wrong[0]!r} must be at least 1")
        for value in (self.lora_alpha, *self.alpha_pattern.values()):
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"lora_alpha, alpha_pattern: must be above 0, got {value}")
        for pattern in (*self.target_modules, *self.rank_pattern, *self.alpha_pattern):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"target_modules: {pattern!r} is not a regular expression ({error})") from None

    def targets(self, names: Iterable[str]) -> list[str]:
        """Selects projections, in their order. Raises `ConfigError` for a pattern that matches none of them."""
        names = list(names)
        chosen = [name for name in names if any(matches(pattern, name) for pattern in self.target_modules)]
        for setting, patterns, among in (
            ("target_modules", self.target_modules, names),
            ("rank_pattern", self.rank_pattern, chosen),
            ("alpha_pattern", self.alpha_pattern, chosen),
        ):
            for pattern in patterns:
                if not any(matches(pattern, name) for name in among):
                    known = ", ".join(dict.fromkeys(name.split(".", 2)[-1] for name in among))
                    raise ConfigError(f"lora.{setting}: {pattern!r} matches no projection; there are {known}")
        return chosen

    def rank_of(self, name: str) -> int:
        """Rank of a projection's adapter."""
        return next((rank for pattern, rank in self.rank_pattern.items() if matches(pattern, name)), self.r)

    def scale_of(self, name: str) -> float:
        """Factor of an adapter's output."""
        rank = self.rank_of(name)
        alphas = (alpha for pattern, alpha in self.alpha_pattern.items() if matches(pattern, name))
        return next(alphas, self.lora_alpha) / (math.sqrt(rank) if self.use_rslora else rank)

    def features(self) -> list[Feature]:
        """Features of a run that adapters need or break."""
        if not self.r:
            return []
        needs = [FLOAT_PRODUCTS] if self.base_format != "full" else []
        packed = [feature("base_format", self.base_format, needs=needs)] if needs else []
        return [feature("r", self.r, breaks=[TRAINED_WEIGHTS]), *packed]


def matches(pattern: str, name: str) -> bool:
    """Returns whether a pattern matches one or several consecutive parts of a dotted name."""
    return re.search(rf"(?:^|\.)(?:{pattern})(?:\.|$)", name) is not None


A, B, MAGNITUDE = "lora_A", "lora_B", "magnitude"
"""Names of an adapter's parameters."""


class Factors(NamedTuple):
    """Factors of an adapter: A [R, I], B [O, R] and the magnitudes [O], empty without DoRA."""

    a_RI: Tensor
    b_OR: Tensor
    magnitude_O: Tensor


class LowRank(nn.Module):
    """Adds its product to the output of a projection.

    dropout: probability of ignoring an input feature in training.
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
        return 2 + (num_row_blocks + 2 if self.has_magnitude else 0)

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


PackedFormat = Literal["int8", "nf4"]
CHUNK_ELEMENTS = 2**22
"""Number of elements that are dequantized at once, 16 MiB in FP32."""
CODES, SCALES = "codes", "scales"


class FrozenWeight(nn.Module):
    """Weight [O, I] as codes and the scales of runs of 64 along each row."""

    def __init__(
        self, num_outputs: int, num_inputs: int, packed_format: PackedFormat, *, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.num_inputs = num_inputs
        self.packed_format: PackedFormat = packed_format
        self.chunk_elements = CHUNK_ELEMENTS
        # Parameters, though without gradient: layouts divide them by rows and by whole runs of columns
        is_nf4 = packed_format == "nf4"
        columns, kind = (-(-num_inputs // 2), torch.uint8) if is_nf4 else (num_inputs, torch.int8)
        self.codes = nn.Parameter(torch.empty(num_outputs, columns, dtype=kind), requires_grad=False)
        runs = -(-num_inputs // RUN_LEN)
        self.scales = nn.Parameter(torch.empty(num_outputs, runs, dtype=dtype), requires_grad=False)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Codes and scales, under tensor parallelism this rank's parts."""
        return self.codes, self.scales

    def forward(self, x: Tensor, product: Product) -> Tensor:
        """Returns product(x, W) for x [..., I]; backward uses the same product with W transposed."""
        codes, scales = self.tensors()
        return packed_product(x, codes, scales, self.row_blocks, product)

    def row_blocks(self, codes_OP: Tensor, scales: Tensor) -> Iterator[Tensor]:
        """Dequantizes the weight, some rows at a time."""
        num_inputs = min(self.num_inputs, scales.shape[1] * RUN_LEN)
        num_rows = max(1, self.chunk_elements // num_inputs)
        for start in range(0, len(codes_OP), num_rows):
            rows = slice(start, start + num_rows)
            yield unpack(codes_OP[rows], scales[rows], num_inputs, self.packed_format)

    @property
    def num_row_blocks(self) -> int:
        """Number of blocks that `row_blocks` yields for this process's part."""
        codes_OP, scales = self.tensors()
        num_rows = max(1, self.chunk_elements // min(self.num_inputs, scales.shape[1] * RUN_LEN))
        return -(-len(codes_OP) // num_rows)

    @torch.no_grad()
    def dense(self) -> Tensor:
        """Returns the whole weight, dequantized."""
        return torch.cat(list(self.row_blocks(*self.tensors())))


def pack(weight_OI: Tensor, packed_format: PackedFormat) -> tuple[Tensor, Tensor]:
    """Quantizes a weight to codes and scales."""
    return quantize_nf4(weight_OI) if packed_format == "nf4" else quantize(weight_OI, RUNS, torch.int8)


def unpack(codes_OP: Tensor, scales: Tensor, num_inputs: int, packed_format: PackedFormat) -> Tensor:
    """Dequantizes a weight [O, I] to the format of the scales."""
    if packed_format == "nf4":
        return dequantize_nf4(codes_OP, scales, num_inputs)
    return dequantize(codes_OP, scales, RUNS)
