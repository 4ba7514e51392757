"""`modelwright evaluate`: evaluates a model on lm-eval's local tasks."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from modelwright.cli.display import shown_progress
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
    parser.add_argument("--int8", action="store_true", help="take the run's INT8 model")
    parser.add_argument("--out", type=Path, metavar="FILE", help="results (default: lm-eval-TASKS.json of the run)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON in place of the table")
    return parser


def evaluate(words: Sequence[str]) -> int:
    options = parser().parse_args(words)
    from modelwright.pipeline.harness import HarnessConfig, as_json, evaluate_tasks, find_tasks, table, write_results
    from modelwright.pipeline.models import find_model
    from modelwright.recipes.load import find_target

    config = HarnessConfig(limit=options.limit, num_fewshot=options.num_fewshot, uses_chat=options.chat)
    tasks = find_tasks(options.tasks)
    found = find_model(find_target(options.target), stage=options.stage, int8=options.int8)
    name = f"lm-eval-{options.tasks.resolve().stem}.json"
    target = found.run.path / name if found.run is not None else Path(f"{found.source.name}-{name}")
    with shown_progress() as display:
        results = evaluate_tasks(found, tasks, config, display)
    written = write_results(results, options.out or target)
    print(as_json(results) if options.json else table(results))
    print(f"Model: {found.source.describe()}\nResults: {written}", file=sys.stderr)
    return 0


COMMAND = Command(
    name="evaluate", run=evaluate, parser=parser, summary="evaluate a model on lm-eval's local task files"
)
