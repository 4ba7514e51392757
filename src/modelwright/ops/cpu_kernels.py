"""This package's own kernels for CPUs (`kernels/`), compiled for the present processor on first use.

They replace chains of PyTorch operators, which remain as their references and do the work wherever a kernel is slower
(`kernels_for`) or unavailable: without a C++ compiler, or with `MODELWRIGHT_CPU_KERNELS=0`. All compute in FP32,
whatever the format of the tensors. Results do not depend on the number of threads, except for a norm's gradient of its
weight. On fake tensors they allocate their results and compute nothing.

Times are those of `kernels/speed.json`, by instruction set, which `benchmarks/kernel_speed.py --write` measures and
which is part of the source: a measurement at first use could fall into a busy moment, and hosts of one run could decide
differently.
"""

import ctypes
import functools
import hashlib
import json
import logging
import os
import platform
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from modelwright.core.config import ConfigError, ModelwrightError
from modelwright.core.library_environment import lowered
from modelwright.ops.cpp_build import cache_folder, compiled

Kernel = Literal["attention", "norm", "rotary", "gated_activation", "int8", "decode", "decode_step", "four_bits"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
"""Names of the kernels. `decode`: rotary embedding and gated activation for few tokens. It is measured and decides
nothing: PyTorch is faster there on AVX2, but its SiLU rounds the end of a tensor differently, so that the other
sequences of a batch would change the numbers of one. `decode_step`: a step of the engine as one operator; `four_bits`:
linear layers over 4-bit weights."""
SPEED = Path(__file__).with_name("kernels") / "speed.json"
TOLERANCE = 0.05
"""Part of a time by which measurements of equal speed differ; a kernel is used if it is slower nowhere by more."""
UNMEASURED: Mapping[str, frozenset[Kernel]] = {
    "avx512": frozenset({"attention", "norm", "rotary", "gated_activation", "int8"})
}
"""Kernels that are used without measured rows. On AVX-512 these together made whole training steps faster (in FP32 from
6.3 to 5.5 s, in BF16 from 3.2 to 1.7 s, in INT8 from 4.4 to 1.55 s; docs/log/speed.md); not measured elsewhere."""


@functools.cache
def speed() -> Mapping[str, Any]:
    """Measurements by instruction set: `processor`, `torch`, and `rows`, each with `kernel`, `case`, and the times
    `own_us` and `pytorch_us` of one thread.
    """
    return json.loads(SPEED.read_text(encoding="utf-8"))


def kernels_for(instruction_set: str) -> frozenset[Kernel]:
    """The kernels to use on an instruction set."""
    rows = rows_of(instruction_set)
    unmeasured = UNMEASURED.get(instruction_set, frozenset()) - {row["kernel"] for row in rows}
    return faster_kernels(rows) | unmeasured


def faster_kernels(rows: Sequence[Mapping[str, Any]]) -> frozenset[Kernel]:
    """The kernels to use by the rows of an instruction set; none without rows."""
    faster: set[Kernel] = set()
    for kernel in KERNELS:
        times = [(row["own_us"], row["pytorch_us"]) for row in rows if row["kernel"] == kernel]
        # Slower in no case, and faster in all of them together; without rows 0 is not below 0.
        none_slower = all(own <= (1.0 + TOLERANCE) * pytorch for own, pytorch in times)
        if none_slower and sum(own for own, _ in times) < sum(pytorch for _, pytorch in times):
            faster.add(kernel)
    return frozenset(faster)


def rows_of(instruction_set: str) -> Sequence[Mapping[str, Any]]:
    """The measured cases; none if the instruction set has not been measured."""
    return speed()[instruction_set]["rows"] if instruction_set in speed() else ()


def speed_lines(rows: Sequence[Mapping[str, Any]], used: Collection[Kernel]) -> list[str]:
    """The rows as text. used: the kernels that do the work of PyTorch's operators."""
    lines = [f"{'':<18}{'':<44}{'own':>9}{'PyTorch':>9}{'ratio':>7}  used"]
    for row in rows:
        own, other = row["own_us"], row["pytorch_us"]
        answer = "-" if row["kernel"] == "decode" else "yes" if row["kernel"] in used else "no"
        lines.append(f"{row['kernel']:<18}{row['case']:<44}{own:>9.1f}{other:>9.1f}{own / other:>7.2f}  {answer}")
    return lines


log = logging.getLogger("modelwright.ops")
SOURCE = Path(__file__).with_name("kernels") / "kernels.cpp"
SWITCH = "MODELWRIGHT_CPU_KERNELS"
"""Environment variable: `1`, the kernels that are faster here (the default); `0`, none; or names of `KERNELS`."""
BLOCK = 64
"""Queries and keys that the kernels of attention take at a time (`kernels/attention.h`)."""
HEAD_DIM_STEP = 16
"""Divisor of the widths of heads: FP32 numbers in the widest vectors of any processor."""
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
"""Formats that kernels read and write."""
Argument = Tensor | int | float | bool


@functools.cache
def kernels() -> ctypes.CDLL | None:
    """The library; None, with a line in the log, if it is unavailable. Tried once."""
    try:
        architecture = lowered()
        return compiled_for(architecture.march if architecture else "native")
    except (ModelwrightError, OSError) as error:
        log.warning("kernels for this processor %s. PyTorch's operators do their work, more slowly.", error)
        return None


def compiled_for(march: str, *more: str) -> ctypes.CDLL:
    """The library for an architecture, by its name in the compiler's option `-march`. more: further options."""
    # The library depends on the headers, and on the instruction set that the compiler selects for `native`.
    known = [header.read_bytes() for header in sorted(SOURCE.parent.glob("*.h"))]
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
        known += sorted({line for line in lines if line.startswith((b"flags", b"Features", b"model name"))})
    except OSError:
        known.append((platform.processor() or platform.machine()).encode())
    digest = hashlib.sha256(b"\n".join(known)).hexdigest()
    # The kernels say themselves where they fuse multiply and add; a compiler's choice would change the rounding.
    options = ("-std=c++17", "-O3", f"-march={march}", "-fopenmp", "-ffp-contract=off", *more)
    way_out = f"set {SWITCH}=0 to do without, or"
    library = ctypes.CDLL(str(compiled(SOURCE, options, folder=cache_folder(), way_out=way_out, known=digest)))
    library.instruction_set.restype = ctypes.c_char_p
    library.decode_scratch.restype = library.code_bytes.restype = ctypes.c_int64
    return library


def instruction_set() -> str:
    """The instruction set for which the kernels are compiled; "" without kernels."""
    library = kernels()
    return library.instruction_set().decode() if library is not None else ""


def used() -> frozenset[Kernel]:
    """The kernels that do the work of PyTorch's operators here."""
    setting = os.environ.get(SWITCH, "1")
    return _selected(setting, instruction_set()) if setting != "0" else frozenset()


def message_codec() -> ctypes.CDLL | None:
    """The library, for `sparse_codec.py`; None without kernels. No `KERNELS` name it, because nothing has to be
    measured: it takes a third of NumPy's time or less for the same bytes.
    """
    return kernels() if os.environ.get(SWITCH, "1") != "0" else None


def spread_threads() -> int:
    """Put each of OpenMP's threads, which compute PyTorch's operators, on a core of its own. After a pause the system
    may start two of them on one core and leave them there; short work that follows would take twice its time. Returns
    the number of cores that they are on, 0 where nothing is done.
    """
    if "decode_step" in used() and (library := kernels()) is not None and torch.get_num_threads() > 1:
        return library.spread_threads(torch.get_num_threads())
    return 0


@functools.cache
def _selected(setting: str, of: str) -> frozenset[Kernel]:
    if not of:
        return frozenset()
    if setting == "1":
        return kernels_for(of)
    names = setting.split(",")
    if wrong := [name for name in names if name not in KERNELS]:
        raise ConfigError(f"{SWITCH}: unknown kernel {wrong[0]!r}; give 1, 0, or some of {','.join(KERNELS)}")
    return frozenset(kernel for kernel in KERNELS if kernel in names)


def as_setting(names: Iterable[Kernel]) -> Mapping[str, str]:
    """The environment in which exactly these kernels are used."""
    return {SWITCH: ",".join(sorted(names)) or "0"}


def are_used_on(device: str) -> bool:
    """Returns whether norms and activations of models on a device like this machine's are single kernels."""
    return device == "cpu" and {"norm", "gated_activation"} <= used()


def take(kernel: Kernel, *tensors: Tensor) -> bool:
    """Returns whether the kernel is used and takes these tensors: on a CPU, in a supported format, without wrapper
    subclasses, not while code is traced.
    """
    return (
        all(
            type(one) in (Tensor, nn.Parameter, FakeTensor) and one.device.type == "cpu" and one.dtype in NAMES
            for one in tensors
        )
        and not torch.compiler.is_compiling()
        and kernel in used()
    )


def take_heads(x: Tensor) -> bool:
    """Returns whether the kernels of attention are used and support queries or keys of this width."""
    return x.shape[-1] % HEAD_DIM_STEP == 0 and take("attention", x)


ALL_OPEN = torch.empty(0, dtype=torch.bool)
"""All heads of all tokens are computed."""


def attention(
    q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, bounds_P5: Tensor, open_BTH: Tensor = ALL_OPEN
) -> tuple[Tensor, Tensor]:
    """Computes causal attention of tiles (`ops.attention.Tiles`), in one format: the output [B, T, H, d], zeros outside
    the tiles and where a head is not open (`open_BTH`, boolean), and the logs of the softmax's denominators [B, K, G,
    T], FP32.
    """
    (rows, row_len, num_heads, head_dim), num_kv_heads = q_BTHd.shape, k_BTKd.shape[2]
    out_BTHd = torch.zeros_like(q_BTHd, memory_format=torch.contiguous_format)
    lse_BKGT = q_BTHd.new_zeros((rows, num_kv_heads, num_heads // num_kv_heads, row_len), dtype=torch.float32)
    _call(
        f"attention_forward_{NAMES[q_BTHd.dtype]}", q_BTHd, k_BTKd, v_BTKd, bounds_P5, len(bounds_P5), open_BTH,
        _attention_shape(q_BTHd, k_BTKd), head_dim**-0.5, out_BTHd, lse_BKGT,
        *_attention_scratch(q_BTHd, bounds_P5, blocks=2, copies=2),
    )  # fmt: skip
    return out_BTHd, lse_BKGT


def attention_backward(
    grad_BTHd: Tensor,
    q_BTHd: Tensor,
    k_BTKd: Tensor,
    v_BTKd: Tensor,
    out_BTHd: Tensor,
    lse_BKGT: Tensor,
    bounds_P5: Tensor,
    open_BTH: Tensor = ALL_OPEN,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, in their format."""
    q, k, v = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q_BTHd, k_BTKd, v_BTKd))
    _call(
        f"attention_backward_{NAMES[q_BTHd.dtype]}", grad_BTHd, q_BTHd, k_BTKd, v_BTKd, out_BTHd, lse_BKGT, bounds_P5,
        len(bounds_P5), open_BTH, _attention_shape(q_BTHd, k_BTKd), q_BTHd.shape[-1] ** -0.5, q, k, v,
        *_attention_scratch(q_BTHd, bounds_P5, blocks=3, copies=5),
    )  # fmt: skip
    return q, k, v


def _attention_shape(q_BTHd: Tensor, k_BTKd: Tensor) -> Tensor:
    _, row_len, num_heads, head_dim = q_BTHd.shape
    return torch.tensor([row_len, k_BTKd.shape[1], num_heads, k_BTKd.shape[2], head_dim])


def _attention_scratch(q_BTHd: Tensor, bounds_P5: Tensor, *, blocks: int, copies: int) -> tuple[Tensor, int]:
    """Working memory, and each thread's part: blocks of queries, two of scores, copies of a document's keys."""
    _, start_P, _, end_P, _ = bounds_P5.unbind(1)
    longest = int((end_P - start_P).max()) if len(bounds_P5) else 0
    of_thread = (blocks * BLOCK + copies * -(-longest // BLOCK) * BLOCK) * q_BTHd.shape[-1] + 2 * BLOCK**2
    return q_BTHd.new_empty((torch.get_num_threads(), of_thread), dtype=torch.float32), of_thread


def norm(x: Tensor, weight_D: Tensor, eps: float, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns x / sqrt(mean(x^2) + eps) * weight over the last dimension, and 1 / sqrt(mean(x^2) + eps) of each row."""
    y = x.new_empty(x.shape, dtype=out_dtype)
    inverse = x.new_empty(x.shape[:-1], dtype=torch.float32)
    width = x.shape[-1]
    _call(f"norm_forward_{NAMES[x.dtype]}_{NAMES[out_dtype]}", x, weight_D, x.numel() // width, width, eps, y, inverse)
    return y, inverse


def norm_backward(grad: Tensor, x: Tensor, weight_D: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the input, in its format, and of the weight."""
    of_x = x.new_empty(x.shape)
    width = x.shape[-1]
    # A row for each thread: the sum over them depends on their number.
    of_weight = x.new_zeros((torch.get_num_threads(), width), dtype=torch.float32)
    _call(
        f"norm_backward_{NAMES[x.dtype]}_{NAMES[grad.dtype]}", grad, x, weight_D, inverse, x.numel() // width, width,
        of_x, of_weight,
    )  # fmt: skip
    return of_x, of_weight.sum(0)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns gate * sigmoid(gate) * up, all of one format."""
    out = gate.new_empty(gate.shape)
    _call(f"swiglu_forward_{NAMES[gate.dtype]}", gate, up, gate.numel(), out)
    return out


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    of_gate, of_up = (x.new_empty(x.shape) for x in (gate, up))
    _call(f"swiglu_backward_{NAMES[gate.dtype]}", grad, gate, up, gate.numel(), of_gate, of_up)
    return of_gate, of_up


def rotate(x_BTHd: Tensor, cos_BT1d: Tensor, sin_BT1d: Tensor, *, back: bool) -> Tensor:
    """Rotates heads by the angles of `rope_tables`, or back."""
    y = x_BTHd.new_empty(x_BTHd.shape)
    rows, row_len, num_heads, head_dim = x_BTHd.shape
    _call(f"rotate_{NAMES[x_BTHd.dtype]}", x_BTHd, cos_BT1d, sin_BT1d, rows * row_len, num_heads, head_dim, back, y)
    return y


def quantize(x_RK: Tensor, *, stochastic: bool) -> tuple[Tensor, Tensor]:
    """Returns INT8 codes [R, K], with the memory layout of `x_RK` (row-major or column-major), and FP32 scales [R, 1].
    Stochastic rounding takes one number of PyTorch's generator as its seed.
    """
    by_column = not x_RK.is_contiguous()
    given = x_RK.T if by_column else x_RK
    codes = given.new_empty(given.shape, dtype=torch.int8)
    scales = given.new_empty((len(x_RK), 1), dtype=torch.float32)
    seed = int(torch.randint(2**63 - 1, ())) if stochastic and type(x_RK) is not FakeTensor else 0
    scratch = given.new_empty((torch.get_num_threads() + 1, given.shape[1] if by_column else 0), dtype=torch.float32)
    _call(f"quantize_{NAMES[x_RK.dtype]}", given, *given.shape, by_column, stochastic, seed, codes, scales, scratch)
    return codes.T if by_column else codes, scales


def rescale(sums_MN: Tensor, of_rows: Tensor, of_columns: Tensor, result: torch.dtype) -> Tensor:
    """Returns sums of products of codes (INT32) times the scales of their row and column, in `result`."""
    findings = sums_MN.new_empty(sums_MN.shape, dtype=result)
    _call(f"rescale_{NAMES[result]}", sums_MN, *sums_MN.shape, of_rows, of_columns, findings)
    return findings


def _call(name: str, *arguments: Argument) -> None:
    # By pointer, so tensors must be contiguous; results are allocated accordingly.
    tensors = [one for one in arguments if isinstance(one, Tensor)]
    if any(type(one) is FakeTensor for one in tensors):
        return
    library = kernels()
    assert library is not None
    assert all(one.is_contiguous() for one in tensors)
    getattr(library, name)(*map(_as_c, arguments), ctypes.c_int(torch.get_num_threads()))


def _as_c(argument: Argument) -> ctypes.c_void_p | ctypes.c_float | ctypes.c_int | ctypes.c_int64:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    # `bool` is an `int`, but the kernels declare flags as C's `int`.
    return ctypes.c_int(argument) if isinstance(argument, bool) else ctypes.c_int64(argument)
