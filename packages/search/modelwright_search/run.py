"""A search from a run's configuration to its report: folder, lock, journal, strategies, winner."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import RunDir, lock_folder, make_folder, read_manifest, save_yaml
from modelwright.core.config import ConfigError, digest, dump
from modelwright.core.progress import Progress
from modelwright.parallel.mesh import single
from modelwright.pipeline.process_group import use_threads
from modelwright.pipeline.report.blocks import plural
from modelwright.pipeline.resolve import resolve
from modelwright.pipeline.run import borrowed_rows
from modelwright.pipeline.run_config import previous_config, read_run_config
from modelwright.pipeline.stage import RunConfig
from modelwright.pipeline.stages.init import folder_fingerprint
from modelwright.pipeline.stages.pack import PACK
from modelwright_search.candidates import JOURNAL, Candidates, Journal, load_for
from modelwright_search.config import SearchConfig
from modelwright_search.result import SearchResult, judge, write_report
from modelwright_search.space import Space, space_of
from modelwright_search.strategies import STANDARD, strategies_of
from modelwright_search.workbench import SearchFinding, SearchStrategy, ServingLimits, Workbench


def train_standard(bench: Workbench) -> None:
    """Trains the run's own model (`SearchStrategy.run`)."""
    bench.try_out(bench.space.standard_choices)


def search(
    config: RunConfig, run: RunDir, wish: SearchConfig, *, words: Sequence[str], progress: Progress, restart: bool
) -> SearchResult:
    """Searches in the folder `search` of `run`, or continues the search in it, and writes its report. restart: discards
    the trials of an earlier search. words: command line, for the record of data that has to be made. Raises
    `ConfigError` for options that do not allow a search, `Stopped` when a training is asked to stop.
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
            for path in (folder / JOURNAL, folder / "config.yaml"):  # everything except for the rows
                path.unlink(missing_ok=True)
            shutil.rmtree(folder / "trainings", ignore_errors=True)
        config = settled(config, run, folder, progress)
        training = config.first_training
        space = space_of(wish.space, config.model, training, config.section(PACK).seq_len)
        if space.changes_shape and config.init_from:
            raise ConfigError("init_from: fixes the shape of the model; search hyperparameters (--space), or clear it")
        strategies = strategies_of(wish.strategies, shapes=space.changes_shape, budget=wish.budget)
        rows = borrowed_rows(config, run, folder, ["search", *words], progress).folder
        journal = Journal(folder / JOURNAL)
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
        own = space.standard.model
        limits = ServingLimits(
            latency_ms=wish.max_latency_ms or candidates.latency_ms(own),
            num_parameters=wish.max_parameters or own.num_parameters,
        )
        searched: dict[str, tuple[Workbench, SearchFinding | None]] = {}
        for strategy in (SearchStrategy(name=STANDARD, run=train_standard), *strategies):
            bench = Workbench(
                strategy=strategy.name,
                space=space,
                candidates=candidates,
                limits=ServingLimits() if strategy.name == STANDARD else limits,  # the run's own model has no limits
                budget=wish.budget,
            )
            searched[strategy.name] = bench, strategy.run(bench)
            losses = [trial.loss for trial in bench.trials if trial.is_full and trial.loss is not None]
            best = f"lowest held-out loss {min(losses):.4f}" if losses else "no training of full length"
            spent = f"{plural(bench.num_trained, 'training')}, {bench.spent:.2f} of {bench.budget:g} spent"
            progress.note(f"{bench.strategy}: {spent}; {best}")
        result = judge(searched, wish, limits)
        write_report(result, folder)
        return result


def settled(config: RunConfig, run: RunDir, folder: Path, progress: Progress) -> RunConfig:
    """Resolves the configuration. Settings that are measured once, such as the fastest number format, come from the
    search that this one continues, or from the run.
    """
    path = folder / "config.yaml"
    previous = read_run_config(path) if path.exists() else previous_config(run)
    config = resolve(config, previous, progress)
    if not path.exists():
        save_yaml(path, config.plain())
    return config


def identity(config: RunConfig, wish: SearchConfig, space: Space, rows: Path) -> dict[str, Any]:
    """Returns everything that decides the trials, except for the strategies: they may be added to a finished search."""
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
