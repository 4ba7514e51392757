"""Experiments: variants of a training run, each at its own tuned setting, compared on paired seeds.

Values are tuned on the seeds of `Tuning` by the loss on the validation split; reported figures come from other seeds
and the test split. Finished runs are kept (`RunCache`), so that an interrupted measurement continues where it stopped.
"""

import hashlib
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

import modelwright
from modelwright.core.artifacts import ArtifactError, write_atomic
from modelwright.core.config import ModelwrightError, digest, dump, set_dotted
from modelwright.core.resources import versions
from modelwright_claims import batches, plain_training, training_run, workbench
from modelwright_claims.claim import Figure, Setting
from modelwright_claims.results import PACKAGES, machine
from modelwright_claims.training_run import Outcome, Run, execute, prepare


class RunCache:
    """Plain data by key, one JSON file each; the key says everything that the value depends on.

    Any thread may read and write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: Any, suffix: str = ".json") -> Path:
        """Return the file that belongs to a key; other suffixes are for what cannot be JSON, such as weights."""
        return self.folder / f"{digest(key)[:24]}{suffix}"

    def __contains__(self, key: Any) -> bool:
        return self.path(key).exists()

    def __getitem__(self, key: Any) -> Any:
        path = self.path(key)
        try:
            return json.loads(path.read_text(encoding="utf-8"))["value"]
        except (ValueError, LookupError, TypeError) as error:
            raise ArtifactError(
                f"{path}: is not the result of a run ({error!r}); delete it to make the run again"
            ) from None

    def __setitem__(self, key: Any, value: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path(key), json.dumps({"key": dump(key), "value": dump(value)}) + "\n")

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the value of a key; make and keep it first where it is missing."""
        if key not in self:
            self[key] = make()
        return self[key]


def setup_digest(modules: Sequence[ModuleType]) -> str:
    """Return 12 digits of the setup that all runs of one measurement share.

    It covers the sources of the product and of these modules, the versions of their dependencies, the machine and the
    number of threads.
    """
    setup = [machine(), torch.get_num_threads(), versions(*PACKAGES)]
    text = hashlib.sha256(json.dumps(setup, sort_keys=True).encode())
    package = Path(modelwright.__file__).parent
    sources = sorted(path for path in package.rglob("*") if path.suffix in (".py", ".cpp", ".h"))
    for module in modules:
        assert module.__file__ is not None
        sources.append(Path(module.__file__))
    for path in sources:
        name = path.relative_to(package) if path.is_relative_to(package) else path.name
        text.update(f"{name}\n".encode())
        text.update(path.read_bytes())
    return text.hexdigest()[:12]


MAX_EXTENSIONS = 8
"""Values that a grid may be extended by until its best one lies inside."""
RUN_SOURCES = (training_run, workbench, batches, plain_training)
"""Modules of this package that determine the steps of a run."""

