"""Integer models: quantize a finished decoder, choose the fastest backend by measuring, save, load and compare.

All matrices are INT8, or the projections are integers on a trained or chosen grid; then norms keep their format, and
embedding and head may be INT8 rows.

Folder format: `config.json` with `format: "modelwright-int8"`, the model's shape and the quantization's parameters;
`model.safetensors` with the codes `NAME.weight` and the steps `NAME.scale` (float32) of each quantized matrix `NAME`,
and every other tensor in its format under its own name. A head that is tied to the embedding is not stored again.
Version 1: all matrices are INT8 [out, in] with scales [out]. Version 2: projections are on a grid, with one step and
one `NAME.zero` for each group; codes of 4 bits are two to a byte.

Linear layers have integer weights and exact integer sums: INT8 rows, and any grid of `ops/int_grid.py`.

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

import json
import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modelwright.core.artifacts import write_atomic, writing
from modelwright.core.config import ConfigError, ModelError, dump, only_for, parse
from modelwright.model.attention import causal_attend
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.ops import cpu_kernels
from modelwright.ops.decode_step import FourBitWeight, RowProduct, Weight
from modelwright.ops.int_grid import ACTIVATION_LEVELS, TINY, Codes, Granularity, WeightGrid, activation_range
from modelwright.ops.int_grid import WEIGHT_LEVELS as LEVELS
from modelwright.ops.microbenchmark import repeated, seconds_of
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


FORMAT, GRID_VERSION = "modelwright-int8", 2
GRID, STEPS = "quantization.json", "quantization.safetensors"
"""The files in a model folder that hold its trained grid."""
FOUR_BITS = ("int4_nearest", "int4_folded", "int4_gptq")
"""Values of `weights` with four bits."""
MEASURED_ROWS = (8, 256)
"""Tokens that backends are measured with: decoding streams and a chunk of a prompt."""
HOPELESS = 3.0
"""Factor above the fastest kernels' time that no noise of a measurement explains."""
ChooseBackend = Callable[[Mapping[str, tuple[Tensor, Tensor]]], Backend]
"""Chooses kernels from the codes and scales of all matrices."""


@dataclass(frozen=True, kw_only=True)
class Int8WeightsConfig:
    """Integer inference."""

    weights: Literal["int8", "int8_folded", "int8_smooth", "int4_nearest", "int4_folded", "int4_gptq"] = "int8"
    """Result of the stage quantize for a model that was not trained on a grid: INT8 weights and activations, unchanged
    or with outliers of activations moved into the weights (SmoothQuant, Xiao et al. 2023); or 4-bit weights of the
    decoder's linear layers, rounded to the nearest code or by GPTQ (Frantar et al. 2023), with embedding and head in
    INT8. The `folded` ones first multiply the weights of the norms before projections into these."""
    granularity: Granularity = field(default="group_32", metadata=only_for("weights", *FOUR_BITS))
    """Weights that share a step of 4-bit weights."""

    backend: Literal["auto", "fbgemm", "int_mm", "kernel"] = "auto"
    """INT8 GEMM kernels of whatever the decode operator does not compute, such as prompts: PyTorch's two, and this
    package's own `kernel`; `auto` measures them at the model's own shapes when it is loaded. All give the same numbers
    up to rounding of the last bit."""


