"""Runs that a command makes on its way, in processes of their own: several, that may come and go."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from modelwright.cli.run import start_processes
from modelwright.core.errors import ModelwrightError, Stopped

CONFIG_FILE = "launch.yaml"
"""In the run's folder: what its processes read."""
_ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class ProcessesFailed(ModelwrightError):
    """The processes of a run have ended without finishing it."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(frozen=True)
class LaunchedRuns:
    """A `continual.update.CarryOut` as `modelwright launch` would do it: processes that are lost begin again from the
    last checkpoint, with as many copies of the model as divide the rows of a batch. start: a `LaunchConfig`; options:
    the words that stand for it.

    Further hosts join with the same options: `modelwright launch ... run RUN_DIR/launch.yaml --run-dir RUN_DIR`.
    """

    start: Any
    options: Sequence[str]

    def __call__(self, config: Any, run: Any, *, origin: str, words: Sequence[str], progress: Any) -> None:
        """Raises `Stopped` if this process was asked to stop, `ProcessesFailed` for every other end but success."""
        from modelwright.core.config import save_yaml
        from modelwright.pipeline.run import check_request, is_finished

        if is_finished(config, run, ()):
            return
        check_request(config, run, (), num_processes=self.start.processes * self.start.min_hosts, elastic=True)
        path = run.path / CONFIG_FILE
        save_yaml(path, config)
        progress.note(f"{origin}: {self.start.processes} processes train in {run.path}")
        said: list[str] = []

        def say(text: str, exit_code: int) -> int:
            if not exit_code:
                progress.note(text)
            said.append(text)
            return exit_code

        line = ["launch", *self.options, "run", str(path), "--run-dir", str(run.path)]
        code = start_processes(self.start, line, config, run, say=say)
        if code - 128 in _ASKED:
            raise Stopped(said[-1], code - 128)
        if code:
            raise ProcessesFailed(said[-1], code)
