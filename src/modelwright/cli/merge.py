"""`modelwright merge`: a model and an adapter as one model folder."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from modelwright.cli.parsers import Command, new_parser
from modelwright.cli.serve import STAGE_HELP, show_remark


def parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "merge",
        "Merge an adapter of PEFT or Unsloth, or one that Modelwright has written, into the weights of its model. "
        "The result is a folder in the number format of MODEL, with equal outputs, which `transformers` loads.",
        example="modelwright merge models/SmolLM2-135M-Instruct adapter merged",
    )
    parser.add_argument("target", metavar="MODEL", help="a Hugging Face folder, a run directory, or a run's name")
    parser.add_argument("adapter", metavar="ADAPTER", help="a folder with adapter_config.json")
    parser.add_argument("dest", metavar="DEST", help="the folder to write")
    parser.add_argument(
        "--dtype",
        default="",
        metavar="NAME",
        help="number format of the weights: float32, bfloat16 or float16 (default: that of MODEL)",
    )
    parser.add_argument("--stage", default="", help=STAGE_HELP)
    parser.add_argument("--overwrite", action="store_true", help="replace DEST when it exists")
    return parser


def merge(words: Sequence[str]) -> int:
    options = parser().parse_args(words)
    from modelwright.pipeline.exports.merge import merge_folder
    from modelwright.pipeline.models import find_model
    from modelwright.recipes.load import find_target

    found = find_model(find_target(options.target), stage=options.stage)
    show_remark(found.remark)
    merged = merge_folder(
        found.source.folder,
        Path(options.adapter),
        Path(options.dest),
        dtype=options.dtype,
        overwrite=options.overwrite,
    )
    for note in merged.notes:
        print(note, file=sys.stderr)
    print(merged.folder)
    return 0


COMMAND = Command(
    name="merge", run=merge, parser=parser, summary="merge an adapter of PEFT or Unsloth into its model's weights"
)