@dataclass(frozen=True, kw_only=True)
class TrainedGrid:
    """The grid that a model was trained for. steps: learned steps of projections, [G] each; without them, steps span
    the weights. ranges: of projections' inputs, for activations of kind `tensor`. int8_ends: true if embedding and head
    become INT8 rows, too.
    """

    weights: WeightGrid
    activations: ActivationGrid = "none"
    steps: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, "tuple[float, float]"])
    int8_ends: bool = False

    def codes(self, name: str, weight_OI: Tensor) -> Codes:
        """Quantizes a projection's weight to integers."""
        step_G, zero_G = self.weights.ranges(weight_OI)
        if name in self.steps:
            step_G, zero_G = self.steps[name].to(step_G.dtype), torch.zeros_like(zero_G)
        return self.weights.codes(weight_OI, step_G, zero_G)

    def inputs(self, name: str) -> InputGrid:
        """Returns the quantization of a projection's input."""
        if self.activations != "tensor":
            return InputGrid(kind=self.activations)
        if name not in self.ranges:
            return InputGrid()  # a layer whose input was never observed stays as it is in training, too
        least, most = self.ranges[name]
        return InputGrid(kind="tensor", least=least, most=most)

    def describe(self) -> str:
        """Describes the grid in a sentence for people."""
        kind = "symmetric" if self.weights.symmetric else "asymmetric"
        where = {"tensor": "per matrix", "channel": "per output channel"}.get(
            self.weights.granularity, f"per group of {self.weights.group_size} inputs"
        )
        activations = {
            "none": "activations stay as they are",
            "token": "activations are quantized per token at run time",
            "tensor": "activations are quantized by observed ranges",
        }
        learned = " with learned steps" if self.steps else ""
        ends = "embedding and head are INT8, norms" if self.int8_ends else "embedding, head and norms"
        return (
            f"Projections have {self.weights.bits}-bit weights, {kind} {where}{learned}; "
            f"{activations[self.activations]}; {ends} keep their format."
        )

    def save(self, folder: Path) -> None:
        """Write the grid into the folder of a model's weights."""
        settings = {"weights": asdict(self.weights), "activations": self.activations, "ranges": dict(self.ranges)}
        with writing(folder):
            save_file({name: step.detach().contiguous() for name, step in self.steps.items()}, folder / STEPS)
        write_atomic(folder / GRID, json.dumps(settings, indent=1))

    @classmethod
    def load(cls, folder: Path) -> "TrainedGrid | None":
        """Reads the grid in the folder of a model's weights; None without one. Raises `ModelError` if it is damaged."""
        if not (folder / GRID).is_file():
            return None
        try:
            settings = json.loads((folder / GRID).read_text(encoding="utf-8"))
            return cls(
                weights=WeightGrid(**settings["weights"]),
                activations=settings["activations"],
                steps=load_file(folder / STEPS),
                ranges={name: (float(low), float(high)) for name, (low, high) in settings["ranges"].items()},
            )
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ModelError(f"{folder / GRID}: is damaged ({error}); run its stage again") from None


def quantize_model(model: Decoder, config: Int8WeightsConfig) -> Decoder:
    """Returns a new decoder with all linears, the head and the embedding table in INT8; norms keep their format.
    `model` is not changed. The result is for inference: it lacks gradients.
    """
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            tensors[f"{name}.weight"], tensors[f"{name}.scale"] = quantize_rows(module.weight)
    return _from_int8(model.config, tensors, config)


def quantize_to_grid(
    model: Decoder, grid: TrainedGrid, *, codes: Mapping[str, Codes] | None = None, choose: ChooseBackend
) -> Decoder:
    """Returns a new decoder whose projections are integers on the grid. codes: of projections, in place of those to
    which the grid rounds, such as GPTQ's. `model` is not changed. The result is for inference. Raises `ConfigError` if
    the inputs of a projection do not divide into the grid's groups.
    """
    for name, one in model.projections().items():
        grid.weights.check(name, one.in_features)
    found = {name: (codes or {}).get(name) or grid.codes(name, one.weight) for name, one in model.projections().items()}
    inputs = {name: grid.inputs(name) for name in found}
    rest = {name: one.detach().clone() for name, one in model.named_parameters() if not name.startswith("heads.")}
    for name in found:
        del rest[f"{name}.weight"]
    ends = {name: quantize_rows(rest.pop(f"{name}.weight")) for name in _ends(model.config, grid)}
    return _assemble(model.config, found, inputs, ends, rest, choose, grid=grid.weights)


def _ends(shape: ModelConfig, grid: TrainedGrid) -> list[str]:
    """Names of the matrices, other than projections, that are INT8."""
    return [EMBEDDING, *([] if shape.tie_embeddings else ["head"])] if grid.int8_ends else []


