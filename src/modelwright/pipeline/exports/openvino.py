"""A graph for OpenVINO."""

from modelwright.compress.onnx.export import OPENVINO_FILE, require_openvino, write_openvino
from modelwright.pipeline.exports.graph import graph_export

EXPORT = graph_export(
    "openvino",
    "OpenVINO",
    file=OPENVINO_FILE,
    use=(
        "import openvino",
        "# computes in FP32, which is not the default of processors with BF16 instructions",
        'settings = {"INFERENCE_PRECISION_HINT": "f32"}',
        'model = openvino.compile_model("openvino_model.xml", "CPU", settings)',
        'logits = model({"input_ids": numpy.array([ids])})["logits"]',
    ),
    require=require_openvino,
    write=write_openvino,
)
