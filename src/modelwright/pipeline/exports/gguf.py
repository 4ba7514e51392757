"""A GGUF file for llama.cpp, with a Modelfile for Ollama beside it."""

from pathlib import Path
from typing import cast, get_args

from modelwright.compress.gguf.export import GgufFormat, export_gguf
from modelwright.compress.gguf.modelfile import modelfile
from modelwright.compress.gguf.vocabulary import read_vocabulary
from modelwright.core.artifacts import write_atomic
from modelwright.core.errors import ConfigError
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.model.hf import load_config
from modelwright.pipeline.exports.export import Export, ExportOptions, require_exportable
from modelwright.pipeline.models import FoundModel


def export_gguf_file(found: FoundModel, target: Path, *, number_format: GgufFormat, overwrite: bool) -> Path:
    """Write a model as the GGUF file `target`, with a Modelfile for Ollama beside it. Returns `target`."""
    if target.suffix != ".gguf":
        raise ConfigError(f"--to: {target} does not end in .gguf; give the path of a file")
    if target.exists() and not overwrite:
        raise ConfigError(f"{target}: exists; choose another file or add --overwrite")
    folder = found.source.folder
    require_exportable(folder)
    export_gguf(folder, target, number_format=number_format, name=found.source.name)
    adds_bos = read_vocabulary(folder, load_config(folder).vocab_size).adds_bos
    text = modelfile(
        Tokenizer.load(folder), target.name, max_seq_len=load_config(folder).max_seq_len, adds_bos=adds_bos
    )
    write_atomic(target.with_name("Modelfile"), text)
    return target


def _target(found: FoundModel, options: ExportOptions) -> Path:
    name = f"{found.source.name}-{options.dtype.upper()}.gguf"
    return found.run.path / "gguf" / name if found.run else Path(name)


EXPORT = Export(
    name="gguf",
    summary="a GGUF file for llama.cpp, with a Modelfile for Ollama beside it",
    write=lambda found, target, options: export_gguf_file(
        found, target, number_format=cast(GgufFormat, options.dtype), overwrite=options.overwrite
    ),
    target=_target,
    dtypes=get_args(GgufFormat),
)