def _from_int8(shape: ModelConfig, tensors: dict[str, Tensor], config: Int8WeightsConfig) -> Decoder:
    """Builds a decoder whose matrices are all INT8. Raises `ModelError` on a missing, surplus or ill-shaped tensor."""
    with torch.device("meta"):
        plain = Decoder(shape)
    # A tied head is listed under the name of the embedding.
    matrices = {
        name: module.weight.shape
        for name, module in plain.named_modules()
        if isinstance(module, (nn.Linear, nn.Embedding))
    }
    expected = {f"{name}.{part}" for name in matrices for part in ("weight", "scale")}
    expected |= {name for name, _ in plain.named_parameters() if name.removesuffix(".weight") not in matrices}
    if expected != set(tensors):
        wrong = ", ".join(sorted(expected ^ set(tensors))[:4])
        raise ModelError(f"INT8 weights: missing or unknown tensors ({wrong}); quantize the model again")
    rows = {name: (tensors.pop(f"{name}.weight"), tensors.pop(f"{name}.scale")) for name in matrices}
    for name, (codes, scale) in rows.items():
        if codes.shape != matrices[name] or scale.shape != matrices[name][:1] or codes.dtype != torch.int8:
            raise ModelError(f"INT8 weights: {name} has shape {tuple(codes.shape)}, not {tuple(matrices[name])}")
    return _assemble(shape, {}, {}, rows, tensors, partial(choose_backend, config))


def _assemble(
    shape: ModelConfig,
    codes: Mapping[str, Codes],
    inputs: Mapping[str, InputGrid],
    rows: Mapping[str, tuple[Tensor, Tensor]],
    rest: Mapping[str, Tensor],
    choose: ChooseBackend,
    *,
    grid: WeightGrid | None = None,
) -> Decoder:
    """codes, inputs: of projections on a grid; rows: codes and scales of the matrices that are INT8 rows."""
    with torch.device("meta"):
        model = Decoder(shape)
    # Where the kernels of this file compute exactly the same, they do; they need a scale for each output.
    is_int8 = grid is not None and grid.bits == 8 and grid.symmetric and not grid.group_size
    fast = {name for name in codes if is_int8 and inputs[name].kind == "token"}
    scales = {name: codes[name].step_G.float().expand(codes[name].codes_OI.shape[0]).contiguous() for name in fast}
    matrices = {name: (codes[name].codes_OI, scales[name]) for name in fast} | dict(rows)
    backend = choose(matrices) if matrices else "int_mm"
    for name, own in codes.items():
        if name in fast:
            module: nn.Module = Int8Linear(own.codes_OI, scales[name], backend)
        else:
            assert grid is not None
            module = GridLinear(own, grid, inputs[name])
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, module)
    for name, (own_codes, scale) in rows.items():
        place_int8(model, name, own_codes, scale, backend)
    for name, tensor in rest.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, nn.Parameter(tensor, requires_grad=False))
    return model.eval()


def save_int8(model: Decoder, folder: Path) -> None:
    """Write an INT8 decoder into `folder` in the format of this module."""
    tensors: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        # A tied head shares the rows of the embedding, which are stored once.
        is_tied_head = name == "head" and model.config.tie_embeddings
        if isinstance(module, Int8Embedding) or (isinstance(module, Int8Linear) and not is_tied_head):
            tensors |= {f"{name}.weight": module.quantized, f"{name}.scale": module.scale}
    quantization = {
        "weights": f"symmetric per output channel, {WEIGHT_LEVELS} levels each way",
        "activations": f"symmetric per token at run time, {ACTIVATION_LEVELS} levels each way",
    }
    _save(model, folder, tensors, quantization, version=1)


