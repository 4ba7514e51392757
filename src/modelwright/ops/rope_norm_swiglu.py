"""Rotary embedding, normalization and gated activation of a decoder block, each in few passes over the data on a CPU.

Rotary position embedding (Su et al. 2021) is in the half-rotation layout that Hugging Face checkpoints use; its scaled
forms stretch frequencies for contexts longer than those of training. PyTorch's own `rms_norm` takes many elementwise
passes on a CPU, forward and backward; here both directions are one kernel each (`cpu_kernels`) or, without kernels, as
few passes as eager code allows.

Legend: B rows, T tokens, H heads, d head width, r rotated width, F = r / 2 frequencies, D normalized width.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from modelwright.core.config import ConfigError
from modelwright.ops import cpu_kernels

RopeKind = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]
"""Names and formulas of `transformers`. `default`: unscaled (Su et al. 2021); `linear`: position interpolation (Chen et
al. 2023); `dynamic`: NTK-aware, by the length of the sequence; `yarn`: Peng et al. 2023; `longrope`: Ding et al. 2024,
one set of factors for short sequences and one for long ones; `llama3`: Llama 3.1."""
BY_LENGTH: frozenset[RopeKind] = frozenset({"dynamic", "longrope"})
"""Kinds whose frequencies depend on the length of the sequence."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Settings of one kind of scaling; each kind reads its own fields."""

    kind: RopeKind = "default"
    """Formula."""
    factor: float = 1.0
    """Factor by which the context grows: all kinds but default."""
    original_max_len: int = 0
    """Context in tokens before scaling: all kinds but default and linear."""
    attention_factor: float = 0.0
    """Factor on rotated queries and keys, of yarn and longrope; 0 derives it from the lengths as the papers do."""
    beta_fast: float = 32.0
    """Rotations over the original context from which on a frequency is not scaled: yarn."""
    beta_slow: float = 1.0
    """Rotations up to which a frequency is interpolated: yarn."""
    truncate: bool = True
    """Round the bounds between these two to whole dimensions: yarn."""
    low_freq_factor: float = 1.0
    """Rotations up to which a frequency is divided by `factor`: llama3."""
    high_freq_factor: float = 4.0
    """Rotations from which on a frequency is not scaled: llama3."""
    short_factor: tuple[float, ...] = ()
    """Divisor of each frequency in sequences within the original context: longrope."""
    long_factor: tuple[float, ...] = ()
    """Divisor of each frequency in longer sequences: longrope."""

    def __post_init__(self) -> None:
        if self.kind != "default" and self.factor < 1:
            raise ConfigError(f"factor: must be at least 1, got {self.factor}")
        if self.kind not in ("default", "linear") and self.original_max_len < 1:
            raise ConfigError(f"original_max_len: {self.kind} needs the context before scaling, in tokens")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"high_freq_factor: must be above low_freq_factor ({self.low_freq_factor}), got {self.high_freq_factor}"
            )

    @property
    def depends_on_length(self) -> bool:
        """True if the frequencies of tokens depend on the length of their sequence."""
        return self.kind in BY_LENGTH

    def check_dim(self, rotary_dim: int) -> None:
        """Raises `ConfigError` unless the lists have one factor per pair of rotated dimensions."""
        for name in ("short_factor", "long_factor") if self.kind == "longrope" else ():
            num_given = len(getattr(self, name))
            if num_given != rotary_dim // 2:
                raise ConfigError(f"{name}: has {num_given} factors for {rotary_dim // 2} frequencies; give one each")


