"""This package's own kernels for processors (`cpu_kernels.cpp`), compiled for the one at hand when first asked for.

They take the place of chains of PyTorch's operators, which stay as their twins and do the work wherever the kernels
cannot be had: without a C++ compiler, or with `MODELWRIGHT_CPU_KERNELS=0`. Knows no layer.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
from pathlib import Path

import torch
from torch import Tensor

from modelwright.core.compiled import cache_folder, compiled
from modelwright.core.errors import ModelwrightError

log = logging.getLogger("modelwright.ops")
SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
SWITCH = "MODELWRIGHT_CPU_KERNELS"
OPTIONS = ("-std=c++17", "-O3", "-march=native", "-fopenmp")
LANES = 16
"""Widths of heads are multiples of it."""
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
"""The formats that kernels read and write."""


@functools.cache
def kernels() -> ctypes.CDLL | None:
    """The library; None, with a line in the log, where it cannot be had. Asked once."""
    if os.environ.get(SWITCH, "1") == "0":
        return None
    try:
        way_out = f"set {SWITCH}=0 to do without, or"
        return ctypes.CDLL(
            str(compiled(SOURCE, OPTIONS, folder=cache_folder(), way_out=way_out, known=_processor()))
        )
    except (ModelwrightError, OSError) as error:
        log.warning("kernels for this processor %s. PyTorch's operators do their work, more slowly.", error)
        return None


def _processor() -> str:
    """What the compiler's choice of instructions depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    flags = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return hashlib.sha256("\n".join(flags).encode()).hexdigest()


def has_attention(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether there are kernels for attention in this format, with heads of this width."""
    return dtype in NAMES and head_dim % LANES == 0 and kernels() is not None


def attention(q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, bounds_P5: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention of tiles (`ops.attention.Tiles`), one format, contiguous: the output [B, T, H, d], zeros where
    there is no tile, and the logs of the softmax's denominators [B, K, G, T], FP32."""
    (rows, row_len, num_heads, _), num_kv_heads = q_BTHd.shape, k_BTKd.shape[2]
    out_BTHd = torch.zeros_like(q_BTHd)
    lse_BKGT = q_BTHd.new_zeros((rows, num_kv_heads, num_heads // num_kv_heads, row_len), dtype=torch.float32)
    _call("attention_forward", q_BTHd, k_BTKd, (q_BTHd, k_BTKd, v_BTKd), bounds_P5, (out_BTHd, lse_BKGT))
    return out_BTHd, lse_BKGT


def attention_backward(
    grad_BTHd: Tensor,
    q_BTHd: Tensor,
    k_BTKd: Tensor,
    v_BTKd: Tensor,
    out_BTHd: Tensor,
    lse_BKGT: Tensor,
    bounds_P5: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, in their format; all contiguous."""
    found = torch.zeros_like(q_BTHd), torch.zeros_like(k_BTKd), torch.zeros_like(v_BTKd)
    given = (grad_BTHd, q_BTHd, k_BTKd, v_BTKd, out_BTHd, lse_BKGT)
    _call("attention_backward", q_BTHd, k_BTKd, given, bounds_P5, found)
    return found


def _call(
    name: str, q_BTHd: Tensor, k_BTKd: Tensor, given: tuple[Tensor, ...], bounds_P5: Tensor, found: tuple[Tensor, ...]
) -> None:
    library = kernels()
    assert library is not None
    assert all(one.is_contiguous() for one in (*given, bounds_P5, *found))
    _, row_len, num_heads, head_dim = q_BTHd.shape
    shape = (ctypes.c_int64 * 5)(row_len, k_BTKd.shape[1], num_heads, k_BTKd.shape[2], head_dim)
    getattr(library, f"{name}_{NAMES[q_BTHd.dtype]}")(
        *map(_at, (*given, bounds_P5)),
        ctypes.c_int64(len(bounds_P5)),
        shape,
        ctypes.c_float(head_dim**-0.5),
        *map(_at, found),
        ctypes.c_int(torch.get_num_threads()),
    )


def has_quantisation(x_RK: Tensor) -> bool:
    """Whether there is a kernel for INT8 codes of this matrix, with a scale for each row: both lie in one piece."""
    return (
        x_RK.device.type == "cpu"
        and x_RK.dtype in NAMES
        and x_RK.dim() == 2
        and (x_RK.is_contiguous() or x_RK.T.is_contiguous())
        and kernels() is not None
    )


def quantise(x_RK: Tensor, *, stochastic: bool) -> tuple[Tensor, Tensor]:
    """INT8 codes [R, K], which lie as `x_RK` does, and FP32 scales [R, 1]. Random rounding takes one number of
    PyTorch's generator as its seed."""
    by_column = not x_RK.is_contiguous()
    given = x_RK.T if by_column else x_RK
    codes, scales = torch.empty_like(given, dtype=torch.int8), torch.empty(len(x_RK), 1)
    seed = int(torch.randint(2**63 - 1, ())) if stochastic else 0
    library = kernels()
    assert library is not None
    getattr(library, f"quantise_{NAMES[x_RK.dtype]}")(
        _at(given), *map(ctypes.c_int64, given.shape), ctypes.c_int(by_column), ctypes.c_int(stochastic),
        ctypes.c_uint64(seed), _at(codes), _at(scales), ctypes.c_int(torch.get_num_threads()),
    )  # fmt: skip
    return codes.T if by_column else codes, scales


def has_rescaling(result: torch.dtype) -> bool:
    return result in NAMES and kernels() is not None


def rescale(sums_MN: Tensor, of_rows: Tensor, of_columns: Tensor, result: torch.dtype) -> Tensor:
    """Sums of codes' products (INT32, contiguous) times a scale of their row and one of their column, in `result`."""
    found = torch.empty(sums_MN.shape, dtype=result)
    library = kernels()
    assert library is not None
    assert sums_MN.is_contiguous()
    getattr(library, f"rescale_{NAMES[result]}")(
        _at(sums_MN), *map(ctypes.c_int64, sums_MN.shape), _at(of_rows), _at(of_columns), _at(found),
        ctypes.c_int(torch.get_num_threads()),
    )  # fmt: skip
    return found


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
