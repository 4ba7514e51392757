"""`modelwright evaluate`: evaluates a model on lm-eval's local tasks."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from modelwright.cli.parsers import Command, new_parser


def parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "evaluate",
        "Evaluate a model on tasks of EleutherAI's lm-evaluation-harness, which are YAML files with local data. "
        "Nothing is downloaded: a task that wants to is refused. Prints lm-eval's table and writes all results, with "
        "every answer and the model's digest.",
        example="modelwright evaluate runs/my-model-examples --tasks tasks/ --limit 100",
        usage="modelwright evaluate RUN|MODEL_FOLDER --tasks FOLDER_OR_YAML [--limit N] [--num-fewshot N] [--chat] "
        "[--stage NAME] [--int8] [--out FILE] [--json]",
    )
    parser.add_argument("target", metavar="RUN|MODEL_FOLDER", help="a run directory, its name, or a model folder")
    parser.add_argument("--tasks", type=Path, required=True, metavar="FOLDER_OR_YAML", help="all tasks in it are run")
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="documents of each task (default: all)")
    parser.add_argument("--num-fewshot", type=int, default=-1, metavar="N", help="examples before each question")
    parser.add_argument("--chat", action="store_true", help="put questions in the model's chat template")
    parser.add_argument("--stage", default="", help="the model of this training stage (default: the run's last)")
    parser.add_argument("--int8", action="store_true", help="take the run's quantized model")
    parser.add_argument("--out", type=Path, metavar="FILE", help="results (default: lm-eval-TASKS.json of the run)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON in place of the table")
    return parser


def evaluate(words: Sequence[str]) -> int:
    options = parser().parse_args(words)
    from modelwright.pipeline.harness import as_json, table
    from modelwright.recipes.models import evaluate as evaluate_model

    done = evaluate_model(
        options.target,
        options.tasks,
        limit=options.limit,
        num_fewshot=options.num_fewshot,
        chat=options.chat,
        stage=options.stage,
        int8=options.int8,
        out=options.out or "",
        progress=True,
    )
    print(as_json(done.results) if options.json else table(done.results))
    print(f"Model: {done.found.source.describe()}\nResults: {done.path}", file=sys.stderr)
    return 0


COMMAND = Command(
    name="evaluate", run=evaluate, parser=parser, summary="evaluate a model on lm-eval's local task files"
)
