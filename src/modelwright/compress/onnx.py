"""Writes a decoder as an ONNX file, by PyTorch's own exporter, and as OpenVINO's IR, by OpenVINO's reader of ONNX.

The graph takes token ids of whole rows and gives the logits of every token, without a cache. Weights are FP32, or the
integers of a quantized model. A product of integers is written in ONNX's own terms, QuantizeLinear and DequantizeLinear
around a product, which runtimes compute as such or fuse into integer kernels. Per-token activations are divided by
their largest magnitude first, so that one constant step fits all tokens:

    y[n] = a[n] * (DQ(Q(x[n] / a[n])) @ DQ(q)')        a[n] = max_i |x[n, i]|

Legend: B rows, T tokens, V vocabulary, O outputs, I inputs, G groups of a weight, S elements of a group.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelwright.compress.int8 import GridLinear, InputGrid, Int8Linear
from modelwright.core.config import ConfigError, ModelError
from modelwright.model.attention import masked_attend
from modelwright.model.decoder import Decoder
from modelwright.ops.int_grid import ACTIVATION_LEVELS, TINY, activation_range

OPSET = 21
"""The first version of ONNX's operators with 4-bit integers."""
FOUR_BITS = "int4"
"""Prefix of the names of buffers with 4-bit codes, which PyTorch itself cannot store as such."""
ONNX_FILE, OPENVINO_FILE = "model.onnx", "openvino_model.xml"
EXAMPLE = (2, 5)
"""Rows and tokens of the example that is traced; any sizes but 0 and 1 will do."""
PACKAGES = {"onnx": ("onnx", "onnxscript"), "openvino": ("onnx", "onnxscript", "openvino")}
INTEGERS = ("QuantizeLinear", "DequantizeLinear")


def require_packages(extra: str) -> None:
    """Raise `ConfigError` with the packages of `onnx` or `openvino` to install."""
    missing = [name for name in PACKAGES[extra] if find_spec(name) is None]
    if missing:
        raise ConfigError(f"--to {extra}: needs {', '.join(missing)}: pip install 'modelwright[{extra}]'")


def write_onnx(model: Decoder, folder: Path, *, source: str, notes: Mapping[str, str]) -> Path:
    """Write `model.onnx` into the folder; weights of more than 2 GB go into a file next to it, as protobuf requires.
    notes: stored in the file. source: origin of the model, for messages. `model` is changed. Raises `ModelError` with
    the part that cannot be exported.
    """
    require_packages("onnx")
    if model.config.rope.depends_on_length:
        raise ModelError(
            f"{source}: rope_scaling: {model.config.rope.kind} takes other frequencies for longer sequences, which a "
            "graph for rows of any length cannot know; export to hf or serve the model instead"
        )
    for name, module in list(model.named_modules()):
        if isinstance(module, (Int8Linear, GridLinear)):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, OnnxLinear(module))
    graph = OnnxDecoder(model.float().eval())
    ir: Any = import_module("onnx_ir")
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    with torch.no_grad(), _quietly():
        program: Any = torch.onnx.export(
            graph,
            (torch.zeros(EXAMPLE, dtype=torch.int64),),
            dynamo=True,
            dynamic_shapes={"input_ids": {0: batch, 1: length}},
            input_names=["input_ids"],
            output_names=["logits"],
            opset_version=OPSET,
            optimize=False,
            verbose=False,
        )
        # Constants are folded, but quantized weights must stay integers.
        optimizer: Any = import_module("onnxscript.optimizer")
        optimizer.optimize_ir(program.model, should_fold=lambda node: False if node.op_type in INTEGERS else None)
    # PyTorch exports the codes of 4-bit weights as bytes; here they become four bits.
    for name, value in program.model.graph.initializers.items():
        if name.rpartition(".")[2].startswith(f"{FOUR_BITS}_"):
            codes = value.const_value.numpy().astype(ir.DataType.INT4.numpy())
            value.const_value = ir.Tensor(codes, dtype=ir.DataType.INT4, name=name)
            value.dtype = ir.DataType.INT4
    # Every node carries a stack trace with paths of this machine.
    import_module("onnx_ir.passes.common").ClearMetadataAndDocStringPass()(program.model)
    program.model.metadata_props.update(notes)
    path = folder / ONNX_FILE
    program.save(str(path))
    return path


