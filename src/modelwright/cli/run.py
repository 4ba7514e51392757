"""`modelwright run`: parses the arguments into a request, passes it to the pipeline in this process or in several
processes started here, and shows the outcome.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from modelwright.cli.config import setting_names
from modelwright.cli.parsers import Command, new_parser
from modelwright.cli.processes import Say, is_first, is_started, print_ending, supervise
from modelwright.cli.recipes import recipe_names
from modelwright.core.config import ConfigError, named_stages, read_overrides, split_settings
from modelwright.recipes.display import duration, shown_progress

_FLAGS = ("run-dir", "dry-run", "restart", "stages", "nproc", "board", "help")


def parser() -> argparse.ArgumentParser:
    """Describes the options; `core.config` reads the settings of the run itself."""
    parser = new_parser(
        "run",
        "Bring a run to its end: finished stages are skipped, a stage that was cut off goes on.",
        example="modelwright run quickstart --nproc 2 --training.precision.policy bf16_mixed",
        usage="modelwright run RECIPE|CONFIG.yaml|RUN_DIR [--run-dir DIR] [--dry-run] [--restart] [--stages A,B] "
        "[--nproc N] [--minutes N] [--a.b VALUE ...]",
        notes=(
            "settings:\n"
            "  Every setting that `modelwright config RECIPE` prints can be given by its dotted name:\n"
            "    modelwright run quickstart --name mine --data.sources notes/ more/*.jsonl.zst\n"
            "    modelwright run quickstart --init-from path/to/hf-model --stages clean,pack,sft,evaluate,report\n"
            "  Whole numbers take prefixes: 2M is 2,000,000, 2Mi is 2,097,152; sizes in bytes also 180MiB.\n"
            "\n"
            "sources:\n"
            "  Text: .txt .md .rst .html; code: .py .c ...; records: .jsonl .json .csv .tsv .parquet .arrow; each but\n"
            "  the last two also .gz or .zst. A record is a text (--data.text_field, default: text) or a question\n"
            "  with its answer, on which the stage sft trains. Such a pair has one of these forms (docs/data.md):\n"
            "    question + answer               instruction (+ input) + output      prompt + completion\n"
            '    messages [{"role", "content"}]  conversations [{"from", "value"}]   (prompt +) chosen + rejected\n'
            "    prompt + completion + label     question + choices + answer\n"
            "    input + preferred_output + non_preferred_output\n"
            "\n"
            "several processes:\n"
            "    modelwright run quickstart --nproc 2                              each takes half of every batch\n"
            "    modelwright run quickstart --nproc 4 --parallel.tensor 2          as the section `parallel` says\n"
            "  modelwright launch --help   several hosts, processes that come and go\n"
        ),
    )
    parser.add_argument("target", metavar="RECIPE|CONFIG.yaml|RUN_DIR", help="recipe, settings file or run to work on")
    parser.add_argument("--init-from", metavar="PATH", help="start training from a Hugging Face folder")
    return add_run_options(parser)


def add_run_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options that `carry_out` reads; returns the parser."""
    parser.add_argument("--stages", metavar="A,B", help="work on these stages only")
    parser.add_argument("--run-dir", metavar="DIR", default="", help="folder of the run (default: runs/<name>)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan with its estimates and do nothing")
    parser.add_argument(
        "--restart",
        action="store_true",
        help="replace a run of other sources or of another model in the same folder, and start a training over whose "
        "checkpoints are all damaged (they are kept as *.damaged)",
    )
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="processes on this machine (default: 1)")
    parser.add_argument(
        "--board", action="store_true", help="show the run on a local page until it ends (modelwright board)"
    )
    parser.add_argument(
        "--minutes",
        metavar="N",
        help="limit for the whole run in minutes: steps are timed when it is created, and training takes the number "
        "that fits; 0 trains for the configured lengths",
    )
    return parser


def run(words: Sequence[str]) -> int:
    return run_words(words, ["run", *words], None)


def run_words(words: Sequence[str], line: Sequence[str], hosts: Any) -> int:
    """Run the request in this process or start others that do. line: the whole command line; hosts: the `LaunchConfig`,
    None for processes on this machine only.
    """
    options, settings = _read(words)
    if hosts and options.nproc != 1:
        raise ConfigError("--nproc: is an option of launch; put it before the word run")
    from modelwright.pipeline.run_config import run_schema
    from modelwright.recipes.load import load

    only = named_stages(options.stages)
    request = load(options.target, read_overrides(run_schema(), settings, _FLAGS), options.run_dir, only)
    return carry_out(request, options, line=line, only=only, hosts=hosts)