def rope_tables(positions_BT: Tensor, rotary_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of integer positions, each [B, T, 1, rotary_dim] in FP32."""
    exponents = torch.arange(0, rotary_dim, 2, device=positions_BT.device, dtype=torch.float32) / rotary_dim
    return _tables(positions_BT, 1.0 / theta**exponents)


def scaled_rope_tables(
    positions_BT: Tensor, lengths_BT: Tensor, rotary_dim: int, theta: float, scaling: RopeScaling
) -> tuple[Tensor, Tensor]:
    """`rope_tables` under a scaling, times its attention factor. lengths_BT: int64, tokens of the sequence that each
    token belongs to; read only where `scaling.depends_on_length`.
    """
    if scaling.kind == "default":
        return rope_tables(positions_BT, rotary_dim, theta)
    frequencies, attention_factor = scaled_frequencies(lengths_BT, rotary_dim, theta, scaling)
    cos, sin = _tables(positions_BT, frequencies)
    return (cos, sin) if attention_factor == 1.0 else (cos * attention_factor, sin * attention_factor)


def document_lengths(positions_BT: Tensor) -> Tensor:
    """Length of the document of each token, int64 [B, T], from positions that restart at 0 in each document."""
    # Documents count from 1; tokens before the first start have number 0.
    documents_BT = (positions_BT == 0).cumsum(1)
    lengths = positions_BT.new_zeros((positions_BT.shape[0], positions_BT.shape[1] + 1))
    return lengths.scatter_reduce(1, documents_BT, positions_BT + 1, "amax").gather(1, documents_BT)


def scaled_frequencies(lengths_BT: Tensor, rotary_dim: int, theta: float, scaling: RopeScaling) -> tuple[Tensor, float]:
    """Angles per position in FP32, [F] or, where they depend on lengths, [B, T, F]; and the attention factor.

    The formulas are those of `transformers.modeling_rope_utils`, in its order of operations.
    """
    device = lengths_BT.device
    exponents_F = torch.arange(0, rotary_dim, 2, device=device, dtype=torch.float32) / rotary_dim
    powers_F = theta**exponents_F
    match scaling.kind:
        case "default":
            return 1.0 / powers_F, 1.0
        case "linear":
            return 1.0 / powers_F / scaling.factor, 1.0
        case "dynamic":
            original = scaling.original_max_len
            lengths_BT1 = lengths_BT.clamp(min=original).float().unsqueeze(-1)
            growth_BT1 = scaling.factor * lengths_BT1 / original - (scaling.factor - 1)
            return 1.0 / (theta * growth_BT1 ** (rotary_dim / (rotary_dim - 2))) ** exponents_F, 1.0
        case "yarn":
            # Peng et al. 2023, section 3.2 to 3.4: a ramp over the dimensions from unscaled to interpolated
            # frequencies, between those that make `beta_fast` and `beta_slow` rotations over the original context.
            low, high = (
                rotary_dim * math.log(scaling.original_max_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))
                for rotations in (scaling.beta_fast, scaling.beta_slow)
            )
            if scaling.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, rotary_dim - 1)
            # A ramp of width 0 would divide by 0; the same offset as in `transformers`.
            high += 0.001 if low == high else 0.0
            places_F = torch.arange(rotary_dim // 2, dtype=torch.float32, device=device)
            unscaled_F = 1 - ((places_F - low) / (high - low)).clamp(0, 1)
            frequencies_F = 1.0 / (scaling.factor * powers_F) * (1 - unscaled_F) + 1.0 / powers_F * unscaled_F
            return frequencies_F, scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0
        case "longrope":
            short_F, long_F = (
                torch.tensor(factors, dtype=torch.float32, device=device)
                for factors in (scaling.short_factor, scaling.long_factor)
            )
            is_long_BT1 = (lengths_BT > scaling.original_max_len).unsqueeze(-1)
            frequencies = torch.where(is_long_BT1, 1.0 / (long_F * powers_F), 1.0 / (short_F * powers_F))
            if scaling.attention_factor or scaling.factor <= 1.0:
                return frequencies, scaling.attention_factor or 1.0
            # Ding et al. 2024, section 3.3
            return frequencies, math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_len))
        case "llama3":
            # Long wavelengths are interpolated, short ones kept, those between mixed.
            unscaled_F = 1.0 / powers_F
            rotations_F = scaling.original_max_len / (2 * math.pi / unscaled_F)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            kept_F = ((rotations_F - low) / (high - low)).clamp(0, 1)
            return (1 - kept_F) * unscaled_F / scaling.factor + kept_F * unscaled_F, 1.0


def apply_rope(x_BTHd: Tensor, cos_BT1r: Tensor, sin_BT1r: Tensor) -> Tensor:
    """Rotates each pair (i, i + r / 2) of the first r of the last dimension by its position's angle; the rest passes
    unchanged. Tables of `rope_tables`, r wide.
    """
    rotary_dim = cos_BT1r.shape[-1]
    if rotary_dim < x_BTHd.shape[-1]:
        turned, rest = x_BTHd.split((rotary_dim, x_BTHd.shape[-1] - rotary_dim), dim=-1)
        return torch.cat((apply_rope(turned, cos_BT1r, sin_BT1r), rest), dim=-1)
    tables = (cos_BT1r, sin_BT1r)
    whole = cos_BT1r.shape[:2] == x_BTHd.shape[:2] and all(table.is_contiguous() for table in tables)
    if whole and cpu_kernels.take("rotary", x_BTHd, *tables):
        return _Rotate.apply(x_BTHd, *tables)  # type: ignore[return-value]
    swapped = x_BTHd.roll(x_BTHd.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_BTHd * cos_BT1r, swapped, sin_BT1r).to(x_BTHd.dtype)


def apply_rope_naive(x_BTHd: Tensor, positions_BT: Tensor, theta: float) -> Tensor:
    """The definition: pair i as a complex number, times exp(i * position * theta^(-2i / head_dim)). The reference."""
    half = x_BTHd.shape[-1] // 2
    frequencies = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    angles = positions_BT[..., None, None].double() * frequencies
    pairs = torch.complex(x_BTHd[..., :half].double(), x_BTHd[..., half:].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1).to(x_BTHd.dtype)


def _tables(positions_BT: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    angles = (positions_BT[..., None].float() * frequencies).unsqueeze(-2)
    cos, sin = angles.cos(), angles.sin()
    # The sines of the first half carry the minus sign of the rotation, which saves a pass over the data.
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BTHd, cos_BT1d, sin_BT1d):
        ctx.save_for_backward(cos_BT1d, sin_BT1d)
        return cpu_kernels.rotate(x_BTHd.contiguous(), cos_BT1d, sin_BT1d, back=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return cpu_kernels.rotate(grad.contiguous(), *ctx.saved_tensors, back=True), None, None


def rms_norm(
    x: Tensor, weight_D: Tensor, eps: float, *, out_dtype: torch.dtype | None = None, in_fp32: bool = True
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019), in the format of `x` or
    `out_dtype`. Computed in FP32 or wider; without `in_fp32` in the format of `x`, unless a kernel is used.

    Differentiable once, in `x` and `weight_D`. Under `torch.compile` the definition itself is traced: the compiler
    fuses it better than it would fuse a fixed backward.
    """
    if torch.compiler.is_compiling():
        return rms_norm_naive(x, weight_D, eps, out_dtype=out_dtype, in_fp32=in_fp32)
    # One kernel call, because a decode step of few rows is bound by the number of calls.
    if not torch.is_grad_enabled() and x.dtype == weight_D.dtype == torch.float32 and out_dtype in (None, x.dtype):
        return F.rms_norm(x, weight_D.shape, weight_D, eps)
    out_dtype = out_dtype or x.dtype
    if weight_D.dtype == torch.float32 and out_dtype in cpu_kernels.NAMES and cpu_kernels.take("norm", x, weight_D):
        return _RmsNormByKernel.apply(x.contiguous(), weight_D, eps, out_dtype)  # type: ignore[return-value]
    return _RmsNorm.apply(x, weight_D, eps, out_dtype, in_fp32)  # type: ignore[return-value]


def rms_norm_naive(
    x: Tensor, weight_D: Tensor, eps: float, *, out_dtype: torch.dtype | None = None, in_fp32: bool = True
) -> Tensor:
    """The definition: the reference for `rms_norm`."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32)) if in_fp32 else x
    unit = wide / (wide.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    return (unit * weight_D.to(wide.dtype)).to(out_dtype or x.dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_D, eps, out_dtype, in_fp32):
        wide = x.to(torch.promote_types(x.dtype, torch.float32)) if in_fp32 else x
        inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = inverse.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        unit = wide * inverse
        ctx.save_for_backward(unit, inverse, weight_D)
        ctx.dtype = x.dtype
        return (unit * weight_D.to(unit.dtype)).to(out_dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        unit, inverse, weight_D = ctx.saved_tensors
        grad = grad.to(unit.dtype)
        product = grad * unit
        weight = weight_D.to(product.dtype)
        projection = (product @ weight).unsqueeze(-1).div_(unit.shape[-1])
        # With u = x / norm: dx = (w g - u mean(w g u)) / norm.
        grad_x = (grad * weight).sub_(unit * projection).mul_(inverse)
        return grad_x.to(ctx.dtype), product.flatten(0, -2).sum(0).to(weight_D.dtype), None, None, None


class _RmsNormByKernel(torch.autograd.Function):
    """Saves its input, which the residual stream keeps in any case; `_RmsNorm` saves a normalized copy."""

    @staticmethod
    def forward(ctx, x, weight_D, eps, out_dtype):
        y, inverse = cpu_kernels.norm(x, weight_D, eps, out_dtype)
        ctx.save_for_backward(x, weight_D, inverse)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return *cpu_kernels.norm_backward(grad.contiguous(), *ctx.saved_tensors), None, None


def swiglu(gate: Tensor, up: Tensor, *, in_fp32: bool = False) -> Tensor:
    """Returns gate * sigmoid(gate) * up (Shazeer 2020), in the format of `up`. in_fp32: compute the activation in FP32
    at least. Differentiable; once where a kernel computes it.
    """
    if gate.dtype == up.dtype and cpu_kernels.take("gated_activation", gate, up):
        return _SwiGlu.apply(gate.contiguous(), up.contiguous())  # type: ignore[return-value]
    # Step by step, because PyTorch's operators on a CPU round the last elements of a tensor differently, so that a
    # row's result would depend on the number of rows.
    if not torch.is_grad_enabled():
        wide = gate.float() if gate.dtype.itemsize < 4 else gate
        activated = wide / (1.0 + (-wide).exp())
        return ((activated if in_fp32 else activated.to(gate.dtype)) * up).to(up.dtype)
    return swiglu_naive(gate, up, in_fp32=in_fp32)


def swiglu_naive(gate: Tensor, up: Tensor, *, in_fp32: bool = False) -> Tensor:
    """The definition: the reference for `swiglu`."""
    return (F.silu(gate.float() if in_fp32 else gate) * up).to(up.dtype)


def gated_gelu(gate: Tensor, up: Tensor, *, by_tanh: bool, in_fp32: bool = False) -> Tensor:
    """Returns gelu(gate) * up (GeGLU), in the format of `up`. by_tanh: approximate gelu by a tanh."""
    gate = gate.float() if in_fp32 else gate
    # Step by step for the same reason as in `swiglu`.
    if not torch.is_grad_enabled():
        wide = gate.float() if gate.dtype.itemsize < 4 else gate
        if by_tanh:
            # Hendrycks and Gimpel 2016
            bent = (math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide * wide * wide)).tanh()
        else:
            bent = (wide * math.sqrt(0.5)).erf()
        return ((0.5 * wide * (1.0 + bent)).to(gate.dtype) * up).to(up.dtype)
    return (F.gelu(gate, approximate="tanh" if by_tanh else "none") * up).to(up.dtype)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return cpu_kernels.swiglu(gate, up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return cpu_kernels.swiglu_backward(grad.contiguous(), *ctx.saved_tensors)
