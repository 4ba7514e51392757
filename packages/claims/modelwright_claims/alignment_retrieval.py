"""Claim: contrastive alignment finds the right image and the right code for a text, beyond chance and bags of words.

The product's recipe `multimodal` up to its stage align: scikit-learn's digits with written captions, and functions of
this machine's libraries with their docstrings, held out by image and by module. Runs with and without modality weights
(a share for each modality by its score) differ in nothing else.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelwright.core.artifacts import save_yaml
from modelwright.core.config import load_yaml
from modelwright.recipes.load import RECIPES
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared
from modelwright_claims.judging import Judgment
from modelwright_claims.product_runs import SeedJob, by_seed, facts_of, make_run, shared_settings
from modelwright_claims.statistics import differences

TASKS = {"text to image": "image: text to image", "text to code": "code: text to code"}
"""The tasks of the claim, by the names that the stage gives them."""
RANKS = {"recall@1": "at_1", "recall@5": "at_5"}
METHODS = {"aligned": "model", "chance": "chance", "bag of words": "bag_of_words"}
ON, OFF = "weights on", "weights off"
WEIGHTS: Mapping[str, Mapping[str, Any]] = {ON: {"update": "scores", "weights": {"code": 0.7, "image": 0.3}}, OFF: {}}
"""Settings of the mixture; without any, every pair comes as often as every other."""


@dataclass(frozen=True, kw_only=True)
class AlignJob(SeedJob):
    """A single run. weights: one of `WEIGHTS`."""

    weights: str


SEEDS = range(3, 9)
"""Seeds 0 to 2 did not separate images from chance; these were fixed after that, and none of those is reused."""


def measure(setting: Setting) -> Measurement:
    seeds = SEEDS[: 1 if setting.quick else None]
    jobs = [
        AlignJob(folder=setting.folder / "alignment", seed=seed, weights=weights, quick=setting.quick)
        for seed in seeds
        for weights in WEIGHTS
    ]
    made = list(zip(jobs, by_seed(setting, align, jobs, sys.modules[__name__], name="alignment"), strict=True))
    return measurement({weights: [found for job, found in made if job.weights == weights] for weights in WEIGHTS})


def align(job: AlignJob) -> Mapping[str, Any]:
    """Make one run; its recall by task. A process's whole work."""
    settings = shared_settings(job) | {
        "name": "alignment", "stages": ["clean", "tokenize", "pack", "pretrain", "align"],
    }  # fmt: skip
    if job.quick:
        short = {"num_steps": 4, "eval_every_steps": 2}
        settings |= {"data": {"stdlib_fraction": 0.05}, "pretrain": {"num_steps": 4}, "align": short}
    recipe = load_yaml(RECIPES["multimodal"])
    recipe["align"]["batching"] = {"mixture": dict(WEIGHTS[job.weights])}
    folder = job.folder / f"{job.weights}-{job.seed}".replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder.with_suffix(".yaml")
    save_yaml(file, recipe)
    run = make_run(str(file), settings, folder)
    return facts_of(run, "align")["retrieval"]["recall"]


def measurement(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> Measurement:
    """found: recall by task of every run, by weights."""
    samples: dict[str, list[float]] = {}
    for weights, runs in found.items():
        for task, name in TASKS.items():
            for method, key in METHODS.items():
                for rank, place in RANKS.items():
                    values = [100 * float(run[name][key][place]) for run in runs]
                    samples[f"{task}, {rank}, {method}, {weights}"] = values
    first = next(iter(found.values()))[0]
    conditions: Conditions = {
        "seeds": len(next(iter(found.values()))),
        **{f"{task}: queries": int(first[name]["num_queries"]) for task, name in TASKS.items()},
        **{f"{task}: candidates": int(first[name]["num_candidates"]) for task, name in TASKS.items()},
        "recipe": "multimodal up to align",
        "modality weights": "shares softmax(2 score) with scores 0.7 (code) and 0.3 (images), against shares by size",
        "bag of words": "TF-IDF; an image is described by the caption of the training image with the nearest pixels",
        "pairs": "digits with captions, held out by image; functions with docstrings, held out by module",
    }
    return Measurement(samples=samples, conditions=conditions)


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()
    for name in (f"{task}, {rank}" for task in TASKS for rank in RANKS):
        with judgment.part():
            own = samples[f"{name}, aligned, {ON}"]
            for rival in ("chance", "bag of words"):
                gain = differences(own, samples[f"{name}, {rival}, {ON}"])
                judgment.ask("", gain, "points", ">", 0.0, what=f"{name} over {rival}")
        judgment.ask(
            f"{name}, weights on over off",
            lambda name=name: differences(samples[f"{name}, aligned, {ON}"], samples[f"{name}, aligned, {OFF}"]),
            "points",
        )
        judgment.show(samples, {f"{name}, {method}": f"{name}, {method}, {ON}" for method in METHODS}, "%")
    with judgment.part():
        for task in TASKS:
            means = {method: statistics.fmean(samples[f"{task}, recall@1, {method}, {ON}"]) for method in METHODS}
            shown = ", ".join(f"{method} {mean:.1f}%" for method, mean in means.items())
            judgment.said.append(f"{task} among {conditions[f'{task}: candidates']}: {shown}")
    return judgment.verdict()


CLAIM = declared(__name__)