def carry_out(
    request: Any, options: argparse.Namespace, *, line: Sequence[str], only: Sequence[str] = (), hosts: Any = None
) -> int:
    """Run a `Request` in this process, or start others that do; returns the exit code. options: those of
    `add_run_options`; line: the whole command line, for the processes that are started; only: stages to run, all if
    empty; hosts: the `LaunchConfig`, None for processes on this machine only.
    """
    from modelwright.pipeline.estimate.time_budget import describe_plan
    from modelwright.pipeline.run import check_request, execute

    if options.dry_run or not is_started():
        if not hosts and options.nproc < 1:
            raise ConfigError(f"--nproc: must be at least 1, got {options.nproc}")
        from modelwright.parallel.elastic import LaunchConfig

        # Processes on this machine are not restarted: what ended one would end it again.
        start = hosts or LaunchConfig(processes=options.nproc, max_restarts=0)
        num_processes = start.processes * start.min_hosts
        # Checked before processes are started, each of which would report the same error.
        check_request(
            request.config,
            request.run,
            only,
            num_processes=num_processes,
            elastic=hosts is not None,
            restart=options.restart,
        )
        if options.dry_run:
            plan = describe_plan(
                request.config, request.run, only, num_processes=num_processes, num_hosts=start.min_hosts
            )
            print("\n".join([plan, *request.notes]))
            return 0
        if options.board:
            if find_spec("modelwright_board") is None:
                raise ConfigError("--board: needs modelwright-board; pip install 'modelwright[board]'", code="missing")
            board = ("board", str(request.run.path.parent), "--port", "0", "--exit-with-parent", str(os.getpid()))
            subprocess.Popen([sys.executable, "-m", "modelwright.cli.entry", *board])
        if hosts or num_processes > 1:
            return start_processes(start, line, request.config, request.run, only)
    started = time.monotonic()
    with shown_progress() as display:
        # One process speaks for all: they have the same request.
        for note in request.notes if is_first() else ():
            display.note(note)
        done = execute(
            request.config,
            request.run,
            only=only,
            origin=request.origin,
            words=line,
            progress=display,
            elastic=hosts is not None,
            restart=options.restart,
        )
    if done.is_first:
        print(_summary(done, request, time.monotonic() - started))
    return 0


def start_processes(
    start: Any, line: Sequence[str], config: Any, run: Any, only: Sequence[str] = (), say: Say = print_ending
) -> int:
    """Run the command line in the processes of a `LaunchConfig`, which share this machine's cores, as `supervise` does.
    config, run, only: settings, folder and stages of the run, to find out whether it has finished.
    """
    from modelwright.core.resources import default_num_threads
    from modelwright.pipeline.run import is_finished

    # All processes share the cores, so each gets its part of the threads.
    num_threads = config.hardware.num_threads or default_num_threads()
    return supervise(
        start,
        line,
        threads=max(1, num_threads // start.processes),
        is_done=partial(is_finished, config, run, only),
        say=say,
    )


def _read(words: Sequence[str]) -> tuple[argparse.Namespace, Sequence[tuple[str, list[str]]]]:
    leading, own, settings = split_settings(words, _FLAGS)
    if not leading and "--help" not in own:
        raise ConfigError("run: name a recipe, a YAML file or a run directory first (modelwright recipes lists them)")
    parsed = parser().parse_args([*leading[:1], *own])
    if len(leading) > 1:
        raise ConfigError(f"run: one target at a time, got {' '.join(leading)}")
    return parsed, settings


def _summary(done: Any, request: Any, wall_s: float) -> str:
    ran = [outcome.stage for outcome in done.outcomes if outcome.ran]
    skipped = [outcome.stage for outcome in done.outcomes if not outcome.ran]
    lines = [f"{request.config.name}: finished in {duration(wall_s)}"]
    if ran and ran != request.config.stage_names:
        lines.append(f"  ran      {', '.join(ran)}")
    if skipped:
        lines.append(f"  kept     {', '.join(skipped)}")
    if ran:
        lines += [f"  {line}" for line in done.lines]
    if done.report:
        lines.append(f"  report   {done.report}")
    if done.model:
        lines.append(f"  model    {done.model}")
        lines.append(f"  chat     modelwright chat {request.run.path}")
        lines.append(f"  serve    modelwright serve {request.run.path}")
    if done.model and request.config.text_sources == ("stdlib",):
        lines.append("  next     modelwright run quickstart --name mine --data.sources FOLDER    trains on your text")
    return "\n".join(lines)


COMMAND = Command(
    name="run",
    run=run,
    parser=parser,
    settings=setting_names,
    targets=recipe_names,
    summary="run a recipe, a YAML file, or a run directory again; resumes what was cut off",
    is_resumable=True,
)
