"""One search from a run's configuration to its report: folder, lock, journal, strategies, winner."""

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import make_folder, read_manifest
from modelwright.core.config import digest, dump, save_yaml
from modelwright.core.errors import ConfigError
from modelwright.core.progress import Progress
from modelwright.core.rundir import RunDir, lock_folder
from modelwright.parallel.mesh import single
from modelwright.pipeline.borrowed_rows import borrowed_rows
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.process_group import use_threads
from modelwright.pipeline.report.format import plural
from modelwright.pipeline.resolve import resolve
from modelwright.pipeline.run import previous_config
from modelwright.pipeline.run_config import read_run_config
from modelwright.pipeline.stages.model_folder import folder_fingerprint
from modelwright.pipeline.stages.pack import PACK
from modelwright.search.candidates import Candidates
from modelwright.search.journal import FILE, Journal
from modelwright.search.latency import load_for
from modelwright.search.report import write_report
from modelwright.search.result import Searched, SearchResult, judge
from modelwright.search.space import Space, space_of
from modelwright.search.strategy import SearchStrategy
from modelwright.search.strategy_list import strategies_of
from modelwright.search.trial import ServingLimits
from modelwright.search.workbench import Workbench

STANDARD = "standard"
"""The name under which the run's own shape and settings take part."""


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """What a search may spend and what its winner may need."""

    budget: float = 8.0
    """Training cost of each strategy, in trainings of the run's own model."""
    num_steps: int = 200
    """Updates of a training of full length, at the run's own batch."""
    max_latency_ms: float = 0.0
    """Limit for a decoded token; 0 is the latency of the run's own model."""
    max_parameters: int = 0
    """Limit; 0 is the number of the run's own model."""
    num_streams: int = 1
    """Answers that are decoded at once while latency is measured."""
    space: str = "architecture"
    """One of `SPACES`, or a YAML file with other values."""
    strategies: tuple[str, ...] = ()
    """Names from `STRATEGIES`; () takes those of `DEFAULT`."""
    num_repetitions: int = 1
    """Trainings with other seeds of each strategy's best candidate, of which the winner is chosen."""

    def __post_init__(self) -> None:
        for name, option in (("budget", "--budget"), ("max_latency_ms", "--max-latency-ms")):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{option}: must be finite and not negative, got {getattr(self, name):g}")
        if self.budget < 1.0:
            raise ConfigError(f"--budget: must be at least 1, one training of the run's own model, got {self.budget:g}")
        least = {"num_steps": 2, "num_streams": 1, "max_parameters": 0, "num_repetitions": 0}
        options = {"num_steps": "--steps", "num_repetitions": "--repetitions", "num_streams": "--streams"}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                option = options.get(name, "--max-parameters")
                raise ConfigError(f"{option}: must be at least {smallest}, got {getattr(self, name)}")


def search(
    config: RunConfig, run: RunDir, wish: SearchConfig, *, words: Sequence[str], progress: Progress, restart: bool
) -> SearchResult:
    """Search in `run`'s folder `search`, or go on with a search that is there, and write its report. restart: throw
    away what is there. words: the command line, for the record of data that has to be made. Raises `ConfigError` for
    wishes that make no search, `Stopped` when a training is asked to stop.
    """
    if not config.trainings:
        raise ConfigError("stages: none of them trains, so there is nothing to search; add one that does")
    first = config.trainings[0]
    assert first.rows is not None
    if first.rows.learned != "tokens":
        raise ConfigError(
            f"stages: {first.name} learns from {first.rows.learned}, and a search compares language models; name a "
            "stage that learns from text before it"
        )
    folder = run.path / "search"
    make_folder(folder)
    with lock_folder(folder, "this search; wait for it or choose another --run-dir"):
        if restart:
            remove_results(folder)
        config = settled(config, run, folder, progress)
        training = config.first_training
        space = space_of(wish.space, config.model, training, config.section(PACK).seq_len)
        if space.changes_shape and config.init_from:
            raise ConfigError("init_from: fixes the shape of the model; search hyperparameters (--space), or clear it")
        strategies = strategies_of(wish.strategies, shapes=space.changes_shape)
        rows = borrowed_rows(config, run, folder, ["search", *words], progress).folder
        journal = Journal(folder / FILE)
        journal.check_identity(identity(config, wish, space, rows), folder)
        use_threads(config.hardware.num_threads)
        candidates = Candidates(
            config=config,
            rows=rows,
            folder=folder,
            num_tokens=wish.num_steps * training.batch_tokens,
            load=load_for(config.model, config.serve.engine, wish.num_streams),
            world=single(config.hardware.device),
            journal=journal,
            progress=progress,
        )
        if not candidates.heldout():
            raise ConfigError(
                "data.validation_fraction: no rows are held out, so that candidates cannot be compared; raise it"
            )
        limits = limits_of(candidates, space, wish)
        searched = run_strategies([own_model(), *strategies], candidates, space, limits, wish)
        result = judge(searched, candidates, limits, wish.num_repetitions)
        write_report(result, folder)
        return result


