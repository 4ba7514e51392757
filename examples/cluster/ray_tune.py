"""Hyperparameters of a recipe by Ray Tune, on one machine or a cluster: every trial is a `modelwright run` of its own.

    python ray_tune.py quickstart --runs /shared/tune --trials 16 --cpus 4 --pretrain.num_steps=300

It needs `pip install 'modelwright-search[ray]'`. On a cluster, start it on one of the nodes with RAY_ADDRESS=auto and
--runs on a file system that all nodes share. Rows are made once, in <runs>/rows, and trials begin with a copy of them.
A trial whose node is lost begins again on another one, and its run goes on from its last checkpoint.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
from ray import tune

SPACE = {"pretrain.learning_rate": tune.loguniform(1e-3, 1e-2), "pretrain.weight_decay": tune.uniform(0.0, 0.2)}
"""Any settings of the configuration, by their dotted names."""
DATA = ("clean", "tokenize", "pack")
"""The stages that all trials share."""


def modelwright(target: str, run: Path, *words: str) -> None:
    command = [sys.executable, "-m", "modelwright.cli.entry", "run", target, "--run-dir", str(run)]
    subprocess.run([*command, "--stages", ",".join([*DATA, "pretrain"]), *words], check=True)


def train(settings: dict[str, float], *, target: str, runs: Path, words: list[str]) -> None:
    """One trial: what `modelwright run` makes of its settings, and the held-out loss at the end."""
    run = runs / tune.get_context().get_trial_id()
    for stage in DATA:
        shutil.copytree(runs / "rows" / stage, run / stage, dirs_exist_ok=True)
    modelwright(target, run, *words, *(f"--{name}={value}" for name, value in settings.items()))
    manifest = json.loads((run / "pretrain" / "artifact" / "manifest.json").read_text())
    tune.report({"heldout_loss": manifest["facts"]["heldout_loss"], "run": str(run)})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", metavar="RECIPE|CONFIG.yaml")
    parser.add_argument("--runs", type=Path, required=True, metavar="DIR", help="gets a run for each trial")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--cpus", type=float, default=1, help="per trial")
    parser.add_argument("--gpus", type=float, default=0, help="per trial")
    options, words = parser.parse_known_args()
    runs = options.runs.resolve()
    modelwright(options.target, runs / "rows", *words, "--pretrain.num_steps=1")
    trial = tune.with_parameters(train, target=options.target, runs=runs, words=words)
    tuner = tune.Tuner(
        tune.with_resources(trial, {"cpu": options.cpus, "gpu": options.gpus}),
        param_space=SPACE,
        tune_config=tune.TuneConfig(metric="heldout_loss", mode="min", num_samples=options.trials),
        run_config=tune.RunConfig(storage_path=str(runs / "ray"), failure_config=tune.FailureConfig(max_failures=2)),
    )
    best = tuner.fit().get_best_result()
    print(f"lowest held-out loss {best.metrics['heldout_loss']:.4f}: {best.metrics['run']}, {best.config}")


if __name__ == "__main__":
    main()
