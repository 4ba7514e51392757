"""What makes two configurations the same run: their sources and the model that is trained."""

from typing import Any

from modelwright.core.artifacts import is_finished
from modelwright.core.config import dump
from modelwright.core.errors import ConfigError
from modelwright.core.redact import redact_text
from modelwright.core.rundir import RunDir
from modelwright.pipeline.config import RunConfig

SHOWN = 3
"""Differences that an error lists."""


def is_same_run(config: RunConfig, previous: RunConfig) -> bool:
    """Whether both, with their paths and models resolved, describe one run."""
    return not _differences(config, previous)


def check_same_run(config: RunConfig, previous: RunConfig | None, run: RunDir) -> None:
    """Raise `ConfigError` if `run` has results of another run, which this one would replace.

    config: with paths and model resolved
    previous: the configuration that the folder was last used with, None for a new folder
    """
    changes = _differences(config, previous) if previous else []
    if not changes or not has_results(run):
        return
    more = [f"{len(changes) - SHOWN} more"] if len(changes) > SHOWN else []
    raise ConfigError(
        f"{run.path}: contains another run ({'; '.join([*changes[:SHOWN], *more])}); choose another --run-dir, or "
        "replace that run with --restart"
    )


def has_results(run: RunDir) -> bool:
    """Whether a stage has finished or a training has checkpoints."""
    stages = [run.stage(path.parent.name) for path in run.path.glob("*/stage.json")]
    return any(is_finished(stage.artifact) or any(stage.checkpoints.glob("*")) for stage in stages)


def _differences(config: RunConfig, previous: RunConfig) -> list[str]:
    """Each differing setting, as `model.num_layers: was 6, now 2`."""
    before, now = _identity(previous), _identity(config)
    keys = dict.fromkeys([*before, *now])
    return [f"{key}: was {_text(before[key])}, now {_text(now[key])}" for key in keys if before[key] != now[key]]


def _identity(config: RunConfig) -> dict[str, Any]:
    model = {f"model.{name}": value for name, value in dump(config.model).items()}
    data = {"rows_from": config.rows_from} if config.rows_from else {"data.sources": dump(config.data)["sources"]}
    return {"rows_from": "", "data.sources": [], **data, "init_from": config.init_from, **model}


def _text(value: Any) -> str:
    words = value if isinstance(value, list) else [value]
    return redact_text(" ".join(map(str, words))) or "''"
