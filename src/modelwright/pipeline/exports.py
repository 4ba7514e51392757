"""Writes a model for other programs: a Hugging Face folder, a GGUF file, or a graph for ONNX Runtime or OpenVINO."""

import json
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelwright.compress.gguf.export import GgufFormat, export_gguf
from modelwright.compress.gguf.modelfile import modelfile
from modelwright.compress.gguf.vocabulary import read_vocabulary
from modelwright.compress.int8 import Int8WeightsConfig, is_int8_folder, load_int8
from modelwright.compress.onnx.export import (
    ONNX_FILE,
    OPENVINO_FILE,
    require_onnx,
    require_openvino,
    write_onnx,
    write_openvino,
)
from modelwright.core.artifacts import MANIFEST, ArtifactDraft, write_artifact, write_atomic
from modelwright.core.errors import ConfigError, ModelError
from modelwright.data.tokenizer import Tokenizer
from modelwright.model.decoder import Decoder
from modelwright.model.hf import is_sequence_classifier, load_config, load_model
from modelwright.model.hf_types.own import OWN_TYPE
from modelwright.pipeline.model_card import CARD, model_card
from modelwright.pipeline.models import FoundModel
from modelwright.pipeline.report.run_data import read_run
from modelwright.pipeline.run_config import read_run_config

RUNTIMES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "onnx": (
        ONNX_FILE,
        (
            "import onnxruntime",
            'session = onnxruntime.InferenceSession("model.onnx")',
            '(logits,) = session.run(["logits"], {"input_ids": numpy.array([ids])})',
        ),
    ),
    "openvino": (
        OPENVINO_FILE,
        (
            "import openvino",
            "# computes in FP32, which is not the default of processors with BF16 instructions",
            'settings = {"INFERENCE_PRECISION_HINT": "f32"}',
            'model = openvino.compile_model("openvino_model.xml", "CPU", settings)',
            'logits = model({"input_ids": numpy.array([ids])})["logits"]',
        ),
    ),
}
"""The file that holds the graph, and how a card says that it is run."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What a user chooses beside the format. overwrite: replace an earlier export."""

    gguf_format: GgufFormat = "f16"
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """One form of a model. write: returns what it has written; target: where to, unless a user says so; needs_run:
    model folders have this form already; takes_integers: quantized models have it, too.
    """

    write: Callable[[FoundModel, Path, ExportOptions], Path]
    target: Callable[[FoundModel, ExportOptions], Path]
    needs_run: bool = False
    takes_integers: bool = False


def export_hf(found: FoundModel, target: Path, *, overwrite: bool) -> Path:
    """Copy a model to `target`, atomically, with a model card if it is that of a run. Returns `target`."""
    source = found.source.folder
    _require_exportable(source)
    with _replaced(target, holds="config.json", overwrite=overwrite) as draft:
        for path in sorted(source.iterdir()):
            if path.is_file() and path.name != MANIFEST:
                shutil.copyfile(path, draft.path / path.name)
        if found.run is not None:
            data = read_run(read_run_config(found.run.config), found.run)
            (draft.path / CARD).write_text(model_card(data, found.source.stage), encoding="utf-8")
    return target


def export_gguf_file(found: FoundModel, target: Path, *, number_format: GgufFormat, overwrite: bool) -> Path:
    """Write a model as the GGUF file `target`, with a Modelfile for Ollama beside it. Returns `target`."""
    if target.suffix != ".gguf":
        raise ConfigError(f"--to: {target} does not end in .gguf; give the path of a file")
    if target.exists() and not overwrite:
        raise ConfigError(f"{target}: exists; choose another file or add --overwrite")
    folder = found.source.folder
    _require_exportable(folder)
    export_gguf(folder, target, number_format=number_format, name=found.source.name)
    adds_bos = read_vocabulary(folder, load_config(folder).vocab_size).adds_bos
    text = modelfile(
        Tokenizer.load(folder), target.name, max_seq_len=load_config(folder).max_seq_len, adds_bos=adds_bos
    )
    write_atomic(target.with_name("Modelfile"), text)
    return target