def save_grid_model(model: Decoder, grid: TrainedGrid, folder: Path) -> None:
    """Write a decoder of `quantize_to_grid` into `folder`."""
    tensors: dict[str, Tensor] = {}
    ends = _ends(model.config, grid)
    # Ends have no zero points; a tied INT8 head is skipped, as it shares the rows of the embedding.
    for name, module in model.named_modules():
        if name in ends and isinstance(module, (Int8Linear, Int8Embedding)):
            tensors |= {f"{name}.weight": module.quantized, f"{name}.scale": module.scale}
        elif name != "head" and isinstance(module, (Int8Linear, GridLinear)):
            zero = module.zero if isinstance(module, GridLinear) else torch.zeros_like(module.scale)
            tensors |= {f"{name}.weight": module.quantized, f"{name}.scale": module.scale, f"{name}.zero": zero}
    quantization = {
        "weights": asdict(grid.weights),
        "activations": grid.activations,
        "ranges": dict(grid.ranges),
        "int8_ends": grid.int8_ends,
    }
    _save(model, folder, tensors, quantization, version=GRID_VERSION)


def _save(
    model: Decoder, folder: Path, tensors: dict[str, Tensor], quantization: Mapping[str, Any], *, version: int
) -> None:
    tensors |= {name: parameter.detach() for name, parameter in model.named_parameters()}
    description = {
        "format": FORMAT,
        "version": version,
        "model": dump(model.config, constants=True),
        "quantization_config": {"quant_method": FORMAT, **quantization},
    }
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def is_int8_folder(folder: Path) -> bool:
    """True if `folder` was written by `save_int8`."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("format") == FORMAT
    except (OSError, ValueError, AttributeError):
        return False


def load_int8(folder: Path, config: Int8WeightsConfig) -> Decoder:
    """Read an INT8 decoder. Raises `ModelError` when the folder is of another kind, incomplete or damaged."""
    if not is_int8_folder(folder):
        raise ModelError(f"{folder}: is not an INT8 model folder (the format in its config.json is not {FORMAT!r})")
    description: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    grid: TrainedGrid | None = None
    try:
        shape = parse(ModelConfig, description["model"], constants=True)
        if description.get("version") == GRID_VERSION:
            settings = description["quantization_config"]
            grid = TrainedGrid(
                weights=WeightGrid(**settings["weights"]),
                activations=settings["activations"],
                ranges={name: (float(low), float(high)) for name, (low, high) in settings["ranges"].items()},
                int8_ends=settings.get("int8_ends", False),
            )
        tensors = load_file(folder / "model.safetensors")
    except (ConfigError, KeyError, TypeError, ValueError, OSError, SafetensorError) as error:
        raise ModelError(f"{folder}: is damaged ({error}); write it again") from None
    if grid is None:
        return _from_int8(shape, tensors, config)
    with torch.device("meta"):
        plain = Decoder(shape)
    projections, ends = plain.projections(), _ends(shape, grid)
    expected = {name for name, _ in plain.named_parameters()}
    expected |= {f"{name}.{part}" for name in projections for part in ("scale", "zero")}
    expected |= {f"{name}.scale" for name in ends}
    if expected != set(tensors):
        wrong = ", ".join(sorted(expected ^ set(tensors))[:4])
        raise ModelError(f"{folder}: missing or unknown tensors ({wrong}); quantize the model again")
    codes: dict[str, Codes] = {}
    for name, one in projections.items():
        stored = tensors.pop(f"{name}.weight")
        stored = unpack_nibbles(stored, one.in_features) if stored.dtype == torch.uint8 else stored
        codes[name] = Codes(stored, tensors.pop(f"{name}.scale"), tensors.pop(f"{name}.zero"))
        if stored.shape != one.weight.shape:
            raise ModelError(f"{folder}: {name} has shape {tuple(stored.shape)}, not {tuple(one.weight.shape)}")
    rows = {name: (tensors.pop(f"{name}.weight"), tensors.pop(f"{name}.scale")) for name in ends}
    inputs = {name: grid.inputs(name) for name in codes}
    return _assemble(shape, codes, inputs, rows, tensors, partial(choose_backend, config), grid=grid.weights)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all distinct tensors of a model as stored."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in tensors}.values())


def choose_backend(config: Int8WeightsConfig, matrices: Mapping[str, tuple[Tensor, Tensor]]) -> Backend:
    """Returns the kernels of the configuration, or the fastest for matrices, given as codes and scales."""
    if config.backend != "auto":
        require_backend(config.backend)
        return config.backend
    # Products of one shape take the same time, so that each shape is measured once.
    distinct = list({tuple(weight.shape): (weight, scale) for weight, scale in matrices.values()}.values())
    times = backend_times(distinct, num_rounds=1)
    return min(times, key=lambda backend: times[backend])


@torch.inference_mode()
def backend_times(matrices: Sequence[tuple[Tensor, Tensor]], *, num_rounds: int) -> dict[Backend, float]:
    """Measures the seconds that all matrices, given as codes and scales, take for a token with each kind of kernels,
    decoded and of a prompt: the sum of medians of three, the least of the rounds. Kernels that are `HOPELESS` times as
    slow as others are not measured to the end, and not in the next round: without instructions for integers, `int_mm`
    would take most of the time.
    """
    best: dict[Backend, float] = {}
    for _ in range(num_rounds):
        for backend in usable_backends():
            limit_s, total_s = HOPELESS * min(best.values(), default=math.inf), 0.0
            if best.get(backend, 0.0) > limit_s:
                continue
            for weight, scale in matrices:
                if total_s > limit_s:
                    break
                linear = Int8Linear(weight, scale, backend)
                for rows in MEASURED_ROWS:
                    x = torch.randn(rows, linear.in_features, generator=torch.Generator().manual_seed(0))
                    product = partial(linear, x)
                    times = repeated(lambda product=product: seconds_of(product, "cpu"), num_rounds=3, num_warmups=1)
                    total_s += statistics.median(times) / rows
            best[backend] = min(best.get(backend, math.inf), total_s)
    return best


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Differences of the two models' next-token predictions on the same text. Losses in nats per token; accuracies are
    the shares of tokens that were the likeliest one; `divergence` is the mean KL divergence from the reference in nats;
    `same_first` the share of positions with the same likeliest token; `max_logit_gap` the largest difference of any
    logit.
    """

    num_tokens: int
    reference_loss: float
    int8_loss: float
    reference_accuracy: float
    int8_accuracy: float
    divergence: float
    same_first: float
    max_logit_gap: float


