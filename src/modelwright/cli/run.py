"""`modelwright run`: words to a request, the request to the pipeline, the outcome to the terminal."""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from modelwright.cli.display import choose_display, duration
from modelwright.cli.overrides import read_overrides, split_words
from modelwright.core.errors import ConfigError

_FLAGS = ("run-dir", "dry-run", "stages", "help")


def parser() -> argparse.ArgumentParser:
    """Describes the options; settings of the run itself are read by `cli.overrides`."""
    parser = argparse.ArgumentParser(
        prog="modelwright run",
        usage="modelwright run RECIPE|CONFIG.yaml|RUN_DIR [--run-dir DIR] [--dry-run] [--stages A,B] [--a.b VALUE ...]",
        description="Bring a run to its end: finished stages are skipped, a stage that was cut off goes on.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=(
            "settings:\n"
            "  Every setting that `modelwright config RECIPE` prints can be given by its dotted name:\n"
            "    modelwright run quickstart --data.sources notes/ more/*.jsonl.zst --pretrain.num_steps 500\n"
            "    modelwright run quickstart --init-from path/to/hf-model --stages clean,pack,sft,evaluate,report\n"
            "\n"
            "several processes:\n"
            "    torchrun --nproc-per-node 2 -m modelwright.cli.main run quickstart\n"
        ),
    )
    parser.add_argument("target", metavar="RECIPE|CONFIG.yaml|RUN_DIR", help="what to run")
    parser.add_argument("--run-dir", metavar="DIR", default="", help="where the run lies (default: runs/<name>)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan with its estimates and do nothing")
    parser.add_argument("--stages", metavar="A,B", default="", help="work on these stages only")
    parser.add_argument("--init-from", metavar="PATH", help="start training from a Hugging Face folder")
    return parser


def run(words: Sequence[str]) -> int:
    """`modelwright run ...`"""
    options, overrides = _read(words)
    from modelwright.pipeline.execute import execute
    from modelwright.pipeline.plan import describe_plan
    from modelwright.recipes.load import load

    only = tuple(name.strip() for name in options.stages.split(",") if name.strip())
    request = load(options.target, overrides(), options.run_dir)
    if options.dry_run:
        print(describe_plan(request.config, request.run, only))
        return 0
    started = time.monotonic()
    display = choose_display(sys.stderr)
    try:
        done = execute(
            request.config, request.run, only=only, origin=request.origin, words=["run", *words], progress=display
        )
    finally:
        display.end()
    if done.is_first:
        print(_summary(done, request, time.monotonic() - started))
    return 0


def _read(words: Sequence[str]) -> tuple[argparse.Namespace, Any]:
    leading, options = split_words(words)
    own = [(name, values) for name, values in options if name in _FLAGS]
    rest = [(name, values) for name, values in options if name not in _FLAGS]
    spelled = [word for name, values in own for word in (f"--{name}", *values)]
    if any(word in ("-h",) for word in words):
        spelled.append("--help")
    if not leading and not any(word == "--help" for word in spelled):
        raise ConfigError("run: name a recipe, a YAML file or a run directory first (modelwright recipes lists them)")
    parsed = parser().parse_args([*leading[:1], *spelled])
    if len(leading) > 1:
        raise ConfigError(f"run: one target at a time, got {' '.join(leading)}")

    def overrides() -> dict[str, Any]:
        from modelwright.pipeline.config import RunConfig

        return read_overrides(RunConfig, rest)

    return parsed, overrides


def _summary(done: Any, request: Any, wall_s: float) -> str:
    ran = [outcome.stage for outcome in done.outcomes if outcome.ran]
    skipped = [outcome.stage for outcome in done.outcomes if not outcome.ran]
    lines = [f"{request.config.name}: finished in {duration(wall_s)}"]
    if ran:
        lines.append(f"  ran      {', '.join(ran)}")
    if skipped:
        lines.append(f"  kept     {', '.join(skipped)}")
    if request.run.report.exists():
        lines.append(f"  report   {request.run.report}")
    if done.has_model:
        lines.append(f"  chat     modelwright chat {request.run.path}")
        lines.append(f"  serve    modelwright serve {request.run.path}")
    return "\n".join(lines)
