"""`modelwright export`: writes a model in a format of other programs."""

import argparse
import sys
from collections.abc import Sequence

from modelwright.cli.parsers import Command, new_parser
from modelwright.cli.serve import STAGE_HELP, show_remark
from modelwright.core.config import ConfigError


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
    parser.add_argument("--int8", action="store_true", help=f"take the run's quantized model ({with_integers})")
    parser.add_argument(
        "--adapter", default="", metavar="FOLDER", help="merge an adapter of PEFT or Unsloth into the model first"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace DEST when it exists")
    return parser


def export(words: Sequence[str]) -> int:
    options = parser().parse_args(words)
    name, *rest = options.to
    from modelwright.recipes.models import export as export_model

    if len(rest) > 1:
        raise ConfigError(f"--to: {' '.join(options.to)!r} is not understood; write a format, with or without DEST")
    done = export_model(
        options.target,
        name,
        *rest,
        dtype=options.dtype,
        stage=options.stage,
        int8=options.int8,
        adapter=options.adapter,
        overwrite=options.overwrite,
    )
    for note in done.notes:
        show_remark(note)
    print(f"Model: {done.model}", file=sys.stderr)
    print(done.path)
    return 0


COMMAND = Command(
    name="export",
    run=export,
    parser=parser,
    summary="write a model in a form of other programs: Hugging Face, GGUF, ONNX, OpenVINO",
)
