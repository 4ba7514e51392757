"""Planned and measured peak memory of the recipes' stages, each stage in a process of its own.

    python benchmarks/planned_peaks.py [--cases quickstart finetune lora dpo grpo tools] [--steps 100] [--folder DIR]

Planned is what `--dry-run` says of a stage before it runs; measured is the peak of resident memory while it runs
(VmHWM), the larger of the process and of those that it starts. Shapes are the recipes' own, with less text, on which
only the baselines of the evaluation depend, and with so many steps that the kernels have been compiled that libraries
keep for each shape: 150 steps of the quickstart take 2 MiB more than 100. Memory does not need a quiet machine.
Writes benchmarks/results/planned-peaks-<machine>.json, or to --results.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import RunDir, read_attempts, write_atomic
from modelwright.core.progress import SilentProgress
from modelwright.pipeline.estimate.time_budget import stage_estimates
from modelwright.pipeline.resolve import resolve
from modelwright.pipeline.run_config import previous_config
from modelwright.pipeline.stage import Rates
from modelwright_claims.results import circumstances, machine_slug

RESULTS = Path(__file__).parent / "results"
NO_RATES = Rates(flops_per_s={"fp32": 1.0, "bf16": 1.0})
"""For memory, which no speed changes."""
NUM_EXAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Case:
    """words: of the command line after `modelwright`; stages: those that are compared."""

    words: Sequence[str]
    stages: Sequence[str]
    needs: str = ""
    """The case whose fine-tuned model it starts from."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


CASES = {
    "quickstart": Case(
        words=["run", "quickstart", "--minutes", "0"],
        stages=["pretrain", "sft", "evaluate", "serve_check"],
        settings={"data.stdlib_fraction": 0.1, "evaluate.max_bytes_per_domain": 20_000},
    ),
    "finetune": Case(words=["finetune"], stages=["sft"], needs="quickstart"),
    "lora": Case(words=["finetune", "--lora"], stages=["sft"], needs="quickstart"),
    "dpo": Case(words=["run", "preference"], stages=["dpo"]),
    "grpo": Case(words=["run", "arithmetic"], stages=["grpo"]),
    "tools": Case(words=["run", "tools"], stages=["sft"]),
}


def examples(folder: Path) -> Path:
    """A file of questions and answers of usual lengths."""
    path = folder / "examples.jsonl"
    lines = (
        {"question": f"What is {n} plus {n + 7}?", "answer": f"It is {2 * n + 7}. " + f"Number {n} comes first. " * 12}
        for n in range(NUM_EXAMPLES)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def command(name: str, folder: Path, num_steps: int) -> list[str]:
    case = CASES[name]
    words = list(case.words)
    if case.needs:
        words[1:1] = [str(folder / case.needs), str(examples(folder))]
    words += ["--run-dir", str(folder / name)]
    trained = [stage for stage in ("pretrain", "sft", *case.stages) if stage not in ("evaluate", "serve_check")]
    for stage in dict.fromkeys(trained if not case.needs else case.stages):
        words += [f"--{stage}.num_steps", str(num_steps)]
    for setting, value in case.settings.items():
        words += [f"--{setting}", str(value)]
    return words


def run(words: Sequence[str], stages: Sequence[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "modelwright.cli.entry", *words, "--stages", ",".join(stages)]
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(line)}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")


def peaks(name: str, folder: Path, num_steps: int) -> Iterator[dict[str, Any]]:
    """One record for each stage of the case."""
    case, words, home = CASES[name], command(name, folder, num_steps), RunDir(folder / name)
    # All in one go first: what is packed depends on the stages that learn from it.
    run(words, all_stages(name))
    for stage in case.stages:
        shutil.rmtree(home.path / stage)
        run(words, [stage])
        config = previous_config(home)
        assert config is not None
        estimates, memories = stage_estimates(resolve(config, config, SilentProgress()), home, NO_RATES)
        (planned,) = (one.peak_bytes for one in estimates if one.name == stage)
        attempt = read_attempts(home.stage(stage))[-1]
        measured = max(attempt["peak_bytes"], attempt["child_peak_bytes"])
        yield {
            "case": name,
            "stage": stage,
            "planned_mib": round(planned / 2**20),
            "measured_mib": round(measured / 2**20),
            "error_percent": round(100 * (planned / measured - 1), 1),
            "parts_mib": {part: round(value / 2**20) for part, value in vars(memories[stage]).items() if value}
            if stage in memories
            else {},
        }


def all_stages(name: str) -> list[str]:
    """The compared stages and those before them."""
    if CASES[name].needs:
        return ["clean", "pack", *CASES[name].stages]
    before = ["clean", "tokenize", "pack", "pretrain", "sft"]
    return list(dict.fromkeys([*before, *CASES[name].stages]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="keep the runs here, and go on with those that are there")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)  # before the quarter of an hour of measuring, not after it
    around = circumstances()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        records = []
        for name in options.cases:
            for record in peaks(name, folder, options.steps):
                print(json.dumps(record), flush=True)
                records.append(record)
    worst = max(abs(record["error_percent"]) for record in records)
    print(f"largest error: {worst}%")
    path = options.results / f"planned-peaks-{machine_slug(around['machine'])}.json"
    content = {"benchmark": "planned_peaks", "steps": options.steps, "largest_error_percent": worst, "peaks": records}
    write_atomic(path, json.dumps({**content, **around}, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
