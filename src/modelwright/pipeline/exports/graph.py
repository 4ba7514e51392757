"""A model's graph for ONNX Runtime or OpenVINO, in FP32 or with a quantized model's integers."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from modelwright.compress import onnx
from modelwright.compress.int8 import Int8WeightsConfig, is_int8_folder, load_int8
from modelwright.core.config import ModelError
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.model.hf import is_sequence_classifier, load_model
from modelwright.pipeline.exports.export import CARD, Export, ExportOptions, model_card, replaced
from modelwright.pipeline.models import FoundModel
from modelwright.pipeline.report.run_data import read_run
from modelwright.pipeline.run_config import read_run_config


def graph_export(
    runtime: str, title: str, *, file: str, use: Sequence[str], require: Callable[[], None], write: Callable[..., Path]
) -> Export:
    """Returns the format of a runtime.

    runtime: library that runs the graph; title: its name for people; file: name of the graph's file; use: lines of the
    card on its use; require: raises `ConfigError` if a package is missing; write: as `write_onnx`.
    """

    def export(found: FoundModel, target: Path, options: ExportOptions) -> Path:
        require()
        source = found.source
        if is_int8_folder(source.folder):
            # The back-end whose weights are plain INT8 tensors, which a graph can contain.
            model = load_int8(source.folder, Int8WeightsConfig(backend="int_mm"))
        elif is_sequence_classifier(source.folder):
            raise ModelError(
                f"{source.folder}: architectures: a model that scores texts does not compute logits of tokens to export"
            )
        else:
            model = load_model(source.folder)
        context = model.config.max_seq_len
        notes = {"name": source.name, "stage": source.stage, "sha256": source.digest, "max_seq_len": str(context)}
        lines = (
            f"`{file}` takes `input_ids`, int64 [rows, tokens], and gives `logits`, float32 [rows, tokens, "
            f"vocabulary]; up to {context:,} tokens. It has no key/value cache. Fill shorter rows up at the end. "
            f"Weights are {'the integers of the quantized model' if is_int8_folder(source.folder) else 'FP32'}.",
            "",
            "```python",
            "import numpy",
            *use,
            "```",
        )
        with replaced(target, holds=file, overwrite=options.overwrite) as draft:
            write(model, draft.path, source=str(source.folder), notes={name: one for name, one in notes.items() if one})
            Tokenizer.load(source.folder).save(draft.path)
            if found.run is None:  # a folder whose training is unknown
                card = "\n".join([f"# {source.name}", "", f"Exported for {runtime} by Modelwright.", "", *lines, ""])
            else:
                data = read_run(read_run_config(found.run.config), found.run)
                stages = data.config.model_names
                # The stage quantize is not among them: its model has the card of the model that was quantized.
                stage = source.stage if source.stage in stages else stages[-1]
                card = model_card(data, stage, library=runtime, use=lines)
            (draft.path / CARD).write_text(card, encoding="utf-8")
        return target

    return Export(
        name=runtime,
        summary=f"a folder with the model's graph for {title}",
        write=export,
        target=lambda found, _: found.run.path / runtime if found.run else Path(f"{found.source.name}-{runtime}"),
        takes_integers=True,
    )


ONNX = graph_export(
    "onnx",
    "ONNX Runtime",
    file=onnx.ONNX_FILE,
    use=(
        "import onnxruntime",
        'session = onnxruntime.InferenceSession("model.onnx")',
        '(logits,) = session.run(["logits"], {"input_ids": numpy.array([ids])})',
    ),
    require=partial(onnx.require_packages, "onnx"),
    write=onnx.write_onnx,
)

OPENVINO = graph_export(
    "openvino",
    "OpenVINO",
    file=onnx.OPENVINO_FILE,
    use=(
        "import openvino",
        "# computes in FP32, which is not the default of processors with BF16 instructions",
        'settings = {"INFERENCE_PRECISION_HINT": "f32"}',
        'model = openvino.compile_model("openvino_model.xml", "CPU", settings)',
        'logits = model({"input_ids": numpy.array([ids])})["logits"]',
    ),
    require=partial(onnx.require_packages, "openvino"),
    write=onnx.write_openvino,
)
