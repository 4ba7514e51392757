"""Runs of the product's own pipeline for claims: a recipe with other settings, in a folder; several side by side."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch

from modelwright.core.artifacts import read_manifest
from modelwright.core.progress import Progress, SilentProgress
from modelwright.core.rundir import RunDir
from modelwright.pipeline.run import execute
from modelwright.recipes.load import load
from modelwright_claims.claim import Setting

Job = TypeVar("Job")
Result = TypeVar("Result")


def make_run(target: str, settings: Mapping[str, Any], folder: Path, progress: Progress | None = None) -> RunDir:
    """Carry out a recipe with other settings in `folder`, or what is left of it."""
    request = load(target, settings, str(folder))
    words = ["run", target, "--run-dir", str(folder)]
    execute(
        request.config, request.run, only=(), origin=request.origin, words=words, progress=progress or SilentProgress()
    )
    return request.run


def facts_of(run: RunDir, stage: str) -> Mapping[str, Any]:
    """The facts of a finished stage."""
    return read_manifest(run.stage(stage).artifact).facts


def side_by_side(setting: Setting, work: Callable[[Job], Result], jobs: Sequence[Job], *, at_once: int) -> list[Result]:
    """The results of jobs in their order, each made in a process with one thread. work: a function of a module."""
    results: list[Result] = []
    setting.progress.begin("runs", len(jobs), "runs")
    with ProcessPoolExecutor(at_once, mp_context=get_context("spawn"), initializer=_use_one_thread) as pool:
        for result in pool.map(work, jobs):
            results.append(result)
            setting.progress.advance(len(results))
    setting.progress.end()
    return results


def _use_one_thread() -> None:
    torch.set_num_threads(1)
