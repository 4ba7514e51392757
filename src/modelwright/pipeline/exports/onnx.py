"""A graph for ONNX Runtime."""

from modelwright.compress.onnx.export import ONNX_FILE, require_onnx, write_onnx
from modelwright.pipeline.exports.graph import graph_export

EXPORT = graph_export(
    "onnx",
    "ONNX Runtime",
    file=ONNX_FILE,
    use=(
        "import onnxruntime",
        'session = onnxruntime.InferenceSession("model.onnx")',
        '(logits,) = session.run(["logits"], {"input_ids": numpy.array([ids])})',
    ),
    require=require_onnx,
    write=write_onnx,
)