Execute = Callable[..., Outcome]
Variant = TypeVar("Variant", bound=str)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """A search for the best value of one setting, for each variant separately."""

    values: Sequence[float]
    """At least two values in a geometric order, or one fixed value. If the best value is the first or the last, the
    grid is extended by its own ratio."""
    seeds: Sequence[int]
    """A value is judged by its mean criterion over these seeds. None of them is reported."""
    setting: str = "learning_rate"
    """The learning rate, or the path of a setting in the `TrainConfig`."""
    criterion: Callable[[Outcome], float] = lambda outcome: outcome.final_loss
    """The figure to minimize."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Variants that are compared, by name."""

    variants: Mapping[str, Run]
    """The run of each variant. Its seed is replaced, and its tuned setting where there is one."""
    seeds: Sequence[int]
    tuning: Tuning | None = None
    timed: bool = False
    """True if times are compared. All variants of a seed then run one after another, so that other work on the machine
    affects all of them."""
    at_once: int = 1
    """Runs made at the same time, in processes of their own. Those whose times are compared are made alone."""

    def __post_init__(self) -> None:
        if self.tuning and (both := set(self.seeds) & set(self.tuning.seeds)):
            raise ValueError(f"seeds {sorted(both)} are tuned on and cannot be reported")


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The outcomes of an experiment, by variant."""

    runs: Mapping[str, Sequence[Outcome]]
    """Outcomes, one for each seed."""
    tuning: Mapping[str, Mapping[float, float]]
    """Mean validation loss by value, in ascending order; empty without tuning."""
    tuned: Mapping[str, Run]
    """The variants at their best values."""

    def best(self, variant: str) -> float:
        """Return the value with the lowest loss."""
        return best_value(self.tuning[variant])

    def losses(self, variant: str) -> list[float]:
        """Return the held-out losses at the end, by seed."""
        return [outcome.heldout_loss for outcome in self.runs[variant]]


def run_experiment(setting: Setting, experiment: Experiment, execute: Execute = execute) -> Samples:
    """Tune each variant, then run it at its best value for each seed. execute: makes a single run."""
    runner = Runner(setting, execute)
    tuning, tuned = {}, dict(experiment.variants)
    if experiment.tuning:
        tuning = tune(runner, experiment.variants, experiment.tuning, at_once=experiment.at_once)
        name = experiment.tuning.setting
        tuned = {variant: with_value(run, name, best_value(tuning[variant])) for variant, run in tuned.items()}
    runs: dict[str, list[Outcome]] = {variant: [] for variant in tuned}
    if experiment.timed:
        for seed in experiment.seeds:
            of_seed = [replace(run, seed=seed) for run in tuned.values()]
            for variant, outcome in zip(tuned, runner.timed(of_seed), strict=True):
                runs[variant].append(outcome)
    else:
        pairs = [(variant, replace(run, seed=seed)) for seed in experiment.seeds for variant, run in tuned.items()]
        outcomes = runner.all([run for _, run in pairs], at_once=experiment.at_once)
        for (variant, _), outcome in zip(pairs, outcomes, strict=True):
            runs[variant].append(outcome)
    return Samples(runs=runs, tuning=tuning, tuned=tuned)


def tune(
    runner: "Runner", variants: Mapping[str, Run], tuning: Tuning, *, at_once: int = 1
) -> dict[str, dict[float, float]]:
    """Return the mean validation loss of each variant by value; the lowest lies inside each variant's grid."""

    def losses(tried: Sequence[tuple[str, float]]) -> list[float]:
        runs = [
            replace(with_value(variants[variant], tuning.setting, value), seed=seed, heldout="validation")
            for variant, value in tried
            for seed in tuning.seeds
        ]
        outcomes = iter(runner.all(runs, at_once=at_once))
        return [statistics.fmean(tuning.criterion(next(outcomes)) for _ in tuning.seeds) for _ in tried]

    return tune_grids(dict.fromkeys(variants, tuning.values), losses, tuning.setting)


def tune_grids(
    grids: Mapping[Variant, Sequence[float]],
    losses: Callable[[Sequence[tuple[Variant, float]]], Sequence[float]],
    setting: str,
) -> dict[Variant, dict[float, float]]:
    """Return the loss of each variant by value, in ascending order. losses: of variants at values; setting: its name.

    A grid whose best value is its first or last one is extended by its own ratio. Raises `ModelwrightError` when the
    best is still at an edge after `MAX_EXTENSIONS` more values.
    """
    found: dict[Variant, dict[float, float]] = {variant: {} for variant in grids}
    missing: Mapping[Variant, Sequence[float]] = grids
    for _ in range(MAX_EXTENSIONS + 1):
        tried = [(variant, value) for variant, values in missing.items() for value in values]
        for (variant, value), loss in zip(tried, losses(tried), strict=True):
            found[variant][value] = loss if math.isfinite(loss) else math.inf
        missing = {variant: more for variant, of_variant in found.items() if (more := beyond(of_variant))}
        if not missing:
            return {variant: dict(sorted(of_variant.items())) for variant, of_variant in found.items()}
    variant = next(iter(missing))
    raise ModelwrightError(
        f"{variant}: the best {setting} is still at the edge of {sorted(found[variant])}; start elsewhere"
    )


def beyond(losses: Mapping[float, float]) -> list[float]:
    """Return the value to try next to the best one when that is the first or last of its grid; nothing otherwise."""
    values, best = sorted(losses), best_value(losses)
    if len(values) == 1 or best not in (values[0], values[-1]):
        return []
    neighbor = values[1] if best == values[0] else values[-2]
    return [float(f"{best * best / neighbor:.3g}")]


def best_value(losses: Mapping[float, float]) -> float:
    """Return the value with the lowest loss."""
    return min(losses, key=losses.__getitem__)