def settled(config: RunConfig, run: RunDir, folder: Path, progress: Progress) -> RunConfig:
    """The configuration with what is measured once, such as the fastest number format, taken from the search that this
    one goes on with, or from the run.
    """
    path = folder / "config.yaml"
    previous = read_run_config(path) if path.exists() else previous_config(run)
    config = resolve(config, previous, progress)
    if not path.exists():
        save_yaml(path, config.plain())
    return config


def remove_results(folder: Path) -> None:
    """What a search has left, except for the rows."""
    for path in (folder / FILE, folder / "config.yaml"):
        path.unlink(missing_ok=True)
    for name in ("trainings", "supernet"):
        shutil.rmtree(folder / name, ignore_errors=True)


def identity(config: RunConfig, wish: SearchConfig, space: Space, rows: Path) -> dict[str, Any]:
    """What decides the trials. Strategies may be added to a search that has ended."""
    start = folder_fingerprint(Path(config.init_from), "init_from") if config.init_from else []
    return {
        "--budget": wish.budget,
        "--steps": wish.num_steps,
        "--max-latency-ms": wish.max_latency_ms,
        "--max-parameters": wish.max_parameters,
        "--streams": wish.num_streams,
        "--space": {axis.name: list(axis.values) for axis in space.axes},
        "seed": config.seed,
        "model": digest(dump(config.model, constants=True)),
        "model in init_from": digest(start),
        "section of the first training": digest(config.first_training.identity()),
        "section serve.engine": digest(dump(config.serve.engine)),
        "set of packed rows": read_manifest(rows.parent).content_digest,
    }


def limits_of(candidates: Candidates, space: Space, wish: SearchConfig) -> ServingLimits:
    """The wishes, or what the run's own model needs."""
    shape = space.standard.model
    latency_ms = candidates.latency_ms(shape)
    return ServingLimits(
        latency_ms=wish.max_latency_ms or latency_ms,
        num_parameters=wish.max_parameters or shape.num_parameters,
    )


def run_strategies(
    strategies: Sequence[SearchStrategy],
    candidates: Candidates,
    space: Space,
    limits: ServingLimits,
    wish: SearchConfig,
) -> list[Searched]:
    """Each strategy in turn, with a budget of its own."""
    searched: list[Searched] = []
    for strategy in strategies:
        bench = Workbench(strategy=strategy.name, space=space, candidates=candidates, limits=limits, budget=wish.budget)
        strategy.run(bench)
        searched.append(Searched(strategy, bench))
        candidates.progress.note(_summary(bench))
    return searched


def own_model() -> SearchStrategy:
    """The run's own shape and settings, trained once, whatever the limits."""
    return SearchStrategy(name=STANDARD, summary="the run's own model", run=try_own, is_baseline=True)


def try_own(bench: Workbench) -> None:
    """`SearchStrategy.run` of the run's own model."""
    bench.try_standard()


def _summary(bench: Workbench) -> str:
    losses = [trial.loss for trial in bench.trials if trial.is_full and trial.loss is not None]
    best = f"lowest held-out loss {min(losses):.4f}" if losses else "no training of full length"
    spent = f"{plural(bench.num_trained, 'training')}, {bench.spent:.2f} of {bench.budget:g} spent"
    return f"{bench.strategy}: {spent}; {best}"
