"""Writes a decoder as an ONNX file, by PyTorch's own exporter, and as OpenVINO's IR, by OpenVINO's reader of ONNX.

Weights are FP32, or the integers of a quantized model. The graph is that of `compress/onnx/decoder.py`.
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

from modelwright.compress.onnx.decoder import FOUR_BITS, OPSET, exportable
from modelwright.core.errors import ConfigError
from modelwright.model.decoder import Decoder

ONNX_FILE, OPENVINO_FILE = "model.onnx", "openvino_model.xml"
EXAMPLE = (2, 5)
"""Rows and tokens of the example that is traced; any sizes but 0 and 1 will do."""
INTEGERS = ("QuantizeLinear", "DequantizeLinear")


def require_onnx() -> None:
    """Raise `ConfigError` with the packages to install."""
    _require("onnx", ("onnx", "onnxscript"))


def require_openvino() -> None:
    """Raise `ConfigError` with the packages to install."""
    _require("openvino", ("onnx", "onnxscript", "openvino"))


def _require(extra: str, packages: tuple[str, ...]) -> None:
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(f"--to {extra}: needs {', '.join(missing)}: pip install 'modelwright[{extra}]'")


def write_onnx(model: Decoder, folder: Path, *, source: str, notes: Mapping[str, str]) -> Path:
    """Write `model.onnx` into the folder; weights of more than 2 GB go into a file next to it, as protobuf requires.
    notes: stored in the file. source: origin of the model, for messages. `model` is changed. Raises `ModelError` with
    the part that cannot be exported.
    """
    require_onnx()
    graph = exportable(model, source)
    ir: Any = import_module("onnx_ir")

    def folds(node: Any) -> bool | None:
        # Constants are folded, but quantized weights must stay integers.
        return False if node.op_type in INTEGERS else None

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
        import_module("onnxscript.optimizer").optimize_ir(program.model, should_fold=folds)
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
    require_openvino()
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