def best_rate(samples: Mapping[str, Sequence[float]], arm: str) -> Figure:
    """Return the rate that an arm was tuned to, of a record with `rates, ARM` and the losses at them, `tuning, ARM`."""
    losses = dict(zip(samples[f"rates, {arm}"], samples[f"tuning, {arm}"], strict=True))
    return Figure(value=best_value(losses), unit="")


def with_value(run: Run, setting: str, value: float) -> Run:
    """Return a run with another value of one setting."""
    if setting == "learning_rate":
        return replace(run, size=replace(run.size, learning_rate=value))
    settings = dict(run.settings)
    section = setting.partition(".")[0]
    if isinstance(settings.get(section), dict):
        settings[section] = dict(settings[section])
    set_dotted(settings, setting, value)
    return replace(run, settings=settings)


def open_cache(setting: Setting, *sources: ModuleType, name: str = "measured") -> RunCache:
    """Return the cache of what these modules and the product make.

    A quick measurement keeps nothing beyond its call.
    """
    folder = setting.folder / "runs" if setting.quick or setting.kept is None else setting.kept
    return RunCache(folder / f"{name}-{setup_digest(sources)}")


class Runner:
    """Makes runs, each once: a run that an earlier call finished with the same sources on this machine is kept."""

    def __init__(self, setting: Setting, execute: Execute = execute) -> None:
        self.setting = setting
        self.execute = execute
        self.cache = open_cache(setting, *RUN_SOURCES, sys.modules[execute.__module__], name=execute.__name__)

    def all(self, runs: Sequence[Run], *, at_once: int = 1) -> list[Outcome]:
        """Make the runs that are missing and return all outcomes, in order."""
        self.make_weights([run for run in runs if run not in self.cache], at_once=at_once)
        self.make([run for run in runs if run not in self.cache], keep=False, at_once=at_once)
        return [self.outcome(run) for run in runs]

    def timed(self, runs: Sequence[Run]) -> list[Outcome]:
        """Return the outcomes of runs that are compared by time: made one after the other, unless all are kept."""
        if any(run not in self.cache for run in runs):
            self.make_weights(runs)
            self.make(runs, keep=False, at_once=1)
        return [self.outcome(run) for run in runs]

    def weights(self, run: Run) -> Path:
        """Return the file of a run's last weights."""
        return self.cache.path(run, ".safetensors")

    def outcome(self, run: Run) -> Outcome:
        return Outcome(**self.cache[run])

    def keep(self, runs: Sequence[Run], *, at_once: int = 1) -> None:
        """Make those of the runs that are missing, with their last weights."""
        missing = [run for run in runs if run not in self.cache or not self.weights(run).exists()]
        self.make_weights(missing, at_once=at_once)
        self.make(missing, keep=True, at_once=at_once)

    def make_weights(self, runs: Sequence[Run], *, at_once: int = 1) -> None:
        """Make the weights that these runs start from, where they are missing."""
        bases = [run.start_from for run in runs if run.start_from is not None]
        self.make([base for base in bases if not self.weights(base).exists()], keep=True, at_once=at_once)

    def make(self, runs: Sequence[Run], *, keep: bool, at_once: int) -> None:
        """Make each of these runs once, with `keep` its last weights too. The weights that they start from exist."""
        if at_once > 1 and not all(run.processes.threads for run in runs):
            raise ValueError("runs that are made at the same time need processes of their own")
        self.cache.folder.mkdir(parents=True, exist_ok=True)

        def one(run: Run) -> None:
            begin = self.weights(run.start_from) if run.start_from else None
            outcome = self.execute(self.setting, run, begin=begin, keep=self.weights(run) if keep else None)
            self.cache[run] = outcome
            self.setting.progress.note(f"{describe(run)}: {outcome.diverged or f'{outcome.heldout_loss:.4f}'}")

        different = {self.cache.path(run): run for run in runs}.values()
        if at_once == 1:  # in the main thread, which is where a user's runs train, too
            for run in different:
                one(run)
            return
        for run in different:
            prepare(self.setting, run)  # so that no two runs make the same rows
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(one, different))


def describe(run: Run) -> str:
    """Describe a run in one line for the progress display."""
    return f"{run.settings or run.loop}, {run.size.num_steps} steps at {run.size.learning_rate:g}, seed {run.seed}"
