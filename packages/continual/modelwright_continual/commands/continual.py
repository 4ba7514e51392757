"""`modelwright continual freeze|run|gate|demo`: from new texts to a better model in service."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from modelwright.cli.config import setting_names
from modelwright.cli.launch import LAUNCH_FLAGS, add_launch_options, launch_config
from modelwright.cli.parsers import Command, new_parser
from modelwright.cli.processes import is_started
from modelwright.core.config import ConfigError, read_overrides, split_settings
from modelwright.recipes.display import choose_display
from modelwright_continual.commands.launched_runs import LaunchedRuns

KEY_VARIABLE = "MODELWRIGHT_ADMIN_KEY"
REFUSED = 5
"""Exit code if the gate or the A/B test refused the update."""
# Options of `run` itself; all others are settings of the update's run.
_RUN_FLAGS = (
    "benchmark", "run-dir", "old", "replay", "self-replay", "source-cap", "user-cap", "template-cap", "no-average",
    "lora", "champion", "margin", "alpha",
    "max-uses", "drift-reference", "requests", "drift-model", "server", "share", "unit", "min-units", "poll", "current",
    "floor", "schedule", "min-new", "checks", *LAUNCH_FLAGS, "help",
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "continual",
        "Keep a served model up to date: train on new texts with a replay of old ones, let the gate judge the result "
        "on a frozen benchmark, and promote it by an A/B test (docs/continual.md). The same command resumes an "
        "interrupted loop; it exits with 5 if the update was refused.",
        example="modelwright continual run runs/support new.jsonl --benchmark bench --run-dir runs/support-2",
        notes=(
            "Settings of the update's run are options of `run`: --sft.learning_rate 1e-5 --sft.num_epochs 3\n"
            f"The key of the server's administrator is read from {KEY_VARIABLE}.\n"
            "With --nproc N, `run` trains as modelwright launch does: lost processes are restarted.\n"
        ),
    )
    commands = parser.add_subparsers(dest="command", metavar="freeze|run|gate|demo", required=True)
    freeze = commands.add_parser("freeze", help="write a benchmark of old and new tasks", allow_abbrev=False)
    freeze.add_argument("benchmark", metavar="BENCHMARK", type=Path, help="folder to write")
    freeze.add_argument(
        "--old", nargs="+", required=True, metavar="DATA", help="texts of tasks that the model can do already"
    )
    freeze.add_argument("--new", nargs="+", required=True, metavar="DATA", help="texts of tasks to learn")
    run = commands.add_parser("run", help="check drift, update, judge, A/B test and promote", allow_abbrev=False)
    run.add_argument("model", metavar="MODEL", help="model to update: a run directory, its name, or a model folder")
    run.add_argument("sources", metavar="DATA", nargs="+", help="new texts, as in data.sources")
    _add_update_options(run)
    _add_test_options(run)
    _add_schedule_options(run)
    add_launch_options(run)
    gate = commands.add_parser("gate", help="judge the finished update in a run", allow_abbrev=False)
    gate.add_argument("run", metavar="RUN_DIR", type=Path, help="the update's run")
    gate.add_argument("--json", action="store_true", help="print everything as JSON")
    demo = commands.add_parser("demo", help="run the whole loop on texts of this machine", allow_abbrev=False)
    demo.add_argument(
        "--run-dir", metavar="DIR", type=Path, default=Path("runs/continual-demo"), help="folder to write"
    )
    for command in (run, gate):
        command.add_argument(
            "--benchmark",
            metavar="DIR",
            type=Path,
            required=True,
            help="benchmark folder written by `continual freeze`",
        )
        command.add_argument("--champion", metavar="DIR", type=Path, help="model folder in service")
        command.add_argument("--margin", type=float, default=0.02, help="largest allowed loss on old tasks (0.02)")
        command.add_argument(
            "--alpha", type=float, default=0.05, help="largest error probability over all uses of the benchmark (0.05)"
        )
        command.add_argument(
            "--max-uses",
            type=int,
            default=20,
            metavar="N",
            help="maximum number of uses of the benchmark's test half (20)",
        )
    return parser


def _add_update_options(run: argparse.ArgumentParser) -> None:
    add = run.add_argument
    add("--run-dir", metavar="DIR", type=Path, required=True, help="folder of the update's run")
    add("--old", nargs="+", default=[], metavar="DATA", help="texts to replay besides those of MODEL's runs")
    add("--replay", type=float, default=0.05, metavar="SHARE", help="share of old rows among all rows (0.05)")
    for name, default in (("source", 1.0), ("user", 0.05), ("template", 0.01)):
        text = f"largest share of the new texts from one {name} ({default:g}; 1: no cap)"
        add(f"--{name}-cap", type=float, default=default, metavar="SHARE", help=text)
    add("--self-replay", action="store_true", help="replay texts that MODEL generates, if its old texts are gone")
    add("--no-average", action="store_true", help="do not average the weights with those of MODEL")
    add("--lora", action="store_true", help="train low-rank adapters only")
    add(
        "--floor",
        action="store_true",
        help="also train from scratch on old and new texts, for comparison (costs both trainings again)",
    )
    add(
        "--drift-reference", metavar="DIR", type=Path, help="drift reference: update only if --requests drifted from it"
    )
    add("--requests", nargs="+", default=[], metavar="REQUESTS", help="exported requests to compare")
    add("--drift-model", metavar="DIR", type=Path, help="model that the reference was frozen with")


def _add_test_options(run: argparse.ArgumentParser) -> None:
    add = run.add_argument
    add("--server", metavar="URL", default="", help="server to promote on, after an A/B test")
    add("--share", type=float, default=0.1, help="share of units that get the new model (0.1)")
    add("--unit", choices=("session", "user"), default="session", help="unit that is assigned to one arm (session)")
    add("--min-units", type=int, default=1000, metavar="N", help="units in each arm before promotion (1,000)")
    add("--poll", type=float, default=10.0, metavar="S", help="seconds between polls of the test (10)")
    add("--current", metavar="LINK", type=Path, help="symbolic link to move to the promoted model")


def _add_schedule_options(run: argparse.ArgumentParser) -> None:
    add = run.add_argument
    add(
        "--schedule",
        type=float,
        metavar="HOURS",
        help="hours between scheduled updates, each in a folder below --run-dir",
    )
    add("--min-new", type=int, default=1, metavar="N", help="new texts that a scheduled update needs (1)")
    add("--checks", type=int, default=0, metavar="N", help="checks until the schedule ends (0: never)")


def continual(words: Sequence[str]) -> int:
    """`modelwright continual ...`"""
    if list(words[:1]) != ["run"]:
        options = parser().parse_args(words)
        return _COMMANDS[options.command](options)
    leading, own, settings = split_settings(words, _RUN_FLAGS)
    options = parser().parse_args([*leading, *own])
    from modelwright.pipeline.run_config import run_schema

    return _run(options, read_overrides(run_schema(), settings, _RUN_FLAGS), ["continual", *words])


def _freeze(options: argparse.Namespace) -> int:
    from modelwright_continual.benchmark import freeze_benchmark

    benchmark = freeze_benchmark(options.old, options.new, options.benchmark)
    print(f"{options.benchmark}: frozen, sha256 {benchmark.digest}")
    return 0


def _run(options: argparse.Namespace, settings: Mapping[str, Any], line: Sequence[str]) -> int:
    from modelwright.core.artifacts import RunDir
    from modelwright.recipes.load import find_target
    from modelwright_continual.caps import Caps
    from modelwright_continual.loop import LoopRequest, run_loop
    from modelwright_continual.update import UpdateRequest

    if is_started():
        raise ConfigError(
            "continual: runs as one process, which starts the training processes; run it alone, with --nproc N"
        )
    start = launch_config(options)
    update = UpdateRequest(
        model=find_target(options.model),
        new=tuple(options.sources),
        old=tuple(options.old),
        replay=options.replay,
        self_replay=options.self_replay,
        average=not options.no_average,
        lora=options.lora,
        num_processes=start.processes,
        caps=Caps(source=options.source_cap, user=options.user_cap, template=options.template_cap),
        settings=settings,
    )
    request = LoopRequest(
        update=update,
        benchmark=options.benchmark,
        run=RunDir(options.run_dir),
        champion=options.champion,
        gate=_gate_config(options),
        drift=_drift_of(options),
        test=_test_of(options),
        current=options.current,
        floor=options.floor,
        carry_out=_carry_out(start, line),
    )
    display = choose_display(sys.stderr)
    if options.schedule is not None:
        return _schedule(request, options, line, display)
    try:
        result = run_loop(request, words=line, progress=display)
    finally:
        display.end()
    print(result.text)
    return REFUSED if result.ending in ("refused", "rolled_back") else 0


def _carry_out(start: Any, line: Sequence[str]) -> Any:
    """Returns the `CarryOut` for a `LaunchConfig`: in this process if it asks for one process only, else in launched
    ones.
    """
    from modelwright_continual.update import in_this_process

    if start.processes * start.max_hosts == 1:
        return in_this_process
    return LaunchedRuns(start, split_settings(line, LAUNCH_FLAGS)[1])


def _schedule(request: Any, options: argparse.Namespace, line: Sequence[str], display: Any) -> int:
    from modelwright_continual.schedule import HOUR_S, UpdateSchedule, UpdateScheduler

    config = UpdateSchedule(every_s=options.schedule * HOUR_S, min_new=options.min_new, checks=options.checks)
    try:
        state = UpdateScheduler(request=request, config=config, words=line, progress=display).run()
    finally:
        display.end()
    for one in state.history:
        print(f"check {one['check']}: update {one['update']}: {one['ending']}")
    return 0


def _gate(options: argparse.Namespace) -> int:
    import json

    from modelwright.core.artifacts import RunDir
    from modelwright.pipeline.run_config import read_run_config
    from modelwright_continual.benchmark import load_benchmark
    from modelwright_continual.gate.judge import judge
    from modelwright_continual.served import served_folder

    run = RunDir(options.run)
    champion = options.champion or served_folder(Path(read_run_config(run.config).init_from))
    display = choose_display(sys.stderr)
    try:
        verdict = judge(run, champion, load_benchmark(options.benchmark), _gate_config(options), display)
    finally:
        display.end()
    print(json.dumps(verdict.as_json(), indent=1) if options.json else verdict.table())
    return 0 if verdict.passed else REFUSED


def _demo(options: argparse.Namespace) -> int:
    from modelwright.recipes.load import load
    from modelwright_continual.demo.page import write_page
    from modelwright_continual.demo.run import Demo, run_demo

    folder, display = options.run_dir, choose_display(sys.stderr)
    sources = {"data": {"sources": [str((folder / "texts" / "old.jsonl").resolve())]}}
    config = load("continual-demo", sources, str(folder / "first")).config
    words = ["continual", "demo", "--run-dir", str(folder)]
    demo = Demo(folder=folder, config=config, words=words, progress=display)
    try:
        result = run_demo(demo)
    finally:
        display.end()
    page = write_page(demo, result)
    print(f"{result.loop.text}\n{result.floor.table()}")
    print(f"{len(result.failures)} of {result.num_answered + len(result.failures):,} requests failed; report {page}")
    return REFUSED if result.loop.ending in ("refused", "rolled_back") else 0


def _gate_config(options: argparse.Namespace) -> Any:
    from modelwright_continual.gate.judge import GateConfig

    return GateConfig(margin=options.margin, alpha=options.alpha, max_uses=options.max_uses)


def _drift_of(options: argparse.Namespace) -> Any:
    from modelwright_continual.drift_trigger import DriftTrigger

    if bool(options.drift_reference) != bool(options.requests):
        raise ConfigError(
            "--drift-reference: needs --requests, the requests to compare with it, and vice versa; give both"
        )
    if not options.drift_reference:
        return None
    return DriftTrigger(reference=options.drift_reference, requests=tuple(options.requests), model=options.drift_model)


def _test_of(options: argparse.Namespace) -> Any:
    from modelwright.serve.ab.client import AbClient
    from modelwright_continual.loop import AbTest

    if not options.server:
        if options.current:
            raise ConfigError("--current: moves at promotion, which needs a server to test on; add --server URL")
        return None
    client = AbClient(options.server, os.environ.get(KEY_VARIABLE, ""))
    return AbTest(
        client=client,
        share=options.share,
        unit=options.unit,
        min_units=options.min_units,
        poll_s=options.poll,
    )


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "freeze": _freeze,
    "gate": _gate,
    "demo": _demo,
}


COMMAND = Command(
    name="continual",
    run=continual,
    parser=parser,
    settings=setting_names,
    summary="update a served model: train on new texts, judge, test against the old one, promote",
    is_resumable=True,
)
