"""Linear layers over integer weights, by exact integer sums: INT8 rows, and any grid of `ops/int_grid.py`.

INT8 rows, with INT8 activations chosen per token at run time:

    y[n, o] = a[n] / 127 * s[o] * sum_k round(127 * x[n, k] / a[n]) * q[o, k]        a[n] = max_k |x[n, k]|

`q` in [-64, 64] with one scale `s` per output channel, activations in [-127, 127] with one scale per token. All sums
are exact integers, so every backend gives the same result up to one rounding of the scales: `kernel` is this package's
own (`ops/decode_step.py`), the products of an engine's decode step for any number of rows; `fbgemm` and `int_mm` are
PyTorch's.

Why 64: FBGEMM multiplies unsigned by signed bytes and adds neighboring products in 16 bits, which saturates without
VNNI instructions at 2 * 255 * 127 > 32767. PyTorch's answer is `reduce_range` (7-bit activations); 7-bit weights lose
less, since activations have the outliers, and give the same numbers on every machine. Why per token: PyTorch's
`linear_dynamic` takes one scale for the whole batch, so one loud token coarsens all others and a request's answer would
depend on its neighbors.

On a grid, with codes q of the weight and a of the activation, steps s and t, and zero points z and y, over the groups g
of the summed inputs:

    out[n, o] = sum over g of s[o, g] * t[n] * sum over i in g of (a[n, i] - y[n]) * (q[o, i] - z[o, g])

4-bit weights have a kernel, which reads the packed codes in place; PyTorch's operators are its reference. `none` below
multiplies dequantized weights by FP32 activations.

Legend: N tokens, D and I input width, O output width, B any leading dimensions, G groups of the whole weight, P groups
of each output, S inputs of a group.
"""

import warnings
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelwright.core.config import ConfigError
from modelwright.model.decoder import Decoder
from modelwright.ops import cpu_kernels
from modelwright.ops.decode_step import FourBitWeight, RowProduct, Weight
from modelwright.ops.int_grid import ACTIVATION_LEVELS, TINY, Codes, WeightGrid, activation_range
from modelwright.ops.int_grid import WEIGHT_LEVELS as LEVELS
from modelwright.ops.quantize import int8_product

Backend = Literal["fbgemm", "int_mm", "kernel"]

EMBEDDING = "embedding"
WEIGHT_LEVELS = LEVELS[8]
_INT_MM_MIN_ROWS = 17
"""Least rows of PyTorch's `_int_mm`; fewer are padded."""