def write_openvino(model: Decoder, folder: Path, *, source: str, notes: Mapping[str, str]) -> Path:
    """Write `openvino_model.xml` and its `.bin` into the folder. Otherwise as `write_onnx`."""
    require_packages("openvino")
    openvino: Any = import_module("openvino")
    intermediate = write_onnx(model, folder, source=source, notes=notes)
    graph = openvino.Core().read_model(intermediate)
    for name, value in notes.items():
        graph.set_rt_info(value, ["modelwright", name])
    path = folder / OPENVINO_FILE
    openvino.save_model(graph, path, compress_to_fp16=False)
    del graph  # it may have the file mapped
    for file in folder.glob(f"{ONNX_FILE}*"):
        file.unlink()
    return path


@contextmanager
def _quietly() -> Iterator[None]:
    """Silences the exporter's remarks about itself and about packages that nothing here needs."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


class OnnxDecoder(nn.Module):
    """`input_ids` int64 [B, T] -> logits FP32 [B, T, V]. Rows shorter than T are filled up at the end: no token sees a
    later one.
    """

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        positions_BT = torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
        attend = masked_attend(torch.zeros_like(input_ids[:1]), self.model.config.windows)
        return self.model.logits(self.model(input_ids, positions_BT, attend))


class OnnxLinear(nn.Module):
    """A linear layer over integers, for export only: run by PyTorch itself it gives zeros."""

    def __init__(self, linear: Int8Linear | GridLinear) -> None:
        super().__init__()
        self.shape = linear.out_features, linear.in_features
        self.bias = linear.bias
        bits, self.inputs = 8, InputGrid(kind="token")
        codes_OI, scale_G, zero_G = linear.quantized, linear.scale, torch.zeros_like(linear.scale)
        if isinstance(linear, GridLinear):
            bits, self.inputs = linear.grid.bits, linear.inputs
            codes_OI, scale_G, zero_G = linear.codes
        # Codes are stored in rows, each with a step: those of the grid, but at least one for each output, and of four
        # bits at least two. ONNX Runtime replaces one step per output, and nothing else, by a kernel that rounds
        # activations to eight bits, which changed logits of a small model by 2%.
        fewest = linear.out_features * (2 if bits == 4 and linear.in_features % 2 == 0 else 1)
        num_groups = max(scale_G.numel(), fewest)
        codes_GS = codes_OI.reshape(num_groups, -1)
        scale_G, zero_G = (one.view(-1, 1).expand(-1, num_groups // len(one)).flatten() for one in (scale_G, zero_G))
        self.prefix = FOUR_BITS if bits == 4 else "int8"
        self.has_zero = bool(zero_G.any())
        self.register_buffer(f"{self.prefix}_codes", codes_GS)
        self.register_buffer("scale", scale_G.float().contiguous())
        self.register_buffer(f"{self.prefix}_zero", zero_G.to(torch.int8).contiguous() if self.has_zero else None)
        least, most = (self.inputs.least, self.inputs.most) if self.inputs.kind == "tensor" else (-1.0, 1.0)
        step, zero = activation_range(least, most, scale_G)
        if self.inputs.kind == "token":
            step, zero = torch.full_like(step, 1.0 / ACTIVATION_LEVELS), torch.zeros_like(zero)
        self.register_buffer("input_scale", step)
        self.register_buffer("input_zero", zero.to(torch.int8))
        self.input_scale: Tensor
        self.input_zero: Tensor

    def weight(self) -> Tensor:
        """Dequantized weight, FP32 [O, I]."""
        codes_GS = self.get_buffer(f"{self.prefix}_codes")
        zero_G = self.get_buffer(f"{self.prefix}_zero") if self.has_zero else None
        return _dequantize(codes_GS, self.get_buffer("scale"), zero_G, axis=0).view(self.shape)

    def forward(self, x: Tensor) -> Tensor:
        if self.inputs.kind == "none":
            out = F.linear(x, self.weight())
        elif self.inputs.kind == "tensor":
            out = F.linear(self._rounded(x), self.weight())
        else:
            peak = x.abs().amax(dim=-1, keepdim=True).clamp_min(TINY)
            out = F.linear(self._rounded(x / peak), self.weight()) * peak
        return out if self.bias is None else out + self.bias

    def _rounded(self, x: Tensor) -> Tensor:
        inputs = (x, self.input_scale, self.input_zero)
        codes = torch.onnx.ops.symbolic("QuantizeLinear", inputs, dtype=torch.int8, shape=x.shape, version=OPSET)
        return _dequantize(codes, self.input_scale, self.input_zero, axis=1)


def _dequantize(codes: Tensor, scale: Tensor, zero: Tensor | None, *, axis: int) -> Tensor:
    inputs = (codes, scale) if zero is None else (codes, scale, zero)
    attributes: Any = {"axis": axis} if scale.dim() else {}
    return torch.onnx.ops.symbolic(
        "DequantizeLinear", inputs, attributes, dtype=torch.float32, shape=codes.shape, version=OPSET
    )
