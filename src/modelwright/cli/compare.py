"""`modelwright compare`: two models on the same records."""

import argparse
from collections.abc import Sequence

from modelwright.cli.parsers import Command, new_parser


def parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "compare",
        "Compare two models on the same records: how likely they find the reference answers, which of several choices "
        "they find likeliest, and whether the number at the end of a greedy answer is right (references that end with "
        '"#### 42", as in GSM8K). Each difference comes with the 95%% interval and the p-value of a paired bootstrap '
        "over records. Models with different tokenizers are compared in bits per byte.",
        example="modelwright compare models/base runs/base-support heldout.jsonl --json",
        usage="modelwright compare A B DATA [DATA ...] [--json] [--resamples N] [--max-new-tokens N] [--num-records N]",
    )
    parser.add_argument("first", metavar="A", help="a run directory, its name, or a model folder")
    parser.add_argument("second", metavar="B", help="the other model, in the same forms")
    parser.add_argument("sources", metavar="DATA", nargs="+", help="files with records; docs/data.md has the forms")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--resamples", type=int, default=10_000, metavar="N", help="bootstrap samples (10,000)")
    parser.add_argument(
        "--max-new-tokens", type=int, default=512, metavar="N", help="tokens per generated answer (512)"
    )
    parser.add_argument("--num-records", type=int, default=0, metavar="N", help="take the first N (default: all)")
    return parser


def compare(words: Sequence[str]) -> int:
    options = parser().parse_args(words)
    from modelwright.recipes.models import compare as compare_models

    result = compare_models(
        options.first,
        options.second,
        options.sources,
        resamples=options.resamples,
        max_new_tokens=options.max_new_tokens,
        num_records=options.num_records,
        progress=True,
    )
    print(result.as_json() if options.json else result)
    return 0


COMMAND = Command(name="compare", run=compare, parser=parser, summary="compare two models on the same records")
