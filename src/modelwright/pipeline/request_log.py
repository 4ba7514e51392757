"""Finds the request log of a run."""

from pathlib import Path

from modelwright.core.errors import ConfigError
from modelwright.core.rundir import RunDir
from modelwright.pipeline.run_config import read_run_config


def log_of_run(run: RunDir) -> str:
    """Where the run's server keeps its log: its setting, else `requests.sqlite` in its folder. Raises `ConfigError`."""
    configured = read_run_config(run.config).requests.log
    if configured:
        return configured
    path = Path(run.path) / "requests.sqlite"
    if not path.is_file():
        raise ConfigError(
            f"{run.path}: its config names no requests.log, and there is no {path}; give the path of the log"
        )
    return str(path)
