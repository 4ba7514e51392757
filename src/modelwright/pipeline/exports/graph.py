"""A model's graph for a runtime, in FP32 or with the integers of a quantized model: what these formats share."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from modelwright.compress.int8 import Int8WeightsConfig, is_int8_folder, load_int8
from modelwright.core.errors import ModelError
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.model.decoder import Decoder
from modelwright.model.hf import is_sequence_classifier, load_model
from modelwright.pipeline.exports.export import Export, ExportOptions, replaced
from modelwright.pipeline.model_card import CARD, model_card
from modelwright.pipeline.models import FoundModel
from modelwright.pipeline.report.run_data import read_run
from modelwright.pipeline.run_config import read_run_config


def graph_export(
    runtime: str, title: str, *, file: str, use: Sequence[str], require: Callable[[], None], write: Callable[..., Path]
) -> Export:
    """The format of a runtime. title: its name for people; the rest as in `export_graph`."""
    export = partial(export_graph, runtime=runtime, file=file, use=use, require=require, write=write)

    def write_graph(found: FoundModel, target: Path, options: ExportOptions) -> Path:
        return export(found, target, overwrite=options.overwrite)

    return Export(
        name=runtime,
        summary=f"a folder with the model's graph for {title}",
        write=write_graph,
        target=lambda found, _: found.run.path / runtime if found.run else Path(f"{found.source.name}-{runtime}"),
        takes_integers=True,
    )


def export_graph(
    found: FoundModel,
    target: Path,
    *,
    runtime: str,
    file: str,
    use: Sequence[str],
    require: Callable[[], None],
    write: Callable[..., Path],
    overwrite: bool,
) -> Path:
    """Write a model's graph with tokenizer and card as the folder `target`, atomically. Returns `target`.

    runtime: the library that runs it; file: the one that holds the graph; use: how a card says that it is run; require:
    raises `ConfigError` where a package is missing; write: as `write_onnx`.
    """
    require()
    source = found.source
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
    with replaced(target, holds=file, overwrite=overwrite) as draft:
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