@torch.inference_mode()
def measure_agreement(reference: Decoder, int8: Decoder, tokens_BT: Tensor) -> Agreement:
    """Compare next-token distributions row by row."""
    sums = torch.zeros(6, dtype=torch.float64)
    count, gap = 0, 0.0
    for tokens_T in tokens_BT:
        left, right = (
            model.logits(model(tokens_T[None], torch.arange(len(tokens_T))[None], causal_attend()))[0, :-1].float()
            for model in (reference, int8)
        )
        log_left, log_right = left.log_softmax(-1), right.log_softmax(-1)
        # The last position predicts a token that is not known, so its logits are left out.
        labels = tokens_T[1:]
        sums[0] += F.nll_loss(log_left, labels, reduction="sum")
        sums[1] += F.nll_loss(log_right, labels, reduction="sum")
        sums[2] += (log_left.exp() * (log_left - log_right)).sum()
        sums[3] += (left.argmax(-1) == right.argmax(-1)).sum()
        sums[4] += (left.argmax(-1) == labels).sum()
        sums[5] += (right.argmax(-1) == labels).sum()
        gap = max(gap, float((left - right).abs().max()))
        count += len(labels)
    loss, int8_loss, divergence, same, accuracy, int8_accuracy = (sums / count).tolist()
    return Agreement(
        num_tokens=count,
        reference_loss=loss,
        int8_loss=int8_loss,
        reference_accuracy=accuracy,
        int8_accuracy=int8_accuracy,
        divergence=divergence,
        same_first=same,
        max_logit_gap=gap,
    )