def quantize_rows(weight_OD: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric INT8 rows in [-64, 64] and their FP32 scales [O]; `rows * scales[:, None]` is about `weight_OD`."""
    weight_OD = weight_OD.detach().float()
    scale_O = (weight_OD.abs().amax(dim=1) / WEIGHT_LEVELS).clamp_min(TINY)
    return torch.round(weight_OD / scale_O[:, None]).to(torch.int8), scale_O


def int8_linear_naive(x_ND: Tensor, weight_OD: Tensor, scale_O: Tensor) -> Tensor:
    """The definition in exact arithmetic (float64 holds all these integers): the reference for the backends."""
    peak_N1 = x_ND.abs().amax(dim=-1, keepdim=True).clamp_min(TINY)
    levels_ND = torch.round((x_ND / peak_N1) * ACTIVATION_LEVELS).double()
    sums_NO = levels_ND @ weight_OD.double().T
    return (sums_NO * scale_O.double() * (peak_N1.double() / ACTIVATION_LEVELS)).float()


class Int8Linear(nn.Module):
    """A linear layer over an INT8 weight [O, D] and scales [O]; its bias, if set, is FP32."""

    def __init__(self, weight_OD: Tensor, scale_O: Tensor, backend: Backend) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_OD.shape
        self.backend = backend
        self.register_buffer("quantized", weight_OD.contiguous())
        self.register_buffer("scale", scale_O)
        self.quantized: Tensor
        self.scale: Tensor
        self.bias: nn.Parameter | None = None
        require_backend(backend)
        self._packed: object = None
        if backend == "fbgemm":
            engine = torch.backends.quantized.engine  # process-wide, so it is put back
            try:
                torch.backends.quantized.engine = "fbgemm"
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*")
                    zeros = torch.zeros(len(scale_O), dtype=torch.long)
                    make = torch._make_per_channel_quantized_tensor  # pyright: ignore[reportPrivateImportUsage]
                    tensor = make(self.quantized, scale_O.double(), zeros, 0)
                self._packed = torch.ops.quantized.linear_prepack(tensor, None)
            finally:
                torch.backends.quantized.engine = engine
        self._kernel = RowProduct(Weight(self.quantized, scale_O)) if backend == "kernel" else None

    @property
    def weight(self) -> Tensor:
        """Dequantized weight, FP32 [O, D]."""
        return self.quantized.float() * self.scale[:, None]

    def forward(self, x_BD: Tensor) -> Tensor:
        x_ND = x_BD.reshape(-1, self.in_features).float()
        if self._kernel is not None:
            out_NO = self._kernel(x_ND)
        else:
            peak_N1 = x_ND.abs().amax(dim=-1, keepdim=True).clamp_min(TINY)
            unit_ND = x_ND / peak_N1
            if self._packed is not None:
                # The activation range is pinned to [-1, 1]: unsigned bytes around a zero point of 128.
                out_NO = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
                    unit_ND, 1.0 / ACTIVATION_LEVELS, ACTIVATION_LEVELS + 1, self._packed
                )
            else:
                levels_ND = torch.round(unit_ND * ACTIVATION_LEVELS).to(torch.int8)
                missing = max(0, _INT_MM_MIN_ROWS - levels_ND.shape[0])
                padded = torch.nn.functional.pad(levels_ND, (0, 0, 0, missing)) if missing else levels_ND
                sums_NO = torch._int_mm(padded, self.quantized.t())  # pyright: ignore[reportPrivateImportUsage]
                out_NO = sums_NO[: levels_ND.shape[0]].float() * (self.scale / ACTIVATION_LEVELS)
            out_NO = out_NO * peak_N1
        out_NO = out_NO if self.bias is None else out_NO + self.bias
        return out_NO.view(*x_BD.shape[:-1], self.out_features)


class Int8Embedding(nn.Module):
    """An embedding table over INT8 rows; a tied INT8 head shares them."""

    def __init__(self, quantized_VD: Tensor, scale_V: Tensor) -> None:
        super().__init__()
        self.register_buffer("quantized", quantized_VD, persistent=False)
        self.register_buffer("scale", scale_V, persistent=False)
        self.quantized: Tensor
        self.scale: Tensor

    @property
    def weight(self) -> Tensor:
        """Dequantized table, FP32 [V, D]."""
        return self.quantized.float() * self.scale[:, None]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.quantized[tokens].float() * self.scale[tokens].unsqueeze(-1)


def place_int8(model: Decoder, name: str, codes: Tensor, scale: Tensor, backend: Backend) -> None:
    """Put INT8 rows in place of a matrix; a head that is tied to the embedding shares its rows."""
    if name == EMBEDDING:
        model.embedding = Int8Embedding(codes, scale)  # type: ignore[assignment]
        if not model.config.tie_embeddings:
            return
        name = "head"
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, Int8Linear(codes, scale, backend))


def require_backend(backend: Backend) -> None:
    """Raise `ConfigError` if this machine cannot run `backend`."""
    if backend == "fbgemm" and "fbgemm" not in torch.backends.quantized.supported_engines:
        raise ConfigError("backend: this PyTorch was built without fbgemm; choose 'int_mm' or 'auto'")
    if backend == "kernel" and cpu_kernels.kernels() is None:
        raise ConfigError("backend: 'kernel' needs a C++ compiler, which is missing here; choose 'int_mm' or 'auto'")


def usable_backends() -> list[Backend]:
    """Lists the backends that this machine can run and that are worth a measurement."""
    has_fbgemm = "fbgemm" in torch.backends.quantized.supported_engines
    usable = {"fbgemm": has_fbgemm, "kernel": "decode_step" in cpu_kernels.used()}
    return [backend for backend in get_args(Backend) if usable.get(backend, True)]


ActivationGrid = Literal["none", "token", "tensor"]
"""`none` multiplies dequantized weights; `token` quantizes each token by its largest magnitude, `tensor` all tokens by
one static range."""


@dataclass(frozen=True, kw_only=True)
class InputGrid:
    """Quantization of a layer's input. least, most: the range of kind `tensor`."""

    kind: ActivationGrid = "none"
    least: float = 0.0
    most: float = 0.0

    def codes(self, x_NI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Quantizes to INT8 codes [N, I]; returns them with step and zero point of each token, [N, 1] each."""
        if self.kind == "token":
            peak_N1 = x_NI.abs().amax(dim=-1, keepdim=True).clamp_min(TINY)
            codes_NI = torch.round(x_NI / peak_N1 * ACTIVATION_LEVELS)
            return codes_NI.to(torch.int8), peak_N1 / ACTIVATION_LEVELS, torch.zeros_like(peak_N1)
        # The static range of calibration; inputs outside of it are clamped.
        step, zero = activation_range(self.least, self.most, x_NI)
        codes_NI = (torch.round(x_NI / step) + zero).clamp(-128, 127)
        ones_N1 = torch.ones_like(x_NI[:, :1])
        return codes_NI.to(torch.int8), step * ones_N1, zero * ones_N1


class GridLinear(nn.Module):
    """A linear layer over the codes of a weight; 4-bit codes are stored two to a byte. Its bias, if set, is FP32."""

    def __init__(self, codes: Codes, grid: WeightGrid, inputs: InputGrid) -> None:
        super().__init__()
        self.out_features, self.in_features = codes.codes_OI.shape
        self.grid = grid
        self.inputs = inputs
        stored = pack_nibbles(codes.codes_OI) if grid.bits == 4 else codes.codes_OI.contiguous()
        self.register_buffer("quantized", stored)
        self.register_buffer("scale", codes.step_G)
        self.register_buffer("zero", codes.zero_G)
        self.quantized: Tensor
        self.scale: Tensor
        self.zero: Tensor
        self.bias: nn.Parameter | None = None
        self._kernel: RowProduct[FourBitWeight] | None = None

    @property
    def codes(self) -> Codes:
        """The weight's integers, [O, I]."""
        codes_OI = unpack_nibbles(self.quantized, self.in_features) if self.grid.bits == 4 else self.quantized
        return Codes(codes_OI, self.scale, self.zero)

    @property
    def weight(self) -> Tensor:
        """The weight [O, I], dequantized."""
        return self.grid.dequantized(self.codes)

    def forward(self, x: Tensor) -> Tensor:
        x_NI = x.reshape(-1, self.in_features).to(self.scale.dtype)
        has_kernel = self.grid.bits == 4 and self.inputs.kind != "tensor"
        if has_kernel and cpu_kernels.take("four_bits", x_NI, self.scale):
            # The kernel points to the codes, which loading a state replaces.
            if self._kernel is None or self._kernel.weight.packed is not self.quantized:
                self._kernel = RowProduct(self.packed_weight())
            out_NO = self._kernel(x_NI)
        elif self.inputs.kind == "none":
            out_NO = F.linear(x_NI, self.weight)
        else:
            codes_NI, step_N1, zero_N1 = self.inputs.codes(x_NI)
            codes_OI = self.codes.codes_OI
            step_OP, zero_OP = self._by_output()
            per_output = step_OP.shape[1]
            size = self.in_features // per_output
            out_NO = torch.zeros(len(x_NI), self.out_features, dtype=x_NI.dtype, device=x_NI.device)
            for group in range(per_output):
                places = slice(group * size, (group + 1) * size)
                a_NS, q_OS = codes_NI[:, places].contiguous(), codes_OI[:, places].contiguous()
                z_O, a_sum_N1 = zero_OP[:, group], a_NS.sum(dim=1, keepdim=True, dtype=torch.int32)
                # sum (a - y)(q - z) = sum a q - y sum q + (S y - sum a) z: only the first term is a matrix product.
                sums_NO = int8_product(a_NS, q_OS).to(x_NI.dtype) - zero_N1 * q_OS.sum(dim=1, dtype=torch.int32)
                sums_NO += (size * zero_N1 - a_sum_N1) * z_O
                out_NO += sums_NO * step_OP[:, group]
            out_NO = out_NO * step_N1
        out_NO = out_NO if self.bias is None else out_NO + self.bias
        return out_NO.view(*x.shape[:-1], self.out_features)

    def packed_weight(self) -> FourBitWeight:
        """Packed codes for the kernel, which are not copied; without the bias."""
        step_OP, zero_OP = self._by_output()
        return FourBitWeight(
            packed=self.quantized,
            num_inputs=self.in_features,
            step_OP=step_OP,
            zero_OP=zero_OP[:0] if self.grid.symmetric else zero_OP,
            takes_codes=self.inputs.kind == "token",
        )

    def _by_output(self) -> tuple[Tensor, Tensor]:
        """Steps and zero points, [O, P]; those of a whole matrix are repeated."""
        per_output = max(1, self.scale.numel() // self.out_features)
        step_OP, zero_OP = (one.view(-1, per_output).expand(self.out_features, -1) for one in (self.scale, self.zero))
        return step_OP, zero_OP


def pack_nibbles(codes_OI: Tensor) -> Tensor:
    """Packs codes in [-8, 7] into bytes, [O, I / 2 rounded up]: the first of two in the low half."""
    padded = F.pad(codes_OI, (0, codes_OI.shape[1] % 2)) + 8
    low, high = padded.to(torch.uint8).unflatten(1, (-1, 2)).unbind(2)
    return low | (high << 4)


def unpack_nibbles(packed: Tensor, num_inputs: int) -> Tensor:
    """Unpacks the codes of `pack_nibbles`, INT8 [O, I]."""
    both = torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)[:, :num_inputs]
    return both.to(torch.int8) - 8