def export_graph(
    found: FoundModel,
    target: Path,
    *,
    runtime: str,
    require: Callable[[], None],
    write: Callable[..., Path],
    overwrite: bool,
) -> Path:
    """Write a model's graph with tokenizer and card as the folder `target`, atomically. Returns `target`.

    require: raises `ConfigError` where a package is missing; write: as `write_onnx`.
    """
    require()
    source, (file, use) = found.source, RUNTIMES[runtime]
    model = _loaded(source.folder)
    context = model.config.max_seq_len
    notes = {"name": source.name, "stage": source.stage, "sha256": source.digest, "max_seq_len": str(context)}
    lines = (
        f"`{file}` takes `input_ids`, int64 [rows, tokens], and gives `logits`, float32 [rows, tokens, vocabulary]; up "
        f"to {context:,} tokens. It has no key/value cache. Fill shorter rows up at the end. Weights are "
        f"{'the integers of the quantized model' if is_int8_folder(source.folder) else 'FP32'}.",
        "",
        "```python",
        "import numpy",
        *use,
        "```",
    )
    with _replaced(target, holds=file, overwrite=overwrite) as draft:
        write(model, draft.path, source=str(source.folder), notes={name: one for name, one in notes.items() if one})
        Tokenizer.load(source.folder).save(draft.path)
        (draft.path / CARD).write_text(_graph_card(found, runtime, lines), encoding="utf-8")
    return target


def _graph_card(found: FoundModel, runtime: str, use: tuple[str, ...]) -> str:
    """A run's model card, or a short one of a folder of whose making nothing is known."""
    if found.run is None:
        return "\n".join([f"# {found.source.name}", "", f"Exported for {runtime} by Modelwright.", "", *use, ""])
    data = read_run(read_run_config(found.run.config), found.run)
    stages = data.config.model_names
    stage = found.source.stage if found.source.stage in stages else stages[-1]
    return model_card(data, stage, library=runtime, use=use)


def _loaded(folder: Path) -> Decoder:
    if is_int8_folder(folder):
        return load_int8(folder, Int8WeightsConfig(backend="int_mm"))
    if is_sequence_classifier(folder):
        raise ModelError(f"{folder}: architectures: a model that scores texts has no logits of tokens to export")
    return load_model(folder)


@contextmanager
def _replaced(target: Path, *, holds: str, overwrite: bool) -> Generator[ArtifactDraft]:
    """A folder that appears whole, in place of an earlier export at most: one with the file `holds`."""
    if overwrite and target.is_dir() and any(target.iterdir()) and not (target / holds).is_file():
        raise ConfigError(
            f"{target}: contains something other than a model, so it is not replaced; choose another folder"
        )
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target}: is a file, so it is not replaced by a folder; choose another one")
    if target.exists() and not overwrite:
        raise ConfigError(f"{target}: exists; choose another folder or add --overwrite")
    with write_artifact(target, kind="export", digest="") as draft:
        yield draft
    (target / MANIFEST).unlink()


def _require_exportable(source: Path) -> None:
    """Raise `ConfigError` for a model that `transformers`, and so llama.cpp, has no type for."""
    settings = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if settings.get("model_type") == OWN_TYPE:
        if settings["attention_gate"] == "none":
            raise ConfigError(
                f"model.head_budget: {source} computes a learned share of its heads ({settings['head_budget']:g}), and "
                "no model type of transformers does; export it to onnx or openvino, or train one with head_budget 1"
            )
        raise ConfigError(
            f"model.attention_gate: {source} has a gate on attention's output ({settings['attention_gate']}), and no "
            "model type of transformers has one; export it to onnx or openvino, or train one with attention_gate none"
        )


def _gguf_target(found: FoundModel, options: ExportOptions) -> Path:
    name = f"{found.source.name}-{options.gguf_format.upper()}.gguf"
    return found.run.path / "gguf" / name if found.run else Path(name)


def _graph_format(runtime: str, require: Callable[[], None], write: Callable[..., Path]) -> ExportFormat:
    settings: dict[str, Any] = {"runtime": runtime, "require": require, "write": write}
    return ExportFormat(
        write=lambda found, target, options: export_graph(found, target, **settings, overwrite=options.overwrite),
        target=lambda found, _: found.run.path / runtime if found.run else Path(f"{found.source.name}-{runtime}"),
        takes_integers=True,
    )


EXPORTS: Mapping[str, ExportFormat] = {
    "hf": ExportFormat(
        write=lambda found, target, options: export_hf(found, target, overwrite=options.overwrite),
        target=lambda found, _: found.run.path / "hf" if found.run else Path("hf"),
        needs_run=True,
    ),
    "gguf": ExportFormat(
        write=lambda found, target, options: export_gguf_file(
            found, target, number_format=options.gguf_format, overwrite=options.overwrite
        ),
        target=_gguf_target,
    ),
    "onnx": _graph_format("onnx", require_onnx, write_onnx),
    "openvino": _graph_format("openvino", require_openvino, write_openvino),
}
"""The only list of the forms."""
