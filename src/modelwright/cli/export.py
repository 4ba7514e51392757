"""`modelwright export`: writes a model in a format of other programs."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from modelwright.cli.parsers import Command, new_parser
from modelwright.cli.serve import STAGE_HELP, show_remark
from modelwright.core.errors import ConfigError


def parser() -> argparse.ArgumentParser:
    from modelwright.pipeline.exports import EXPORTS, added_exports

    forms = "; ".join(f"{name}: {export.summary}" for name, export in EXPORTS.items())
    dtypes = {name: export.dtypes for name, export in EXPORTS.items() if export.dtypes}
    with_integers = ", ".join(name for name, export in EXPORTS.items() if export.takes_integers)
    names = "|".join([*EXPORTS, *added_exports()])
    parser = new_parser(
        "export",
        f"Write a model for other programs. {forms}.",
        example="modelwright export runs/quickstart --to gguf model.gguf --dtype q8_0",
        usage=f"modelwright export RUN|MODEL_FOLDER --to {names} [DEST] [--dtype NAME] [--int8] [--stage NAME] "
        "[--adapter FOLDER] [--overwrite]",
    )
    parser.add_argument("target", metavar="RUN|MODEL_FOLDER", help="a run directory, its name, or a model folder")
    parser.add_argument("--to", nargs="+", required=True, metavar=(names, "DEST"), help="format, and where to")
    choices = "; ".join(f"{name}: {', '.join(known)} (default: {known[0]})" for name, known in dtypes.items())
    parser.add_argument("--dtype", default="", metavar="NAME", help=f"number format. {choices}")
    parser.add_argument("--stage", default="", help=STAGE_HELP)
    parser.add_argument("--int8", action="store_true", help=f"take the run's INT8 model ({with_integers})")
    parser.add_argument(
        "--adapter", default="", metavar="FOLDER", help="merge an adapter of PEFT or Unsloth into the model first"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace DEST when it exists")
    return parser


def export(words: Sequence[str]) -> int:
    options = parser().parse_args(words)
    name, *rest = options.to
    from modelwright.pipeline.exports import EXPORTS, added_exports
    from modelwright.pipeline.exports.export import ExportOptions
    from modelwright.pipeline.exports.merge import merge_folder
    from modelwright.pipeline.models import FoundModel, find_model
    from modelwright.recipes.load import find_run, find_target
    from modelwright.serve.load import ModelSource

    added = added_exports()
    if (name not in EXPORTS and name not in added) or len(rest) > 1:
        written, formats = " ".join(options.to), ", ".join([*EXPORTS, *added])
        raise ConfigError(f"--to: {written!r} is not understood; write one of {formats}, with or without DEST")
    chosen = EXPORTS[name] if name in EXPORTS else added[name]()
    if options.int8 and not chosen.takes_integers:
        able = ", ".join(one.name for one in EXPORTS.values() if one.takes_integers)
        raise ConfigError(f"--int8: {name} cannot hold these weights; export to one of {able}")
    if options.dtype and options.dtype not in chosen.dtypes:
        remedy = f"choose from {', '.join(chosen.dtypes)}" if chosen.dtypes else "leave it out"
        raise ConfigError(f"--dtype: {name} does not know the number format {options.dtype!r}; {remedy}")
    if options.int8 and options.adapter:
        raise ConfigError("--int8: an adapter is merged into weights that are not quantized; leave one of the two out")
    needs_run = chosen.needs_run and not options.adapter
    path = find_run(options.target).path if needs_run else find_target(options.target)
    result = find_model(path, stage=options.stage, int8=options.int8)
    show_remark(result.remark)
    settings = ExportOptions(dtype=options.dtype or "".join(chosen.dtypes[:1]), overwrite=options.overwrite)
    with ExitStack() as stack:
        described = result.source.describe()
        if options.adapter:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="modelwright-merge-"))) / "merged"
            merged = merge_folder(result.source.folder, Path(options.adapter), folder)
            described += f" with the adapter {options.adapter}"
            for note in merged.notes:
                print(note, file=sys.stderr)
            # Without its run: the run's records and digest are those of the model without the adapter.
            name = f"{result.source.name}-{Path(options.adapter).resolve().name}"
            result = FoundModel(ModelSource(name=name, folder=folder))
        written = chosen.write(result, Path(*rest) if rest else chosen.target(result, settings), settings)
    print(f"Model: {described}", file=sys.stderr)
    print(written)
    return 0


COMMAND = Command(
    name="export",
    run=export,
    parser=parser,
    summary="write a model in a form of other programs: Hugging Face, GGUF, ONNX, OpenVINO",
)
