"""Runs of the product's recipe `vision`, side by side for their accuracy, or one after the other for their pace."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelwright.core.config import merge
from modelwright.core.records import column, read_records
from modelwright_claims import product_runs
from modelwright_claims.claim import Setting
from modelwright_claims.experiment import open_cache
from modelwright_claims.product_runs import facts_of, make_run, side_by_side

AT_ONCE = 2
NUM_UNTIMED_STEPS = 3
ROW_TOKENS = 2
"""A row of the recipe is one image."""
QUICK = {"num_epochs": 0.2, "eval_every_steps": 0}


@dataclass(frozen=True, kw_only=True)
class VisionJob:
    """One run. settings: of the stage `vision`, over the recipe's."""

    folder: Path
    arm: str
    seed: int
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    num_threads: int = 1


def accuracies(setting: Setting, arms: Mapping[str, Mapping[str, Any]], seeds: Sequence[int]) -> dict[str, list[float]]:
    """The accuracy in percent on held-out digits by seed, of each arm; two runs at a time, with a thread each."""
    cache = open_cache(setting, product_runs, name="vision")
    jobs = [
        VisionJob(
            folder=setting.folder / "vision",
            arm=arm,
            seed=seed,
            settings=merge(settings, QUICK) if setting.quick else settings,
        )
        for seed in seeds
        for arm, settings in arms.items()
    ]
    keys = [{"seed": job.seed, "settings": dict(job.settings)} for job in jobs]
    missing = [number for number, key in enumerate(keys) if key not in cache]
    for number, accuracy in zip(
        missing, side_by_side(setting, accuracy_of, [jobs[number] for number in missing], at_once=AT_ONCE), strict=True
    ):
        cache[keys[number]] = accuracy
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    for job, key in zip(jobs, keys, strict=True):
        found[job.arm].append(cache[key])
    return found


def accuracy_of(job: VisionJob) -> float:
    """Make one run; its accuracy in percent. A process's whole work."""
    return 100 * float(facts_of(_run(job), "vision")["heldout_images"]["accuracy"])


def paces(
    setting: Setting, arms: Mapping[str, Mapping[str, Any]], *, num_repeats: int, num_threads: int
) -> dict[str, list[float]]:
    """Images per second of each arm, by repeat; the arms of a repeat run one after the other, alone."""
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    for repeat in range(num_repeats):
        for arm, settings in arms.items():
            job = VisionJob(
                folder=setting.folder / "vision-pace", arm=arm, seed=repeat, settings=settings, num_threads=num_threads
            )
            found[arm].append(pace_of(job))
            setting.progress.note(f"{arm}, repeat {repeat + 1}: {found[arm][-1]:.0f} images/s")
    return found


def pace_of(job: VisionJob) -> float:
    """Make one run; the images per second of its median step."""
    rates = column(read_records(_run(job).stage("vision").metrics), "tokens_per_s")
    return statistics.median([rate for _, rate in rates][NUM_UNTIMED_STEPS:]) / ROW_TOKENS


def _run(job: VisionJob):
    settings = {
        "name": "vision",
        "seed": job.seed,
        "hardware": {"device": "cpu", "num_threads": job.num_threads},
        "stages": ["clean", "tokenize", "pack", "vision"],
        "clean": {"num_workers": 1},
        "vision": dict(job.settings),
    }
    return make_run("vision", settings, job.folder / f"{job.arm}-{job.seed}".replace(" ", "-"))
