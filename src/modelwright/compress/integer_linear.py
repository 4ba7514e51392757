"""Linear layers over INT8 weights, with INT8 activations chosen per token at run time.

    y[n, o] = a[n] / 127 * s[o] * sum_k round(127 * x[n, k] / a[n]) * q[o, k]        a[n] = max_k |x[n, k]|

`q` in [-64, 64] with one scale `s` per output channel, activations in [-127, 127] with one scale per token. All sums
are exact integers, so every backend gives the same result up to one rounding of the scales.

Why 64: FBGEMM multiplies unsigned by signed bytes and adds neighboring products in 16 bits, which saturates without
VNNI instructions at 2 * 255 * 127 > 32767. PyTorch's answer is `reduce_range` (7-bit activations); 7-bit weights lose
less, since activations have the outliers, and give the same numbers on every machine. Why per token: PyTorch's
`linear_dynamic` takes one scale for the whole batch, so one loud token coarsens all others and a request's
answer would depend on its neighbors.

Backends: `kernel` is this package's own (`ops/decode_step.py`), the products of an engine's decode step for any number
of rows; `fbgemm` and `int_mm` are PyTorch's.

Legend: N tokens, D input width, O output width, B any leading dimensions.
"""

import warnings
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from modelwright.core.errors import ConfigError
from modelwright.model.decoder import Decoder
from modelwright.ops import cpu_kernels
from modelwright.ops.decode_step import RowProduct, Weight
from modelwright.ops.int_grid import ACTIVATION_LEVELS, TINY
from modelwright.ops.int_grid import WEIGHT_LEVELS as LEVELS

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
        self._packed = _pack(self.quantized, scale_O) if backend == "fbgemm" else None
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


def _pack(weight_OD: Tensor, scale_O: Tensor) -> object:
    engine = torch.backends.quantized.engine  # process-wide, so it is put back
    try:
        torch.backends.quantized.engine = "fbgemm"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*")
            zeros = torch.zeros(len(scale_O), dtype=torch.long)
            make = torch._make_per_channel_quantized_tensor  # pyright: ignore[reportPrivateImportUsage]
            tensor = make(weight_OD, scale_O.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(tensor, None)
    finally:
        torch.backends.quantized.engine = engine
